"""Calls that come to their end even if a signal's handler raises meanwhile.

An error amid an import, or amid a library's change of its tables, may leave both broken. Python's
import and Numba also drop some errors that come amid their work. Python runs handlers in the main
thread alone. So such work runs on a thread of its own, and the main thread only waits.
"""

from __future__ import annotations

import _thread
import atexit
import importlib
import os
import sys
import threading
from collections.abc import Callable
from contextvars import copy_context
from functools import partial
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")

SLICE = 0.05
"""Seconds until the main thread sees a signal that came just before the wait began."""
compiling = threading.RLock()
"""Held while anything is compiled or loaded. A fork waits for this, so that a child can compile."""
_running: dict[int, _thread.LockType] = {}
"""The lock that each thread of `run_to_end` holds until it ends."""


def run_to_end(call: Callable[[], T]) -> T:
    """Return `call()`, made by another thread; a handler's error leaves the main thread at once.

    Any other thread makes the call itself. So does the main thread amid an import: the other thread
    could wait for a module whose lock the main thread holds. No lock that `call` takes may be held.
    """
    if threading.get_ident() != threading.main_thread().ident or _amid_import():
        return call()
    results: list[T] = []
    errors: list[BaseException] = []
    held = _thread.allocate_lock()
    held.acquire()

    def run() -> None:
        thread = _thread.get_ident()
        _running[thread] = held
        try:
            results.append(call())
        except BaseException as error:  # noqa: BLE001  (the main thread raises it)
            errors.append(error)
        finally:
            del _running[thread]
            held.release()

    try:
        # Not a Thread, whose start is Python code, which an error may leave with a lock taken.
        _thread.start_new_thread(copy_context().run, (run,))
    except RuntimeError as error:
        if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
            raise  # from a handler, which is a function of Python
        return call()  # no thread can start: Python is ending, or there are too many
    _wait_for(held)
    if errors:
        raise errors.pop()
    return results[0]


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
    for thread, held in tuple(_running.items()):
        if thread != _thread.get_ident():
            _wait_for(held)


def _before_fork() -> None:
    # In this order: a call that runs may still take the lock. A later call waits for the lock.
    _wait_for_ends()
    compiling.acquire()


def _in_child() -> None:
    _running.clear()  # a forked child has no other threads
    compiling.release()


os.register_at_fork(
    before=_before_fork, after_in_parent=compiling.release, after_in_child=_in_child
)
atexit.register(_wait_for_ends)  # Python must not end amid a call of LLVM
