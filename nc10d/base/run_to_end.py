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
from typing import Any, Generic, ParamSpec, TypeVar

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
    made = _Call(call, drop, sys._getframe(1))
    try:
        # Not a Thread, whose start is Python code, which an error may leave with a lock taken.
        _thread.start_new_thread(copy_context().run, (made.run,))
        _wait_for(made.held)
        if made.results:
            # Without a call, amid which a handler's error would lose the result.
            result = made.results[0]
            del made.results[0]
            return result
    except BaseException as error:
        trace = error.__traceback__
        if isinstance(error, RuntimeError) and trace is not None and trace.tb_next is None:
            return call()  # no thread can start: Python is ending, or there are too many
        made.leave(error, cancel, grace)
        raise
    if not made.errors:
        raise RuntimeError("a signal's handler has forked amid a call on another thread")
    raise made.errors.pop()


class _Call(Generic[T]):
    """A call on another thread: its result or its error, and a lock that is held until its end."""

    def __init__(
        self, call: Callable[[], T], drop: Callable[[T], object] | None, caller: FrameType
    ) -> None:
        self._call, self._drop = call, drop
        # In a list, where `from_handler` does not look: a frame among a function's own variables
        # would mark this function as a handler.
        self._caller = [caller]
        self.results: list[T] = []
        self.errors: list[BaseException] = []
        self.held = _thread.allocate_lock()
        self.held.acquire()

    def run(self) -> None:
        """Make the call, on the other thread."""
        thread = _thread.get_ident()
        callers[thread] = self._caller
        _running[thread] = self.held, self._drop is None
        try:
            self.results.append(self._call())
            if self._drop is not None and is_left():
                self._drop_result()
        except BaseException as error:  # noqa: BLE001  (the main thread raises it)
            if not is_left():
                self.errors.append(error)
        finally:
            _running.pop(thread, None)
            callers.pop(thread, None)
            # The call and the frame may hold what the main thread drops next.
            del self._call
            self._caller.clear()
            # Python 3.11 lists a thread that has asked for itself, or joined another, for ever.
            threading._active.pop(thread, None)  # type: ignore[attr-defined]
            self.held.release()

    def leave(
        self, error: BaseException, cancel: Callable[[BaseException], None] | None, grace: float
    ) -> None:
        """Cancel the call for a handler's error, if its result can be dropped, and drop that."""
        if self._drop is None:
            return
        self._caller.clear()
        try:
            if cancel is not None:
                cancel(error)
            if not (self.results or self.errors):
                self.held.acquire(timeout=grace)
        finally:
            if self.results:
                run_to_end(self._drop_result)

    def _drop_result(self) -> None:
        """Drop the result, unless another thread has taken it; never in the main thread."""
        assert self._drop is not None, "the callers have looked"
        # Nobody could act on an error of `drop`: a handler's error ends the call.
        with contextlib.suppress(Exception):
            self._drop(self.results.pop())


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
