"""FileStore: processes that start, end and are killed leave a correct file, or no file."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nc10d.errors import StoreError, StoreTimeout
from nc10d.store import FileStore
from nc10d.store import wire as m
from nc10d.store.journal_records import record

FIXTURES = [HealthCheck.function_scoped_fixture]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


def run(script: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_last_user_of_a_complete_world_removes_the_file(path: Path):
    first, second = FileStore(path, 2), FileStore(path, 2)
    first.set("k", "v")
    first.close()
    assert path.exists()
    assert second.get("k") == b"v"
    second.close()
    second.close()
    assert not path.exists()


def test_the_file_stays_until_all_users_have_opened_it(path: Path):
    first = FileStore(path, 2)
    first.set("k", "v")
    first.close()
    with contextlib.closing(FileStore(path, 2)) as second:
        assert second.get("k") == b"v"
    assert not path.exists()


def test_a_world_of_unknown_size_leaves_the_file(path: Path):
    FileStore(path).close()
    assert path.exists()


def test_a_dropped_store_counts_as_closed(path: Path):
    store = FileStore(path, 1)
    store.set("k", "v")
    del store
    assert not path.exists()


def test_a_process_that_ends_without_closing_removes_the_file(path: Path):
    child = run(
        "import sys; from nc10d.store import FileStore; s = FileStore(sys.argv[1], 1);"
        "s.set('k', 'v')",
        path,
    )
    assert child.communicate(timeout=60)[1] == ""
    assert not path.exists()


def test_a_file_left_by_killed_users_is_started_anew(path: Path):
    child = run(
        """
        import os, signal, sys
        from nc10d.store import FileStore
        store = FileStore(sys.argv[1], 2)  # the next job's size is another
        store.set("k", "old")
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        path,
    )
    child.communicate(timeout=60)
    assert child.returncode == -signal.SIGKILL
    assert path.exists()
    with contextlib.closing(FileStore(path, 1)) as store:
        assert not store.check(["k"])
    assert not path.exists()


def test_a_killed_user_does_not_keep_the_file(path: Path):
    store = FileStore(path, 2)
    child = run(
        """
        import sys
        from nc10d.store import FileStore
        store = FileStore(sys.argv[1], 2)
        store.set("came", "")
        sys.stdin.readline()
        """,
        path,
    )
    store.wait(["came"])
    child.kill()
    child.communicate(timeout=60)
    store.close()
    assert not path.exists()


@settings(max_examples=30, deadline=None, suppress_health_check=FIXTURES)
@given(cut=st.integers(1, 60))
def test_a_torn_record_is_cut_off(path: Path, cut: int):
    with contextlib.closing(FileStore(path, 1)) as store:
        store.set("k", "v")
        torn = record(m.with_values(m.SET, b"torn", b"never finished"))
        with path.open("ab") as file:
            file.write(torn[:cut])
        twin = store.clone()
        assert twin.check(["torn"]) == (cut >= len(torn))
        twin.add("n", 1)
        assert (store.get("k"), store.get("n")) == (b"v", b"1")
        twin.close()


@settings(max_examples=60, deadline=None, suppress_health_check=FIXTURES)
@given(at=st.integers(0, 10_000), change=st.integers(1, 255))
def test_a_changed_byte_is_an_error_and_cuts_nothing_off(path: Path, at: int, change: int):
    with contextlib.closing(FileStore(path)) as store:
        for key in "abc":
            store.set(key, "value")
    intact = path.read_bytes()
    damaged = bytearray(intact)
    damaged[at % len(intact)] ^= change
    path.write_bytes(damaged)
    with pytest.raises(StoreError, match=r"damaged|no file of this version"):
        FileStore(path)
    assert path.read_bytes() == damaged
    path.write_bytes(intact)


def test_a_record_of_an_unknown_kind_is_an_error(path: Path):
    with contextlib.closing(FileStore(path)) as store:
        store.set("k", "v")
        with path.open("ab") as file:
            file.write(record(m.with_key(m.GET, b"/k")))
        with pytest.raises(StoreError, match="kind 3"):
            store.get("k")


