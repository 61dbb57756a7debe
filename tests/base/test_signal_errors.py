"""An exception that a signal's handler raises comes out of every blocking call as itself, at once.

It may be of any type: of those, too, by which the library tells itself that time is up.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import math
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from interrupts import raise_at

import nc10d as dist
from nc10d.base.call_site import here, text_at
from nc10d.base.deadline import NEVER, Deadline
from nc10d.base.run_to_end import off_main, run_to_end
from nc10d.base.signal_errors import (
    Condition,
    Event,
    Thread,
    from_handler,
    raised_here,
    suppress_here,
)
from nc10d.codec import encode, encode_pickled
from nc10d.errors import Aborted, DistError, PeerLost, RendezvousError, StoreError, StoreTimeout
from nc10d.group.world import own_world
from nc10d.init_methods.methods import rendezvous
from nc10d.kernels.cache import made_once
from nc10d.store import FileStore, HashStore, TCPStore
from nc10d.work import Future

pytestmark = [
    # A call that swallows the error lasts LONG; hypothesis then repeats it.
    pytest.mark.timeout(300),
    # An exception that comes between two instructions of a clean-up leaves the rest of it to
    # finalizers: Python has no way to hold it back there.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
LONG = 30.0
OTHER_RANK = "other rank"
HOST = "127.0.0.1"


class NodeIsTaken(Exception):
    """A type that the library does not know."""


class Alarm(TimeoutError):
    """A user's own kind of time-out."""


class Broken(OSError):
    """A user's own kind of system error."""


KINDS = (
    *(NodeIsTaken, Alarm, Broken, TimeoutError, OSError, ConnectionResetError, BlockingIOError),
    *(ValueError, RuntimeError, KeyError, StoreTimeout, StoreError, RendezvousError, PeerLost),
    *(Aborted, KeyboardInterrupt, SystemExit),
)
Blocking = Callable[[], object]


@pytest.fixture(autouse=True, scope="module")
def imported() -> Iterator[None]:
    """Import the modules of a first group: an import of the test drops an OSError amid a search.

    At the end, no thread is left of all the calls that an error has come out of.
    """
    init(HashStore(), 0, 1)
    before = own_threads()
    yield
    end = time.monotonic() + LONG
    while left := own_threads() - before:
        assert time.monotonic() < end, left


def own_threads() -> set[threading.Thread]:
    gc.collect()
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("nc10d")]
    # Python lists threads, too, that an error has kept from starting; the kernel does not.
    return {thread for thread in threads if Path(f"/proc/self/task/{thread.native_id}").exists()}


@contextlib.contextmanager
def ringing(error: BaseException, after: float) -> Iterator[None]:
    """Have a signal's handler raise `error` when `after` seconds have passed.

    The interpreter drops what is raised amid a finalizer or a callback from C, so ring again then.
    """

    def ring(number: int, frame: FrameType | None) -> None:
        raise error

    def ring_again(dropped: Any) -> None:
        print("dropped in", dropped.object)
        signal.setitimer(signal.ITIMER_REAL, after)

    hook, sys.unraisablehook = sys.unraisablehook, ring_again
    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, after)
    try:
        yield
    finally:
        sys.unraisablehook = hook
        signal.setitimer(signal.ITIMER_REAL, 0)
        # Not the default, which ends the process: an alarm may be under way.
        signal.signal(signal.SIGALRM, before if callable(before) else signal.SIG_IGN)


def comes_out(error: BaseException, after: float, call: Blocking) -> None:
    """Require that `call` raises that very error, long before its timeout."""
    begin = time.monotonic()
    with pytest.raises(BaseException) as caught, ringing(error, after):
        call()
    assert caught.value is error, repr(caught.value)
    assert time.monotonic() - begin < LONG / 2


