"""Errors of the library's own calls, told apart from those that a signal's handler raises.

A handler runs in the middle of any call and may raise any exception, a TimeoutError or an OSError
as well. Such an exception belongs to the user: it must leave a blocking call as it is. So an except
clause for such types names them by `raised_here`, and `suppress_here` replaces contextlib.suppress.
Other threads must be able to go on afterwards: Condition, Event and Thread replace Python's own.
Work that takes longer than a thread's start runs off the main thread instead (run_to_end.py).
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import FrameType
from typing import Any, TypeVar

from nc10d.base.deadline import NEVER, Deadline
from nc10d.base.run_to_end import SLICE
from nc10d.errors import UnsupportedPlatform

E = TypeVar("E", bound=BaseException)
T = TypeVar("T")
LockLike = AbstractContextManager[Any]
thread_ident = ctypes.PYFUNCTYPE(ctypes.c_ulong)(("PyThread_get_thread_ident", ctypes.pythonapi))
"""Return the system's ident of this thread; `threading` may return a greenlet's ident instead."""


def raised_here(*kinds: type[E]) -> tuple[type[E], ...]:
    """Return `kinds` for an except clause; no types if a signal's handler raised the error."""
    return () if from_handler(sys.exc_info()[1]) else kinds


def from_handler(error: BaseException | None) -> bool:
    """Return whether a signal's handler raised `error`, which this frame is handling."""
    if not _in_main_thread():
        return False  # handlers run there alone
    # Python calls a handler with the interrupted frame, which no other function gets from its
    # caller.
    trace = None if error is None else error.__traceback__
    while trace is not None and trace.tb_next is not None:
        interrupted, trace = trace.tb_frame, trace.tb_next
        if _has_local(trace.tb_frame, interrupted):
            return True
    return False


def _in_main_thread() -> bool:
    return threading.get_ident() == threading.main_thread().ident


def _has_local(frame: FrameType, wanted: object) -> bool:
    for value in frame.f_locals.values():
        if value is wanted or (type(value) is tuple and any(one is wanted for one in value)):
            return True
    return False


class _Awaited:
    """The threads that wait for a change, each at a lock of its own, which a change releases.

    A handler's error may come between any two instructions. It must leave no lock taken that others
    need: up to Python 3.13, a `with` takes and frees a lock in one instruction. Python's own Event
    and Condition are written in Python, and an error amid them may leave their lock taken. In
    Python 3.11, SimpleQueue.get blocks for ever if the timeout passes as the call begins.
    """

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: list[threading.Lock] = []

    def _wait_until(self, ready: Callable[[], T | None], deadline: Deadline) -> T | None:
        """Call `ready` now and after each `_wake` until the result is not None, or the deadline.

        Return the last result.
        """
        if (found := ready()) is not None:
            return found
        asleep = threading.Lock()
        asleep.acquire()
        try:
            # A change that `ready` does not see comes later, and so releases this lock.
            self._waiting.append(asleep)
            longest = SLICE if _in_main_thread() else threading.TIMEOUT_MAX
            while (found := ready()) is None and not deadline.expired():
                asleep.acquire(timeout=deadline.slice(longest))
            return found
        finally:
            self._waiting.remove(asleep)

    def _wake(self) -> None:
        for asleep in tuple(self._waiting):
            try:
                asleep.release()
            except raised_here(RuntimeError):
                pass  # the thread has been woken already


class Condition(_Awaited):
    """A lock, and a wait for what other threads change with the lock held."""

    __slots__ = ("_lock",)

    def __init__(self, lock: LockLike | None = None) -> None:
        super().__init__()
        self._lock = lock or threading.RLock()

    def change(self, act: Callable[[], T]) -> T:
        """Return `act()`, called with the lock held; then all that wait check again."""
        try:
            with self._lock:
                return act()
        finally:
            try:
                self._wake()
            except BaseException:  # from a signal's handler: the change has been made
                self._wake()
                raise

    def notify_all(self) -> None:
        """Make all that wait check again; never blocks."""
        self._wake()

    def until(self, ready: Callable[[], T | None], deadline: Deadline) -> T | None:
        """Block until `ready` does not return None, or the deadline; return its last result.

        `ready` is called with the lock held, at first and after each change.
        """

        def look() -> T | None:
            with self._lock:
                return ready()

        return self._wait_until(look, deadline)


class Event(_Awaited):
    """A flag to wait for, as threading.Event; a waiter may miss a `set` that a `clear` follows."""

    __slots__ = ("_is_set",)

    def __init__(self) -> None:
        super().__init__()
        self._is_set = False

    def is_set(self) -> bool:
        """Return whether the event is set."""
        return self._is_set

    def set(self) -> None:
        """Set the event and wake all waiting threads."""
        self._is_set = True
        try:
            self._wake()
        except BaseException:  # from a signal's handler: the event is set
            self._wake()
            raise

    def clear(self) -> None:
        """Unset the event."""
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        """Block until the event is set, or for `timeout` seconds; return whether it is."""
        deadline = NEVER if timeout is None else Deadline.after(max(0.0, timeout))
        return self._wait_until(self._set_or_none, deadline) or False

    def _set_or_none(self) -> bool | None:
        return self._is_set or None


class Thread(threading.Thread):
    """A thread whose `start` passes on an error that a signal's handler raises meanwhile.

    Python's own start may raise a RuntimeError or a KeyError in its place. Whether the thread runs
    is open after such an error; `abandon` decides.
    """

    def __init__(
        self, *, target: Callable[..., object], args: tuple[Any, ...] = (), **options: Any
    ) -> None:
        super().__init__(**options)
        self._call: Callable[[], object] | None = partial(target, *args)
        # The thread and `abandon` race for the only item: the first to set it wins.
        self._runs: dict[None, bool] = {}

    def start(self) -> None:
        """Start the thread; UnsupportedPlatform if a greenlet would run instead."""
        if threading.get_ident() != thread_ident():
            raise UnsupportedPlatform(
                "nc10d runs threads that block, and greenlets have replaced Python's: with gevent, "
                "call monkey.patch_all(thread=False)"
            )
        raised: BaseException | None = None
        try:
            super().start()
        except (RuntimeError, KeyError) as error:  # KeyError: the thread runs already
            raised = error.__context__
            # The handler of Ctrl-C is C code, which leaves no frame.
            if not (from_handler(raised) or isinstance(raised, KeyboardInterrupt)):
                raise
        if raised is not None:
            raise raised

    def start_in(self, owner: object, attribute: str) -> None:
        """Start the thread, and then keep it as an attribute of `owner`, unless it never runs."""
        try:
            self.start()
        except BaseException:
            if not self.abandon():
                setattr(owner, attribute, self)
            raise
        setattr(owner, attribute, self)

    def run(self) -> None:
        """Call the thread's function, unless the thread was abandoned."""
        if self._runs.setdefault(None, True):
            call, self._call = self._call, None
            assert call is not None, "nobody else has taken it"
            call()

    def abandon(self) -> bool:
        """Keep the thread from calling its function; return False if it has begun; idempotent."""
        if self._runs.setdefault(None, False):
            return False
        # Python keeps the Thread of a failed start; without the call, nothing else stays alive.
        self._call = None
        return True


@contextmanager
def suppress_here(*kinds: type[BaseException]) -> Iterator[None]:
    """Suppress errors of some kinds in a with-block, unless a signal's handler raised them."""
    try:
        yield
    except raised_here(*kinds):
        pass
