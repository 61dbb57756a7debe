"""Calls off the main thread, where no signal's handler raises amid them.

Python runs handlers in the main thread alone. A handler's error amid an import, a library's change
of its tables or a protocol with peers would break them, or be taken for an error of theirs. So such
work runs on a thread of its own, and the main thread only waits.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import importlib
import os
import sys
import threading
from collections.abc import Callable
from contextvars import copy_context
from functools import partial, wraps
from types import FrameType
from typing import Any, ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")

SLICE = 0.05
"""Seconds until the main thread sees a signal that came just before the wait began."""
compiling = threading.RLock()
"""Held while anything is compiled or loaded. A fork waits for this, so that a child can compile."""
_running: dict[int, tuple[_thread.LockType, bool]] = {}
"""By thread: the lock that is released at its end, and whether a fork and Python's exit wait."""
callers: dict[int, list[FrameType]] = {}
"""The main thread's frames that have called `run_to_end`, by the thread that makes the call."""


def run_to_end(
    call: Callable[[], T],
    cancel: Callable[[BaseException], None] | None = None,
    drop: Callable[[T], object] | None = None,
    grace: float = 0.0,
) -> T:
    """Return `call()`, made on another thread.

    The main thread only waits, so a handler's error leaves this function at once. The caller must
    hold no lock that `call` takes. Any other thread makes the call itself. So does the main thread
    amid an import: the other thread could wait for a module whose lock the main thread holds.

    Without `drop`, a fork and Python's exit wait for the end of `call`. With `drop`, they do not: a
    result that comes after a handler's error goes to `drop`. `cancel(error)` then ends the waits in
    `call`, and the error waits up to `grace` seconds for its end.
    """
    if threading.get_ident() != threading.main_thread().ident or _amid_import():
        return call()
    if sys.is_finalizing():  # Python 3.11 starts threads then that never run
        return call()
    results: list[T] = []
    errors: list[BaseException] = []
    held = _thread.allocate_lock()
    held.acquire()
    # In a list, where `from_handler` does not look: a frame among a function's own variables would
    # mark this function as a handler.
    caller = [sys._getframe(1)]

    def run() -> None:
        thread = _thread.get_ident()
        callers[thread] = caller
        _running[thread] = held, drop is None
        try:
            results.append(call())
            if drop is not None and is_left():
                _drop_one(results, drop)
        except BaseException as error:  # noqa: BLE001  (the main thread raises it)
            if not is_left():
                errors.append(error)
        finally:
            _running.pop(thread, None)
            callers.pop(thread, None)
            caller.clear()  # the frame may hold what the main thread drops next
            # Python 3.11 lists a thread that has asked for itself, or joined another, for ever.
            threading._active.pop(thread, None)  # type: ignore[attr-defined]
            held.release()

    try:
        # Not a Thread, whose start is Python code, which an error may leave with a lock taken.
        _thread.start_new_thread(copy_context().run, (run,))
        _wait_for(held)
        if results:
            return results[0]  # a call, as of `pop`, would let a handler's error lose the result
    except BaseException as error:
        trace = error.__traceback__
        if isinstance(error, RuntimeError) and trace is not None and trace.tb_next is None:
            return call()  # no thread can start: Python is ending, or there are too many
        if drop is not None:
            caller.clear()
            try:
                if cancel is not None:
                    cancel(error)
                if not (results or errors):
                    held.acquire(timeout=grace)
            finally:
                if results:
                    run_to_end(partial(_drop_one, results, drop))
        raise
    if not errors:
        raise RuntimeError("a signal's handler has forked amid a call on another thread")
    raise errors.pop()


def _drop_one(results: list[T], drop: Callable[[T], object]) -> None:
    """Drop the result, unless another thread has taken it; never in the main thread."""
    with contextlib.suppress(Exception):  # nobody could act on it: a handler's error ends the call
        drop(results.pop())


def is_left() -> bool:
    """Return whether a handler's error has left this thread's call, whose result is dropped."""
    return callers.get(_thread.get_ident()) == []


def off_main(function: Callable[P, T]) -> Callable[P, T]:
    """Have `run_to_end` make all calls of the decorated function: no handler raises in them."""

    @wraps(function)
    def on_thread(*args: P.args, **kwargs: P.kwargs) -> T:
        return run_to_end(partial(function, *args, **kwargs))

    return on_thread


def import_to_end(module: str) -> Any:
    """Import a module by `run_to_end`, and return it."""
    if module in sys.modules:
        return importlib.import_module(module)
    return run_to_end(partial(importlib.import_module, module))


def _wait_for(held: _thread.LockType) -> None:
    while not held.acquire(timeout=SLICE):
        pass
    held.release()  # others may wait, too


def _amid_import() -> bool:
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename != "<frozen importlib._bootstrap>":
        frame = frame.f_back
    return frame is not None


def _wait_for_ends() -> None:
    """Wait for the calls that a handler's error has left running."""
    for thread in tuple(_running):
        held, waits = _running.get(thread, (None, False))
        if held is not None and waits and thread != _thread.get_ident():
            _wait_for(held)


def _before_fork() -> None:
    # In this order: a call that runs may still take the lock. A later call waits for the lock.
    _wait_for_ends()
    compiling.acquire()


def _in_child() -> None:
    # A forked child has no other threads. If a handler forked, the call amid which it came fails.
    for held, _ in _running.values():
        held.release()
    _running.clear()
    callers.clear()
    compiling.release()


os.register_at_fork(
    before=_before_fork, after_in_parent=compiling.release, after_in_child=_in_child
)


@atexit.register
def _at_exit() -> None:
    """Let Python end, but not amid a compilation."""
    _wait_for_ends()
    with compiling:
        pass