def test_additions_of_processes_add_up(path: Path):
    script = """
        import sys
        from nc10d.store import FileStore
        store = FileStore(sys.argv[1], 4)
        for _ in range(200):
            store.add("n", 1)
        store.barrier("done", 4)
        print(store.add("n", 0))
        """
    children = [run(script, path) for _ in range(4)]
    assert [child.communicate(timeout=60)[0].strip() for child in children] == ["800"] * 4
    assert not path.exists()


def test_a_forked_child_is_a_user_of_its_own(path: Path):
    child = run(
        """
        import os, sys
        from nc10d.store import FileStore
        store = FileStore(sys.argv[1], 1)
        pid = os.fork()
        for _ in range(200):
            store.add("n", 1)
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        print(store.get("n").decode())
        store.close()
        print(os.path.exists(sys.argv[1]))
        """,
        path,
    )
    out, err = child.communicate(timeout=60)
    assert out.split() == ["400", "False"], err


def test_a_child_that_never_uses_the_store_leaves_the_file_to_its_parent(path: Path):
    child = run(
        """
        import os, sys
        from nc10d.store import FileStore
        store = FileStore(sys.argv[1], 1)
        store.set("k", "v")
        if os.fork() == 0:
            sys.exit(0)
        os.wait()
        print(store.get("k").decode(), os.path.exists(sys.argv[1]))
        """,
        path,
    )
    out, err = child.communicate(timeout=60)
    assert out.split() == ["v", "True"], err
    assert not path.exists()


def test_a_thread_that_waits_delays_no_other_thread(path: Path):
    with contextlib.closing(FileStore(path, 1)) as store:
        waiting = threading.Thread(target=store.get, args=("k",))
        waiting.start()
        assert store.add("n", 1) == 1
        store.set("k", "v")
        waiting.join(20)
        assert not waiting.is_alive()


def test_a_file_that_is_no_store_is_an_error_that_names_it(path: Path):
    path.write_bytes(b"\xff some other file")
    with pytest.raises(StoreError, match=str(path)):
        FileStore(path, 1)
    assert path.read_bytes() == b"\xff some other file"
    with pytest.raises(StoreError, match="/nowhere/at/all"):
        FileStore("/nowhere/at/all", 1)
    with pytest.raises(ValueError, match="0"):
        FileStore(path, 0)


def test_a_closed_store_reports_it(path: Path):
    store = FileStore(path, 1)
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.get("k")


def test_a_file_store_knows_its_path(path: Path):
    with contextlib.closing(FileStore(path, 1)) as store:
        assert store.path == os.fspath(path)


# ---- a file that others hold, or own -------------------------------------------------------------


