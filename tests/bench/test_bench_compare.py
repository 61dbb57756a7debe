"""nc10d beside other libraries: the options, the turns, the table, and how jobs are started."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import estimates, figures
from benchmarks.compare import call_times, compare
from benchmarks.libraries import jobs
from benchmarks.libraries.namespaces import run_on_hosts
from nc10d.testing.hosts.namespaces import ip, network, why_not

REASON = why_not()
CELLS: list[compare.Cell] = [("all_reduce", 1 << 20), ("broadcast", 1024), ("barrier", 0)]
SAMPLES: compare.Samples = {
    "nc10d": {CELLS[0]: [1e-6, 4e-6, 2e-6], CELLS[1]: [9e-6] * 3, CELLS[2]: [1e-6] * 3},
    "gloo": {CELLS[0]: [8e-6] * 3, CELLS[1]: [4.5e-6] * 3, CELLS[2]: [5e-7] * 3},
    "mpich": {CELLS[0]: [2.5e-6] * 3, CELLS[1]: [5e-6] * 3, CELLS[2]: [2e-6] * 3},
}


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (8, "8 B"),
        (64 << 10, "64 KiB"),
        (1 << 10, "1 KiB"),
        (3 << 19, "1.5 MiB"),
        (1 << 30, "1 GiB"),
    ],
)
def test_sizes_are_labelled_for_people(nbytes: int, text: str) -> None:
    assert figures.bytes_label(nbytes) == text


def test_options_name_the_peers_and_the_sizes() -> None:
    options = compare.parse(["gloo,openmpi", "--ranks", "3"])
    assert options.libraries == ["nc10d", "gloo", "openmpi"]
    assert options.ranks == 3
    assert options.collectives == compare.COLLECTIVES


def test_an_unknown_collective_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        compare.parse(["--collectives", "all_redcue"])
    assert "unknown collective all_redcue; known: all_reduce, " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["tcp", "--hosts", "2"], "needs a library beside nc10d: gloo, or gloo,tcp"),
        (["gloo,tcp"], "tcp copies between hosts: it needs --hosts 2"),
        (["gloo,tcpx"], "unknown library tcpx; known: nc10d, gloo"),
        (["gloo,tcp0"], "unknown library tcp0"),
        (["mpich", "--hosts", "2"], "mpich can't be started with --hosts 2; gloo can"),
        (["gloo", "--hosts", "0"], "2 ranks can't be dealt to 0 hosts"),
    ],
)
def test_options_that_cannot_be_compared_are_reported(
    words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        compare.parse(words)
    assert expected in capsys.readouterr().err


def test_a_barrier_has_a_single_cell_and_others_a_cell_for_each_size() -> None:
    assert compare.cells("barrier", 1 << 30) == [("barrier", 0)]
    assert [nbytes for _, nbytes in compare.cells("broadcast", 1 << 20)] == compare.SIZES[:4]
    assert compare.cells("broadcast", 1024, 9) == [("broadcast", 1024)]


def test_each_library_takes_each_turn() -> None:
    four = ["a", "b", "c", "d"]
    rounds = [estimates.turns(four, number) for number in range(4)]
    assert all(sorted(order) == four for order in rounds)
    assert all(sorted(order[place] for order in rounds) != [four[0]] * 4 for place in range(4))
    assert len({order[0] for order in rounds}) > 1


def test_the_table_has_medians_their_intervals_and_an_outcome() -> None:
    head, rule, *rows, empty, behind, near = compare.table(SAMPLES)
    columns = "collective | bytes | nc10d µs | gloo µs | mpich µs | best/nc10d | nc10d is"
    assert head == f"| {columns} |"
    assert rule.count("---|") == head.count("|") - 1
    ours, gloo, mpich = "2.00 (1.00–4.00)", "8.00 (8.00–8.00)", "2.50 (2.50–2.50)"
    assert rows[0] == f"| all_reduce | 1048576 | {ours} | {gloo} | {mpich} | 1.25 | tied |"
    assert rows[1].endswith("| 0.50 | behind |")
    assert rows[2].endswith("| 0.50 | tied |")  # half a microsecond is no matter for a barrier
    assert not empty
    assert behind == "Behind: broadcast 1024 (gloo, 0.50)."
    assert near.startswith("Of all_reduce and reduce_scatter from 1 MiB on, less than 1.5")
    assert near.endswith("ahead: all_reduce 1048576 (mpich, 1.25).")


def test_a_plain_copy_has_a_column_and_no_outcome() -> None:
    samples = {
        "nc10d": {CELLS[0]: [2e-6]},
        "gloo": {CELLS[0]: [3e-6]},
        "tcp": {CELLS[0]: [1e-6]},
        "tcp2": {CELLS[0]: [5e-6]},
    }
    head, _, row, *_ = compare.table(samples)
    assert head.endswith(" | best/nc10d | nc10d is | copy/nc10d |")
    assert row.endswith(" | 1.50 | ahead | 0.50 |")


def test_ranks_are_dealt_to_hosts_evenly(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        compare.parse(["--hosts", "2", "--ranks", "3"])
    assert "3 ranks can't be dealt to 2 hosts evenly" in capsys.readouterr().err


@pytest.mark.skipif(REASON is not None, reason=REASON or "")
def test_a_plain_copy_moves_the_bytes_of_a_collective() -> None:
    # For warming up, for the first estimate of a call, and then the least number of calls.
    calls = call_times.WARM_UP + 3 + 3 * call_times.ROUNDS
    with network(2) as net:
        jobs = [(name, 1 << 20) for name in ("all_reduce", "all_gather", "broadcast")]
        module = "benchmarks.compare.call_times"
        rows = run_on_hosts(net, 1, "tcp", module, [jobs, 0.0, False], 100.0)
        sent = [net.sent(host) / (calls << 20) for host in range(2)]
    assert [(name, nbytes) for name, nbytes, *_ in rows] == jobs
    assert sent[0] >= 1 + 0.5 + 1
    assert sent[1] >= 1 + 0.5
    assert sent[1] < 1 + 0.5 + 0.5


def test_samples_are_read_as_they_were_written(tmp_path: Path) -> None:
    file = tmp_path / "samples.json"
    compare.save(file, SAMPLES, 4, [0.25], untouched=False)
    assert compare.load(file) == (SAMPLES, 4, [0.25], False)


def test_saved_samples_are_shown_and_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    file, picture = tmp_path / "samples.json", tmp_path / "picture.png"
    compare.save(file, SAMPLES, 4, [0.25, 0.5, 0.0], untouched=True)
    assert compare.main(["--read", str(file), "--plot", str(picture)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("4 ranks on ")
    assert "at least 75 %" in shown
    assert "0.25, 0.50, 0.00" in shown
    assert "\n".join(compare.table(SAMPLES)) in shown
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_every_library_has_its_starter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NC10D_OPENMPI", "/opt/ompi")
    found = {name: jobs.start_command(name, 4) for name in ("nc10d", "gloo", "mpich", "openmpi")}
    assert all("4" in job.words and sys.executable in job.words for job in found.values())
    assert found["openmpi"].words[0] == "/opt/ompi/bin/mpirun"
    assert found["openmpi"].environment["MPI4PY_LIBMPI"] == "/opt/ompi/lib/libmpi.so.40"
    with pytest.raises(ValueError, match="unknown library 'nccl'"):
        jobs.start_command("nccl", 2)


@pytest.mark.parametrize(("ranks", "yields"), [(1, "0"), (1000, "1")])
def test_open_mpi_yields_where_ranks_outnumber_cores(ranks: int, yields: str) -> None:
    environment = jobs.start_command("openmpi", ranks).environment
    assert environment["OMPI_MCA_mpi_yield_when_idle"] == yields


def test_a_library_that_is_not_installed_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NC10D_OPENMPI", "/nowhere")
    with pytest.raises(SystemExit, match="openmpi: /nowhere/bin/mpirun is not installed"):
        compare.main(["openmpi"])


def test_a_job_that_fails_is_reported_with_its_last_words() -> None:
    arguments = [[("no_such_thing", 8)], 0.0, False]
    with pytest.raises(RuntimeError, match=r"(?s)nc10d: .*KeyError.*'no_such_thing'"):
        jobs.run_job("nc10d", 1, "benchmarks.compare.call_times", arguments, 100.0)


def test_wrong_elements_end_a_comparison() -> None:
    options = compare.parse(["mpich", "--collectives", "all_reduce"])
    with pytest.raises(RuntimeError, match="nc10d: 3 wrong elements in all_reduce of 8 bytes"):
        compare.collect(options, lambda *_: [["all_reduce", 8, 1e-6, 3]])


def test_samples_are_saved_round_by_round(tmp_path: Path) -> None:
    file = tmp_path / "samples.json"
    words = ["gloo", "--collectives", "barrier", "--json", str(file), "--rounds", "3"]
    rounds = []

    def start(library: str, words: object) -> jobs.Rows:
        if library == "nc10d":
            rounds.append(len(compare.load(file)[2]) if file.exists() else 0)
        return [["barrier", 0, 1e-6, 0]]

    compare.collect(compare.parse(words), start)
    assert rounds == [0, 1, 2]
    assert len(compare.load(file)[2]) == 3
    assert [job.name for job in tmp_path.iterdir()] == [file.name]


APART = """
import signal
from benchmarks.libraries.namespaces import separate_hosts
with separate_hosts(1) as net:
    print(net.names[0], flush=True)
    signal.pause()
