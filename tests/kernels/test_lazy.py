"""Functions that are compiled when first used: once, also after an interrupt, also in a child."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from numba.core.compiler_lock import global_compiler_lock
from numba.core.dispatcher import Dispatcher

from nc10d.base.run_to_end import run_to_end
from nc10d.kernels import cache, cache_dir


@cache.on_demand("int64(int64)")
def _one_more(number: int) -> int:
    return number + 1


@cache.on_demand("int64(int64)")
def _two_more(number: int) -> int:
    return number + 2


one_more: cache.EntryPoint
two_more: cache.EntryPoint
__getattr__ = cache.entry_points(__name__)
HERE = sys.modules[__name__]


def test_an_interrupted_compilation_is_done_by_the_next_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(cache.CodeFile, "load_overload", interrupt)
        with pytest.raises(KeyboardInterrupt):
            _ = HERE.one_more
    assert HERE.one_more(4) == 5
    assert HERE.one_more is HERE.one_more


@pytest.mark.parametrize("kind", [KeyboardInterrupt, RuntimeError, ImportError])
def test_a_handlers_error_comes_out_at_once_and_the_function_is_loaded_to_its_end(
    kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    load, go_on, done = cache.CodeFile.load_overload, threading.Event(), threading.Event()

    def ring(number: int, frame: FrameType | None) -> None:
        raise kind("of the user")

    def interrupted(*arguments: Any) -> Any:
        os.kill(os.getpid(), signal.SIGALRM)
        assert go_on.wait(60)
        found = load(*arguments)
        done.set()
        return found

    assert HERE.two_more(4) == 6  # writes the cache file
    del HERE.two_more
    before = signal.signal(signal.SIGALRM, ring)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(cache.CodeFile, "load_overload", interrupted)
            with pytest.raises(kind, match="of the user"):
                _ = HERE.two_more
            assert not done.is_set()
            go_on.set()
            assert HERE.two_more(4) == 6
            assert done.is_set()
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_handler_that_asks_amid_a_compilation_of_the_users_does_not_wait_for_it() -> None:
    with global_compiler_lock:
        assert HERE.seven(4) == 11


@cache.on_demand("int64(int64)")
def _seven(number: int) -> int:
    return number + 7


seven: cache.EntryPoint


@cache.on_demand("int64(int64)")
def _six(number: int) -> int:
    return number + 6


six: cache.EntryPoint


def test_ctrl_c_behind_the_loading_of_a_function_lets_it_be_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    assert HERE.six(4) == 10
    del HERE.six
    with monkeypatch.context() as patch:
        patch.setattr(Dispatcher, "disable_compile", interrupt)
        with pytest.raises(KeyboardInterrupt):
            _ = HERE.six
    assert HERE.six(4) == 10


@cache.on_demand("int64(int64)")
def _three(number: int) -> int:
    return number + 3


@cache.on_demand("int64(int64)")
def _four(number: int) -> int:
    return number + 4


three: cache.EntryPoint
four: cache.EntryPoint


def test_functions_that_another_process_compiles_are_made_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "_folder", lambda _: tmp_path)
    lock = cache.CodeFile(_three, "int64(int64)").path.with_suffix(".lock")
    made: list[str] = []
    got_on = threading.Event()

    def make(name: str) -> None:
        getattr(HERE, name)
        made.append(name)
        got_on.set()

    everything = [partial(make, name) for name in ("three", "four")]
    thread = threading.Thread(target=cache.make_all, args=(everything,))
    with cache_dir.exclusive(lock) as held:
        assert held
        thread.start()
        assert got_on.wait(60)
        assert made == ["four"], "nobody waits for one while there is another to make"
    thread.join(60)
    assert made == ["four", "three"]
    assert HERE.three(4) + HERE.four(4) == 15
    with cache_dir.exclusive(lock), pytest.raises(BlockingIOError), cache_dir.exclusive(lock, 0):
        pass
    with cache_dir.exclusive(lock, 0) as free:
        assert free


def test_an_undeclared_name_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'five'"):
        _ = HERE.five


def test_a_child_forked_while_a_thread_compiles_can_compile() -> None:
    taken, forked = threading.Event(), threading.Event()

    def compiling() -> None:
        with cache.compiling:
            taken.set()
            forked.wait(0.2)  # a fork waits for the release

    thread = threading.Thread(target=compiling)
    thread.start()
    assert taken.wait(60)
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        os._exit(HERE.two_more(40))
    forked.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42


def fork_beside_a_call() -> int:
    """Return the exit code of a child that another thread forks while a call is to compile."""
    begun, forking, forked = threading.Event(), threading.Event(), threading.Event()
    children: list[int] = []

    def fork() -> None:
        assert begun.wait(30)
        forking.set()
        child = os.fork()
        if child == 0:
            os._exit(0)
        children.append(child)
        forked.set()

    def call() -> None:
        begun.set()
        assert forking.wait(30)
        forked.wait(0.2)  # the fork waits for this call
        with cache.compiling:
            pass

    thread = threading.Thread(target=fork)
    thread.start()
    run_to_end(call)
    thread.join()
    return os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1])


def test_a_fork_of_another_thread_waits_for_a_call_that_is_yet_to_compile() -> None:
    # In a process of its own, without torch. Such a child drops the main thread's locals, where
    # torch's DTensor keeps process groups, and gloo's destructor joins a thread that is not there.
    program = "import test_lazy; print(test_lazy.fork_beside_a_call())"
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", program],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.stdout == "0\n", done.stderr
