"""Real jobs: exit codes, the first failure, restarts, files, and the end of a killed launcher."""

from __future__ import annotations

import fcntl
import os
import re
import select
import shlex
import signal
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from clocks import soon, takes

from nc10d.run.launch_options import DEFAULT_GRACE

Launch = Callable[..., "subprocess.CompletedProcess[Any]"]
Start = Callable[..., "subprocess.Popen[str]"]
Script = Callable[[str], str]

PATIENCE = 60.0
"""Seconds to wait for an event that must happen, where the law sets no time."""
LAUNCHER = [sys.executable, "-m", "nc10d.run"]

# FAIL: rank 1 fails by `how`; the others wait for ever. WAIT: each rank and its child wait.
FAIL = """
    import os, signal, sys
    rank = int(os.environ["RANK"])
    print("rank", rank, "is here")
    print("about to fail" if rank == 1 else "waiting", file=sys.stderr)
    if rank == 1:
        {how}
    signal.pause()
"""
WAIT = """
    import os, signal, subprocess, sys
    {before}
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    print("pids", os.getpid(), child.pid)
    signal.pause()
"""
IGNORE_SIGINT = "signal.signal(signal.SIGINT, signal.SIG_IGN)"
IGNORE_SIGTERM = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"


def pids_of(launcher: subprocess.Popen[str], ranks: int) -> list[int]:
    """Return the ids of all ranks and their children, once every rank has printed them."""
    assert launcher.stdout is not None
    lines = [launcher.stdout.readline() for _ in range(ranks)]
    return [int(word) for line in lines for word in re.findall(r"\d+", line.split("pids")[1])]


def _full(pipe: int) -> bool:
    """Return whether a pipe holds as much as it can, less a page."""
    held = fcntl.ioctl(pipe, termios.FIONREAD, b"\0" * 4)
    return int.from_bytes(held, sys.byteorder) > fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ) - 8192


def wait_for_ends(pids: list[int]) -> bool:
    """Wait for the end of processes that are not our children; return whether all ended."""
    deadline = time.monotonic() + PATIENCE
    for pid in pids:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        ended = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]
        os.close(fd)
        if not ended:
            return False
    return True


def test_a_successful_job_ends_with_0(launch: Launch, script: Script) -> None:
    done = launch("--nproc-per-node", "3", script("print('hello')"))
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == [f"[rank {r}] hello" for r in range(3)]
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("how", "code", "words"),
    [
        ("sys.exit(7)", 7, "exit code 7"),
        ("raise ValueError('boom')", 1, "exit code 1"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "SIGKILL"),
        ("os.abort()", 134, "SIGABRT"),
    ],
)
def test_the_first_failure_is_reported_and_ends_the_others(
    launch: Launch, script: Script, how: str, code: int, words: str
) -> None:
    done = launch("--nproc-per-node", "3", script(FAIL.format(how=how)))
    assert done.returncode == code
    assert done.stderr.count("nc10d-run: rank ") == 1
    assert f"nc10d-run: rank 1 failed with {words} (local rank 1, host " in done.stderr
    assert done.stderr.endswith("boom\n" if "boom" in how else "    about to fail\n")
    assert done.stdout.count("is here") >= 1


def test_a_secondary_failure_is_not_reported_for_its_cause(launch: Launch, script: Script) -> None:
    path = script("""
        import os, sys
        from nc10d.errors import PeerLost
        if os.environ["RANK"] == "0":
            held = open(sys.argv[1], "w")  # until this process ends
            raise PeerLost("rank 1 is gone")
        with open(sys.argv[1]) as other:
            other.read()
        raise ValueError("the cause, raised late")
    """)
    fifo = str(Path(path).with_name("fifo"))
    os.mkfifo(fifo)
    done = launch("--nproc-per-node", "2", path, fifo)
    assert "nc10d-run: rank 1 failed" in done.stderr
    assert "nc10d-run: rank 0" not in done.stderr