@contextlib.contextmanager
def blocked_calls(folder: Path) -> Iterator[dict[str, Blocking]]:
    """Yield calls that wait for what never comes."""
    with contextlib.ExitStack() as stack:
        closing = lambda store: stack.enter_context(contextlib.closing(store))  # noqa: E731
        tcp = closing(TCPStore(HOST, is_master=True, timeout=LONG))
        file, table = closing(FileStore(folder / "file", 2)), HashStore()
        mute = stack.enter_context(socket.create_server((HOST, 0)))
        gone = stack.enter_context(socket.socket())
        gone.bind((HOST, 0))
        file.set_timeout(LONG)
        table.set_timeout(LONG)
        calls: dict[str, Blocking] = {
            "mute server": partial(TCPStore, HOST, mute.getsockname()[1], timeout=LONG),
            "no server": partial(TCPStore, "localhost", gone.getsockname()[1], timeout=LONG),
            "workers": partial(TCPStore, HOST, 0, 2, True, timeout=LONG),
            "tcp://": partial(rendezvous, f"tcp://{HOST}:0", 0, 2, LONG),
            "file://": partial(rendezvous, f"file://{folder}/meet", 0, 2, LONG),
            "init": partial(init, HashStore(), 0, 2),
            "init in a TCPStore": partial(init, tcp, 0, 2),
        }
        for name, store in (("tcp", tcp), ("file", file), ("table", table)):
            calls |= {
                f"{name} get": partial(store.get, "never"),
                f"{name} wait": partial(store.wait, ["never"]),
                f"{name} multi_get": partial(store.multi_get, ["never", "ever"]),
                f"{name} queue_pop": partial(store.queue_pop, "never"),
                f"{name} barrier": partial(store.barrier, "alone", 1 << 40),
            }
        yield calls


def init(store: Any, rank: int, size: int, timeout: float = LONG) -> None:
    with own_world():
        dist.init_process_group("cpu", store=store, rank=rank, world_size=size, timeout=timeout)


NAMES = (
    *("mute server", "no server", "workers", "tcp://", "file://", "init", "init in a TCPStore"),
    *(
        f"{store} {call}"
        for store in ("tcp", "file", "table")
        for call in ("get", "wait", "multi_get", "queue_pop", "barrier")
    ),
)


@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(kind=st.sampled_from(KINDS), after=st.floats(0.001, 0.1))
@pytest.mark.parametrize("name", NAMES)
def test_what_a_handler_raises_comes_out_of_every_wait_for_ranks_and_keys(
    tmp_path: Path, name: str, kind: type[BaseException], after: float
) -> None:
    with blocked_calls(tmp_path) as calls:
        comes_out(kind("of the user"), after, calls[name])


GROUP_CALLS: dict[str, Callable[[], object]] = {
    "new_group": partial(dist.new_group, [0, 1]),
    "new_subgroups": partial(dist.new_subgroups, 2),
    "split_group": partial(dist.split_group, None, [[0, 1]]),
}


@settings(max_examples=8, deadline=None)
@given(kind=st.sampled_from(KINDS), after=st.floats(0.001, 0.1))
@pytest.mark.parametrize("name", GROUP_CALLS)
def test_a_handlers_error_comes_out_of_calls_that_make_groups(
    name: str, kind: type[BaseException], after: float
) -> None:
    with beside_another_rank():
        comes_out(kind("of the user"), after, GROUP_CALLS[name])


@settings(max_examples=20, deadline=None)
@given(point=st.integers(0, 12_000))
@pytest.mark.parametrize("other_calls", [False, True])
@pytest.mark.parametrize("name", GROUP_CALLS)
def test_a_handlers_error_at_any_point_of_a_call_that_makes_groups_comes_out(
    name: str, other_calls: bool, point: int
) -> None:
    error, call = Alarm("of the user"), GROUP_CALLS[name]
    with beside_another_rank(call if other_calls else None):
        begin = time.monotonic()
        raise_at(point, error, call, patience=0.5)
        assert time.monotonic() - begin < LONG / 2


class Ringing(HashStore):
    """A store that sends SIGALRM in call `due` of this process's rank 0."""

    due = -1

    def _exclusively(self, act: Callable[[Any], Any]) -> Any:
        self._count()
        return super()._exclusively(act)

    def _until(self, ready: Callable[[Any], Any], deadline: Deadline) -> Any:
        self._count()
        return super()._until(ready, deadline)

    def _count(self) -> None:
        if threading.current_thread().name != OTHER_RANK:
            self.due -= 1
            if self.due == 0:
                os.kill(os.getpid(), signal.SIGALRM)


def raised_by(call: Blocking) -> BaseException | None:
    try:
        call()
    except BaseException as error:  # noqa: BLE001  (of the handler)
        return error
    return None


@pytest.mark.parametrize("kind", [Alarm, PeerLost, KeyboardInterrupt])
def test_a_handlers_error_at_any_call_of_the_store_comes_out_of_formation_and_ends_it_for_all(
    kind: type[BaseException],
) -> None:
    for due in range(1, 100):
        store, error = Ringing(), kind("of the user")
        with beside_another_rank(GROUP_CALLS["new_group"], store), ringing(error, LONG):
            store.due = due
            out = raised_by(GROUP_CALLS["new_group"])
            ended = store.due > 0
        assert out is (None if ended else error), f"at call {due}"
        if ended:
            break
    assert due > 5