@contextlib.contextmanager
def stopped_user(path: Path) -> Iterator[int]:
    """Yield the number of a process that is stopped in the middle of a call."""
    child = run(
        """
        import os, signal, sys
        from nc10d.store import FileStore
        store = FileStore(sys.argv[1])

        def stop(values):
            print("in", flush=True)
            os.kill(os.getpid(), signal.SIGSTOP)

        store._exclusively(stop)
        """,
        path,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "in\n"
    try:
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        yield child.pid
    finally:
        child.kill()
        child.communicate(timeout=60)


CALLS: dict[str, Callable[[FileStore], object]] = {
    "set": lambda store: store.set("k", "v"),
    "get": lambda store: store.get("k"),
    "add": lambda store: store.add("n", 1),
    "check": lambda store: store.check(["k"]),
    "wait": lambda store: store.wait(["k"], LIMIT),
    "barrier": lambda store: store.barrier("b", 1, LIMIT),
    "clone": lambda store: store.clone(),
    "constructor": lambda store: FileStore(store.path, timeout=LIMIT),
}
LIMIT = 0.2


def test_no_call_waits_longer_than_its_timeout_for_a_stopped_user(path: Path) -> None:
    with contextlib.closing(FileStore(path, timeout=LIMIT)) as store:
        store.set("k", "before")
        with stopped_user(path):
            for name, call in CALLS.items():
                begun = time.monotonic()
                with pytest.raises(StoreTimeout, match="timeout: another process holds"):
                    call(store)
                assert LIMIT <= time.monotonic() - begun < 20, name
        assert store.get("k") == b"before", "and it works again once that user has gone"


def test_a_thread_waits_no_longer_than_its_timeout_for_another(path: Path) -> None:
    raised: list[BaseException] = []
    with contextlib.closing(FileStore(path, timeout=LIMIT)) as store:

        def call() -> None:
            try:
                store.add("n", 1)
            except StoreTimeout as error:
                raised.append(error)

        def beside(_: object) -> None:
            thread = threading.Thread(target=call)
            thread.start()
            thread.join(20)

        store._exclusively(beside)
    assert "another thread" in str(raised[0])


def test_every_call_fails_on_a_damaged_file(path: Path) -> None:
    with contextlib.closing(FileStore(path)) as store, contextlib.closing(FileStore(path)) as other:
        other.set("a", "1")
        intact = path.read_bytes()
        path.write_bytes(intact + b"\xee" * 16)
        size = path.stat().st_size
        for _ in range(3):
            with pytest.raises(StoreError):
                store.set("c", "2")
        assert path.stat().st_size == size, "nothing is written behind the damage"
        path.write_bytes(intact)
        assert store.get("a") == b"1"


def test_a_store_closes_beside_a_stopped_user(path: Path) -> None:
    store = FileStore(path)
    with stopped_user(path):
        store.close()
    assert path.exists()


def test_a_signals_handler_ends_the_wait_for_a_lock(path: Path) -> None:
    class Ring(Exception):
        pass

    def ring(*_: object) -> None:
        raise Ring

    before = signal.signal(signal.SIGALRM, ring)
    try:
        with contextlib.closing(FileStore(path)) as store, stopped_user(path):
            signal.setitimer(signal.ITIMER_REAL, LIMIT)
            with pytest.raises(Ring):
                store.get("k")
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("mode", [0o666, 0o660, 0o602])
def test_a_file_that_others_could_write_to_is_refused(path: Path, mode: int) -> None:
    path.touch()
    path.chmod(mode)
    with pytest.raises(StoreError, match=rf"write to it \(mode {mode:04o}\): chmod 600"):
        FileStore(path)
    assert path.read_bytes() == b""


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")


@needs_root
def test_a_file_of_another_user_is_refused(path: Path) -> None:
    path.touch(0o600)
    os.chown(path, 12345, 12345)
    with pytest.raises(StoreError, match=r"the file belongs to another user \(number 12345\)"):
        FileStore(path)


@needs_root
def test_a_link_of_another_user_is_refused(path: Path) -> None:
    mine = path.with_name("mine")
    mine.touch(0o600)
    path.symlink_to(mine)
    os.lchown(path, 12345, 12345)
    with pytest.raises(StoreError, match=r"the link .*store belongs to another user"):
        FileStore(path)
    assert mine.read_bytes() == b""


@pytest.mark.parametrize("target", ["mine", "./mine", "second"])
def test_a_link_of_this_user_is_followed(path: Path, target: str) -> None:
    path.with_name("second").symlink_to("mine")
    path.symlink_to(target)
    with contextlib.closing(FileStore(path)) as store:
        store.set("k", "v")
    with contextlib.closing(FileStore(path.with_name("mine"))) as store:
        assert store.get("k") == b"v"


def test_links_in_a_circle_are_an_error(path: Path) -> None:
    path.symlink_to(path)
    with pytest.raises(StoreError, match="links follow each other"):
        FileStore(path)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_is_refused_at_once(path: Path, make: Callable[[Path], None]) -> None:
    make(path)
    with pytest.raises(StoreError, match=r"ordinary file|Is a directory"):
        FileStore(path)