def test_a_rank_that_ignores_sigterm_is_killed_after_the_grace(
    launch: Launch, script: Script
) -> None:
    path = script(f"""
        import os, signal, sys
        {IGNORE_SIGTERM}
        ignoring = __file__ + ".ignoring"
        if os.environ["RANK"] == "1":
            while not os.path.exists(ignoring):
                pass
            os.remove(ignoring)
            sys.exit(3)
        open(ignoring, "w").close()
        signal.pause()
    """)

    def ask() -> None:
        done = launch("--nproc-per-node", "2", "--grace-period", "0.3", path)
        assert done.returncode == 3

    assert takes(ask, 0.3, DEFAULT_GRACE)


def test_a_failed_job_is_restarted_with_a_new_count(launch: Launch, script: Script) -> None:
    path = script("""
        import os, sys
        count = os.environ["NC10D_RESTART_COUNT"]
        assert count == os.environ["TORCHELASTIC_RESTART_COUNT"]
        print("life", count)
        sys.exit(5 if count < sys.argv[1] else 0)
    """)
    well = launch("--nproc-per-node", "2", "--max-restarts", "2", path, "2")
    assert well.returncode == 0
    assert well.stdout.count("] life 2") == 2
    assert "restart 2 of 2" in well.stderr
    badly = launch("--nproc-per-node", "1", "--max-restarts", "1", path, "9")
    assert badly.returncode == 5
    assert badly.stdout.splitlines() == ["[rank 0] life 0", "[rank 0] life 1"]


@pytest.mark.parametrize("ranks", [1, 3])
def test_without_prefix_no_byte_is_changed(launch: Launch, script: Script, ranks: int) -> None:
    line = "y" * 300_000
    path = script(f"import sys; sys.stdout.write('one\\rtwo\\n' + 'y' * {len(line)} + '\\n')")
    done = launch("--nproc-per-node", str(ranks), "--no-prefix", path, text=False)
    lines = done.stdout.replace(line.encode(), b"y").splitlines(keepends=True)
    assert sorted(lines) == sorted([b"one\r", b"two\n", b"y\n"] * ranks)


def test_a_long_line_stays_one_line_behind_its_prefix(launch: Launch, script: Script) -> None:
    done = launch("--nproc-per-node", "2", script("print('y' * 300_000)"))
    assert sorted(done.stdout.splitlines()) == [f"[rank {r}] " + "y" * 300_000 for r in range(2)]


def test_a_full_disk_ends_the_ranks_in_order(
    environment: dict[str, str], script: Script, tmp_path: Path
) -> None:
    path = script("""
        import signal, sys, time
        def end(*_):
            open(sys.argv[1], "w").close()
            sys.exit(0)
        signal.signal(signal.SIGTERM, end)
        print("hello")
        while True:
            time.sleep(0.05)
    """)
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*LAUNCHER, "--max-restarts", "3", path, str(tmp_path / "saved")],
            env=environment,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=PATIENCE,
        )
    assert done.returncode == 1
    assert done.stderr == (
        "nc10d-run: cannot write to stdout: No space left on device; the ranks were ended\n"
    )
    assert (tmp_path / "saved").exists()


def test_a_folder_of_logs_that_cannot_be_made_is_named(launch: Launch, script: Script) -> None:
    done = launch("--log-dir", "/dev/full/logs", script("print('never')"))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(
        "nc10d-run: cannot write logs: [Errno 20] Not a directory: '/dev/"
    )


def test_output_is_kept_in_files_on_request(launch: Launch, script: Script, tmp_path: Path) -> None:
    path = script("import sys; print('out'); print('err', file=sys.stderr)")
    words = ["--nproc-per-node", "2", "--rdzv-id", "job", "--log-dir", str(tmp_path)]
    done = launch(*words, "--redirects", "2", path)
    assert sorted(done.stdout.splitlines()) == ["[rank 0] out", "[rank 1] out"]
    assert done.stderr == ""
    folder = tmp_path / "job" / "attempt_0" / "rank_1"
    assert (folder / "stdout.log").read_text() == "out\n"
    assert (folder / "stderr.log").read_text() == "err\n"