@contextlib.contextmanager
def beside_another_rank(call: Blocking | None = None, store: Any = None) -> Iterator[None]:
    """Be rank 0 of two; the other makes `call`, and must end soon after the block."""
    store, over = store or HashStore(), threading.Event()

    def other_rank() -> None:
        with own_world():
            dist.init_process_group("cpu", store=store, rank=1, world_size=2, timeout=LONG)
            if call is not None:
                with contextlib.suppress(DistError):
                    call()
            over.wait(LONG)
            dist.destroy_process_group()

    thread = threading.Thread(target=other_rank, name=OTHER_RANK, daemon=True)
    thread.start()
    try:
        with own_world():
            dist.init_process_group("cpu", store=store, rank=0, world_size=2, timeout=LONG)
            yield
            over.set()
            dist.destroy_process_group()
    finally:
        over.set()
        thread.join(LONG / 2)
        assert not thread.is_alive(), "the other rank waits in vain"


def caught_by(clause: str, raising: Callable[[], object]) -> bool:
    try:
        if clause == "suppress_here":
            with suppress_here(OSError):
                raising()
        else:
            try:
                raising()
            except raised_here(OSError):
                pass
    except OSError:
        return False
    return True


@pytest.mark.parametrize("clause", ["raised_here", "suppress_here"])
def test_only_a_handlers_errors_pass_a_clause_for_the_librarys_own(clause: str) -> None:
    def fail() -> None:
        raise OSError(errno.EIO, "of the library")

    def handled(*_: object) -> None:
        fail()

    assert caught_by(clause, fail)
    for handler in (handled, partial(lambda _, number, frame: fail(), 0)):
        before = signal.signal(signal.SIGUSR1, handler)
        try:
            assert not caught_by(clause, lambda: os.kill(os.getpid(), signal.SIGUSR1))
        finally:
            signal.signal(signal.SIGUSR1, before)
    assert not from_handler(None)


