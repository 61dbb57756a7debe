"""Functions that are compiled when first used: once, also after an interrupt, also in a child."""

from __future__ import annotations

import os
import signal
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from numba.core.dispatcher import Dispatcher

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
        patch.setattr(cache._OneFile, "load_overload", interrupt)
        with pytest.raises(KeyboardInterrupt):
            _ = HERE.one_more
    assert HERE.one_more(4) == 5
    assert HERE.one_more is HERE.one_more


def test_ctrl_c_waits_until_a_loaded_object_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """A half-built llvmlite object would print an error on stderr when it is freed."""
    load, done = cache._OneFile.load_overload, []

    def interrupted(*arguments: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        found = load(*arguments)
        done.append(found)
        return found

    assert HERE.two_more(4) == 6  # writes the cache file
    del HERE.two_more
    before = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        patch.setattr(cache._OneFile, "load_overload", interrupted)
        with pytest.raises(KeyboardInterrupt):
            _ = HERE.two_more
    assert len(done) == 1
    assert done[0] is not None
    assert signal.getsignal(signal.SIGINT) is before
    assert HERE.two_more(4) == 6


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
    lock = cache._OneFile(_three, "int64(int64)").path.with_suffix(".lock")
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