def test_modules_and_programs_can_be_launched(launch: Launch) -> None:
    assert launch("-m", "platform").stdout.startswith("[rank 0] Linux")
    done = launch("--nproc-per-node", "2", "--no-python", "sh", "-c", "echo $RANK of $WORLD_SIZE")
    assert sorted(done.stdout.splitlines()) == ["[rank 0] 0 of 2", "[rank 1] 1 of 2"]


def test_a_program_that_cannot_be_started_is_an_error(launch: Launch) -> None:
    done = launch("--no-python", "/nowhere/at/all")
    assert done.returncode == 127
    assert "cannot start the ranks" in done.stderr


def test_a_limit_on_descriptors_that_is_too_low_is_named(environment: dict[str, str]) -> None:
    words = shlex.join([*LAUNCHER, "--nproc-per-node", "16", "--no-python", "cat"])
    done = subprocess.run(
        ["sh", "-c", f"ulimit -n 20; exec {words}"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 127
    assert re.search(r"Too many open files.*; raise the limit, ulimit -n\n$", done.stderr)


def test_a_port_that_is_taken_is_an_error(launch: Launch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        done = launch("--master-port", str(port), "--no-python", "true")
    assert done.returncode == 1
    assert "nc10d-run: cannot host the store: " in done.stderr
    assert str(port) in done.stderr


def test_the_first_rank_inherits_input_from_a_pipe(
    environment: dict[str, str], script: Script
) -> None:
    path = script("import sys; print(repr(sys.stdin.read()))")
    words = ["--nproc-per-node", "2", path]
    done = subprocess.run(
        [*LAUNCHER, *words],
        env=environment,
        input="data",
        capture_output=True,
        text=True,
        check=True,
    )
    assert sorted(done.stdout.splitlines()) == ["[rank 0] 'data'", "[rank 1] ''"]


@pytest.mark.parametrize("before", ["", IGNORE_SIGINT])
def test_ctrl_c_leaves_nothing_after_a_second(start: Start, script: Script, before: str) -> None:
    def attempt() -> float:
        launcher = start("--nproc-per-node", "4", script(WAIT.format(before=before)))
        pids = pids_of(launcher, 4)
        began = time.monotonic()
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(PATIENCE) == 130
        assert wait_for_ends(pids)
        return time.monotonic() - began

    assert soon(1.0, attempt)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_wait_for_other_nodes_in_the_background_of_a_script(
    start: Start, script: Script, free_port: int, number: signal.Signals
) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a script's shell does
    try:
        launcher = start("--nnodes", "2", "--rdzv-endpoint", f"localhost:{free_port}", script(""))
    finally:
        signal.signal(signal.SIGINT, before)
    assert launcher.stderr is not None
    assert "waiting for node 1" in launcher.stderr.readline()
    launcher.send_signal(number)
    assert launcher.wait(PATIENCE) in (130, -signal.SIGTERM)


def test_ctrl_c_reaches_ranks_whose_output_has_no_reader(start: Start, script: Script) -> None:
    path = script("""
        import os, sys
        print("pid", os.getpid(), file=sys.stderr)
        while True:
            print("y" * 1000)
    """)
    launcher = start(path)
    assert launcher.stdout is not None
    assert launcher.stderr is not None
    pid = int(launcher.stderr.readline().split("pid")[1])
    while select.select([launcher.stdout], [], [], 0.2)[0] and not _full(launcher.stdout.fileno()):
        pass
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(PATIENCE) == 130
    assert wait_for_ends([pid])


def test_sigterm_is_passed_on_and_ends_the_job(start: Start, script: Script) -> None:
    launcher = start("--nproc-per-node", "2", script(WAIT.format(before="")))
    pids = pids_of(launcher, 2)
    launcher.terminate()
    assert launcher.wait(PATIENCE) == 143
    assert wait_for_ends(pids)


def test_a_killed_launcher_leaves_nothing(start: Start, script: Script) -> None:
    launcher = start("--nproc-per-node", "2", script(WAIT.format(before=IGNORE_SIGTERM)))
    pids = pids_of(launcher, 2)
    launcher.kill()
    assert wait_for_ends(pids)


def test_a_reader_that_leaves_ends_the_job(start: Start, script: Script) -> None:
    launcher = start("--nproc-per-node", "2", script("while True: print('y')"))
    assert launcher.stdout is not None
    launcher.stdout.readline()
    launcher.stdout.close()
    assert launcher.wait(PATIENCE) == 141


def test_two_launchers_make_one_job(
    launch: Launch, start: Start, script: Script, free_port: int
) -> None:
    path = script("import os; print(os.environ['RANK'], os.environ['WORLD_SIZE'])")
    words = ["--nnodes", "2", "--rdzv-endpoint", f"localhost:{free_port}"]
    first = start(*words, "--node-rank", "0", "--nproc-per-node", "2", path)
    second = launch(*words, "--node-rank", "1", "--nproc-per-node", "3", path)
    out, _ = first.communicate(timeout=PATIENCE)
    assert sorted(out.splitlines()) == ["[rank 0] 0 5", "[rank 1] 1 5"]
    assert sorted(second.stdout.splitlines()) == [f"[rank {rank}] {rank} 5" for rank in (2, 3, 4)]


def test_nodes_of_different_sizes_make_one_group(
    start: Start, script: Script, free_port: int, environment: dict[str, str]
) -> None:
    environment["NC10D_INSECURE"] = "1"
    path = script("""
        import os, numpy as np, nc10d
        os.environ["NC10D_HOST_ID"] = os.environ["GROUP_RANK"]
        nc10d.init_process_group(timeout=60)
        x = np.full(3, 1 + nc10d.get_rank())
        nc10d.all_reduce(x)
        print(os.environ["LOCAL_WORLD_SIZE"], x)
        nc10d.destroy_process_group()
    """)
    words = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port}"]
    counts = 2, 1
    nodes = [start(*words, f"--nproc-per-node={n}", "--no-prefix", path) for n in counts]
    ends = [node.communicate(timeout=PATIENCE) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], ends
    assert [out for out, _ in ends] == [f"{n} [6 6 6]\n" * n for n in counts]


def test_a_node_that_does_not_come_is_named(launch: Launch, script: Script, free_port: int) -> None:
    words = "--nnodes", "3", "--node-rank", "0", "--rdzv-conf", "timeout=0.5"
    done = launch(*words, "--rdzv-endpoint", f"127.0.0.1:{free_port}", script("print('never')"))
    assert (done.returncode, done.stdout) == (1, "")
    assert "nc10d-run: waiting for nodes 1, 2 of 3\n" in done.stderr
    assert "nodes 1, 2 of 3 did not come within 0.5 s" in done.stderr


def test_more_signals_are_passed_on_and_end_the_job(start: Start, script: Script) -> None:
    path = script("""
        import signal, time
        def on(number, _):
            print("got", signal.Signals(number).name)
            raise SystemExit(4)
        signal.signal(signal.SIGUSR1, on)
        print("pids", 0)
        while True:
            time.sleep(0.05)
    """)
    launcher = start("--signals-to-handle", "SIGUSR1,SIGTERM", path)
    pids_of(launcher, 1)
    launcher.send_signal(signal.SIGUSR1)
    out, err = launcher.communicate(timeout=PATIENCE)
    assert (launcher.returncode, out) == (128 + signal.SIGUSR1, "[rank 0] got SIGUSR1\n"), err