def test_an_error_of_a_handler_amid_the_text_of_a_line_comes_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    error = Broken("of the user")

    def ring(number: int, frame: FrameType | None) -> None:
        raise error

    def folder() -> str:
        signal.raise_signal(signal.SIGUSR1)
        return "/"

    monkeypatch.setattr(os, "getcwd", folder)
    before = signal.signal(signal.SIGUSR1, ring)
    try:
        with pytest.raises(Broken) as caught:
            text_at(__file__, 1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert caught.value is error


@pytest.mark.parametrize("how", ["decoder", "hash", "pickle"])
def test_an_error_of_a_handler_amid_the_decoding_of_an_object_comes_out(how: str) -> None:
    error, rings = Broken("of the user"), False

    class Sent:
        def __hash__(self) -> int:
            return hash(call(0) if rings and how == "hash" else 0)

        def __reduce__(self) -> Any:
            return _ring, (signal.SIGUSR1,)

    def call(value: Any) -> Any:
        if rings:
            signal.raise_signal(signal.SIGUSR1)
        return value

    def ring(number: int, frame: FrameType | None) -> None:
        raise error

    dist.register_type(Sent, lambda _: 0, lambda _: call(Sent()) if how == "decoder" else Sent())
    message = encode_pickled(Sent()) if how == "pickle" else encode({Sent(): 1})
    rings = True
    before = signal.signal(signal.SIGUSR1, ring)
    try:
        with pytest.raises(Broken) as caught:
            message.envelope().open(message.flat(), allow_pickle=True)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert caught.value is error


def _ring(number: int) -> None:
    signal.raise_signal(number)


class Waiting:
    """A thread that waits in `call`; `event` returns its Event, or None before its wait."""

    def __init__(self, event: Callable[[], Any], call: Callable[[], object]) -> None:
        self._thread = threading.Thread(target=call, daemon=True)
        self._thread.start()
        end = time.monotonic() + LONG
        while (found := event()) is None or not found._waiting:
            assert time.monotonic() < end
            os.sched_yield()

    def must_end(self, why: str) -> None:
        self._thread.join(LONG / 2)
        assert not self._thread.is_alive(), why


def test_a_wait_whose_timeout_passes_as_it_begins_ends() -> None:
    event, condition = Event(), Condition()
    for turn in range(15_000):
        time_left = 1e-6 * (turn % 8)  # about as long as a wait takes to begin
        assert not event.wait(time_left)
        assert condition.until(lambda: None, Deadline.after(time_left)) is None


@pytest.mark.parametrize("what", ["set", "wait", "change", "until"])
def test_others_go_on_after_an_error_at_any_point_of_a_wait_or_a_change(what: str) -> None:
    point, reached = 0, True
    while reached:
        event, condition, values = Event(), Condition(), list[int]()
        calls: dict[str, Callable[[], object]] = {
            "set": event.set,
            "wait": partial(event.wait, 0.01),
            "change": partial(condition.change, partial(values.append, 1)),
            "until": partial(condition.until, lambda: None, Deadline.after(0.01)),
        }
        others = (
            Waiting(lambda e=event: e, event.wait),
            Waiting(
                lambda c=condition: c,
                partial(condition.until, lambda v=values: len(v) or None, NEVER),
            ),
        )
        error = Alarm(f"at point {point}")  # it is kept, and its frames with it
        reached = raise_at(point, error, calls[what])
        if not values:
            condition.change(partial(values.append, 2))
        if not event.is_set():
            event.set()
        for other in others:
            other.must_end(f"waits in vain after an error at point {point}")
        point += 1


def test_a_work_that_has_ended_is_told_after_an_error_at_any_point() -> None:
    point, reached = 0, True
    while reached:
        future, called = Future[int](), list[object]()
        for _ in range(3):
            future.add_done_callback(called.append)
        other = Waiting(lambda f=future: f._finished, future.wait) if point % 2 else None
        reached = raise_at(point, Alarm(f"at point {point}"), partial(future.set_result, 3))
        if not future.done():
            future.set_result(3)
        if other is not None:
            other.must_end(f"waits in vain after an error at point {point}")
        # One may be between two instructions: taken, and not yet called.
        assert len(called) >= 2, f"after an error at point {point}"
        point += 1


def test_the_start_of_a_thread_passes_on_what_a_handler_raises_at_any_point() -> None:
    point, reached = 0, True
    while reached:
        ran, owner = threading.Event(), SimpleNamespace(thread=None)
        thread = Thread(target=ran.set, daemon=True)
        start = partial(thread.start_in, owner, "thread")
        reached = raise_at(point, RuntimeError(f"at point {point}"), start)
        if owner.thread is None:
            assert not ran.is_set(), "it has been kept from running"
        else:
            assert ran.wait(LONG), "it runs"
        point += 1
    assert point > 10


def test_a_call_comes_to_its_end_and_a_handlers_error_comes_out_at_any_point() -> None:
    point, reached = 0, True
    while reached:
        begun, ended = threading.Event(), threading.Event()

        def call(begun: threading.Event = begun, ended: threading.Event = ended) -> None:
            begun.set()
            time.sleep(0.001)
            ended.set()

        reached = raise_at(point, RuntimeError(f"at point {point}"), partial(run_to_end, call))
        assert not begun.is_set() or ended.wait(LONG)
        point += 1
    assert point > 10
    assert begun.is_set()


def test_a_call_to_its_end_gives_its_result_and_raises_its_error() -> None:
    def fail() -> None:
        raise ValueError("of the call")

    assert run_to_end(threading.get_ident) != threading.get_ident()
    with pytest.raises(ValueError, match="of the call") as caught:
        run_to_end(fail)
    assert caught.traceback[-1].name == "fail"


def test_a_call_that_is_left_is_cancelled_and_its_result_is_dropped() -> None:
    deadline, dropped = Deadline.after(LONG), queue.SimpleQueue[str]()
    error = Alarm("of the user")

    def call() -> str:
        while not deadline.expired():
            time.sleep(deadline.slice(0.01))
        deadline.excuse(LONG)
        assert deadline.expired()
        with pytest.raises(RuntimeError, match="needed no more"):
            made_once({}, "a function", int)
        return f"late: {deadline.cancelled()}"

    comes_out(error, 0.05, lambda: run_to_end(call, deadline.cancel, dropped.put, grace=LONG))
    assert dropped.get(timeout=LONG) == "late: of the user"


def test_what_a_drop_raises_does_not_replace_the_handlers_error() -> None:
    begun = threading.Event()

    def call() -> str:
        begun.set()
        time.sleep(0.2)
        return "late"

    def drop(_: str) -> None:
        raise OSError("of the drop")

    comes_out(Alarm("of the user"), 0.05, lambda: run_to_end(call, drop=drop, grace=LONG))
    assert begun.is_set()


def test_a_deadline_that_is_cancelled_stays_so() -> None:
    deadline = Deadline.after(LONG)
    deadline.cancel(Alarm("of the user"))
    deadline.excuse(math.inf)
    assert deadline.expired()
    assert deadline.cancelled() is not None


def test_a_finalizer_at_the_end_of_python_makes_its_calls(tmp_path: Path) -> None:
    code = """
from nc10d.base.run_to_end import run_to_end
class Owner:
    def __del__(self): print(run_to_end(lambda: "closed"), flush=True)
kept = Owner()
"""
    done = python(code, tmp_path)
    assert done.stdout == "closed\n", done.stderr


FORKED = """
import os, signal
from nc10d.base.run_to_end import run_to_end
children = []
def ring(*_): children.append(os.fork())
def call():
    os.kill(os.getpid(), signal.SIGALRM)
    import time; time.sleep(0.3)
    return "ended"
signal.signal(signal.SIGALRM, ring)
try: print(run_to_end(call, drop=print), flush=True)
except RuntimeError as error: print(error, flush=True)
if children[0]: os.waitpid(children[0], 0)
"""


def test_a_child_of_a_fork_amid_a_call_does_not_wait_for_its_end(tmp_path: Path) -> None:
    done = python(FORKED, tmp_path)
    lines = sorted(done.stdout.splitlines())
    assert lines == ["a signal's handler has forked amid a call on another thread", "ended"]


def test_a_function_off_the_main_thread_names_the_line_of_its_caller() -> None:
    @off_main
    def call(*arguments: int, more: int) -> tuple[int, ...]:
        assert threading.current_thread() is not threading.main_thread()
        return *arguments, more

    before = threading.enumerate()
    assert call(1, 2, more=3) == (1, 2, 3)
    assert threading.enumerate() == before, "its thread has gone"
    elsewhere = off_main(here)
    assert elsewhere() == here() != "", "both are of this line"


def test_a_module_may_call_the_import_of_another_that_imports_it(tmp_path: Path) -> None:
    """The main thread holds the lock of a module that it imports; another would wait for it."""
    (tmp_path / "outer.py").write_text(
        "from nc10d.base.run_to_end import import_to_end\nfound = import_to_end('inner')\n"
    )
    (tmp_path / "inner.py").write_text("import outer\n")
    done = python("import outer; print(outer.found.outer is outer)", tmp_path)
    assert done.stdout == "True\n", done.stderr


FIRST_CALLS = """
import os, signal, sys
import nc10d as dist
name, kind, left = sys.argv[1], type("Mine", (eval(sys.argv[2]),), {}), [1]
def ring(*_): raise kind("of the user")
def hook(event, arguments):
    if event == "import" and arguments[0] == name and left:
        left.clear()
        os.kill(os.getpid(), signal.SIGALRM)
def calls():
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1, timeout=60)
    dist.all_gather_object([None], 1)
signal.signal(signal.SIGALRM, ring)
sys.addaudithook(hook)
try: calls()
except kind: print("out", end=" ")
if dist.is_initialized(): dist.destroy_process_group()
calls()
print("again")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("numpy.exceptions", OSError),  # NumPy can't be imported again after an error there
        ("yaml", ImportError),  # Numba goes on without it
        ("numba.cpython.randomimpl", AttributeError),  # imported while a function is loaded
    ],
)
def test_a_handlers_error_amid_the_imports_of_first_calls_comes_out_and_breaks_none(
    tmp_path: Path, name: str, kind: type[BaseException]
) -> None:
    done = python(FIRST_CALLS, tmp_path, name, kind.__name__)
    assert done.stdout == "out again\n", done.stderr


LEFT = """
import os, signal, sys, time
from nc10d.base.run_to_end import run_to_end
def ring(*_): raise KeyError
def call():
    os.kill(os.getpid(), signal.SIGALRM)
    time.sleep(1)
    print("ended", flush=True)
signal.signal(signal.SIGALRM, ring)
try: run_to_end(call)
except KeyError: print("out", flush=True)
"""


@pytest.mark.parametrize("then", ["", "os.fork() or os._exit(0); print('parent')"])
def test_a_fork_and_the_end_of_python_wait_for_the_end_of_a_call(tmp_path: Path, then: str) -> None:
    done = python(LEFT + then, tmp_path)
    assert done.stdout.split() == ["out", "ended"] + ["parent"] * bool(then), done.stderr


def python(code: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in a new interpreter, which finds modules in `folder`."""
    path = os.pathsep.join((str(folder), os.environ.get("PYTHONPATH", "")))
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=LONG * 4,
    )