"""


@pytest.mark.skipif(REASON is not None, reason=REASON or "")
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGINT, -signal.SIGINT)]
)
def test_hosts_are_removed_by_a_process_that_a_signal_ends(
    number: signal.Signals, code: int
) -> None:
    with subprocess.Popen([sys.executable, "-c", APART], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        name = process.stdout.readline().decode().strip()
        assert name in ip("netns", "list")
        process.send_signal(number)
        assert process.wait(100) == code
    assert name not in ip("netns", "list")


@pytest.mark.long
@pytest.mark.skipif(REASON is not None, reason=REASON or "")
def test_a_comparison_that_is_ended_leaves_nothing_but_its_rounds(tmp_path: Path) -> None:
    out = tmp_path / "samples.json"
    few = ["--rounds", "99", "--collectives", "barrier", "--budget", "0", "--json", str(out)]
    command = [sys.executable, "-m", "benchmarks", "compare", "gloo", "--hosts", "2", *few]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("# round 1 ")
        process.terminate()
        # The ranks hold the output pipe too: output ends when they end.
        _, err = process.communicate(timeout=100)
    assert process.returncode == 128 + signal.SIGTERM
    assert "Traceback" not in err
    assert f"nc10d-{process.pid}-" not in ip("netns", "list")
    assert len(compare.load(out)[2]) >= 1


@pytest.mark.long
@pytest.mark.parametrize(("hosts", "others"), [("1", "mpich"), ("2", "gloo,tcp")])
def test_the_comparison_runs(tmp_path: Path, hosts: str, others: str) -> None:
    if hosts != "1" and REASON:
        pytest.skip(REASON)
    out = tmp_path / "samples.json"
    few = ["--rounds", "1", "--max-bytes", "8", "--collectives", "exchange,barrier"]
    words = [others, "--hosts", hosts, *few, "--budget", "0", "--json", str(out)]
    command = [sys.executable, "-m", "benchmarks", "compare", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "| exchange | 8 | " in done.stdout
    samples, ranks, loads, _ = compare.load(out)
    assert (ranks, len(loads)) == (2, 1)
    libraries = ["nc10d", *others.split(",")]
    assert {name: len(rows) for name, rows in samples.items()} == dict.fromkeys(libraries, 2)
