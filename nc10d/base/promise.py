"""A Promise ends once, done or failed: the common base of Work and Future.

Only the method `_finish` ends a pending Promise. A subclass implements three hooks:

    _poll()           check without blocking; call `_finish` if the work has ended
    _block(deadline)  return when the work has ended (after `_finish`) or the deadline has passed;
                      raise nothing but KeyboardInterrupt
    _watch()          called once, when the first callback is attached; from then on a thread of
                      the subclass must call `_finish`, even if a thread in `_block` or `_poll`
                      has called it before

A callback that is attached to a pending Promise runs on the thread that finishes it, but never on a
thread that only waits or polls. If `_poll` or `_block` finds the end, the state changes at once,
and the subclass's thread runs the callbacks. A callback that is attached afterwards runs at once,
in the thread that attaches it. Exceptions of callbacks are logged.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Generator
from threading import get_ident
from typing import Any

from nc10d.base.deadline import NEVER, Deadline, Timeout, monotonic
from nc10d.base.signal_errors import Event, raised_here
from nc10d.base.text import in_seconds
from nc10d.errors import CollectiveTimeout, DistError

_log = logging.getLogger(__name__)

PENDING, DONE, FAILED = 0, 1, 2

# A single lock for all transitions, held for a few assignments only. A Work must be too cheap for a
# lock of its own. Re-entrant, because a finalizer may run inside.
_transition = threading.RLock()

# The threads that are in a `_poll` or `_block`.
_waiting_threads: set[int] = set()


def _renew_after_fork() -> None:
    """In a forked child, make a new lock: another thread may have held the old one."""
    global _transition
    _transition = threading.RLock()
    _waiting_threads.clear()


os.register_at_fork(after_in_child=_renew_after_fork)


class Promise:
    """The transition, the callbacks and the wait that Work and Future share."""

    __slots__ = (
        *("__weakref__", "_callbacks", "_ended", "_exception"),
        *("_finished", "_result", "_state"),
    )

    def __init__(self) -> None:
        self._state = PENDING
        self._exception: BaseException | None = None
        self._result: Any = None
        self._callbacks: list[Callable[[Any], object]] | None = None
        self._finished: Event | None = None
        self._ended = 0.0

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError(
            f"{self!r} can't be pickled or copied: it belongs to this process. Wait for it, and "
            "send the result"
        )

    def _poll(self) -> None:
        """Check without blocking whether the work has ended; the base does nothing."""

    def _block(self, deadline: Deadline) -> None:
        """Block until the end or the deadline; the base waits for `_finish`."""
        with _transition:
            if self._state != PENDING:
                return
            finished = self._finished = self._finished or Event()
        finished.wait(min(deadline.remaining(), threading.TIMEOUT_MAX))

    def _watch(self) -> None:
        """Ensure that `_finish` is called though no thread waits; the base does nothing."""

    def _require_unattended(self, what: str) -> None:
        """Raise RuntimeError if `what` never ends without a wait; the base always ends."""

    def _finish(self, exception: BaseException | None = None, result: Any = None) -> bool:
        """Become done, or failed with `exception`; return whether this call was the first."""
        due: list[Callable[[Any], object]] = []
        try:
            return self._finish_once(exception, result, due)
        except BaseException:  # of a signal's handler: the waiters are still notified
            self._finish_once(exception, result, due)
            raise

    def _finish_once(
        self, exception: BaseException | None, result: object, due: list[Callable[[Any], object]]
    ) -> bool:
        """Finish; `due` has the callbacks that an interrupted call has left, the next one last."""
        with _transition:
            first = self._state == PENDING
            if first:
                self._exception, self._result = exception, result
                self._ended = monotonic()
                self._state = DONE if exception is None else FAILED
            if self._callbacks and get_ident() not in _waiting_threads:
                due[:0], self._callbacks = self._callbacks[::-1], []
            finished = self._finished
        if finished is not None:
            finished.set()
        while due:
            self._run(due.pop())
        return first

    def _finish_waiting(self, result: object) -> None:
        """Become done, in a thread that waits: callbacks are left to the subclass's thread."""
        with _transition:
            if self._state == PENDING:
                self._result, self._ended = result, monotonic()
                self._state = DONE

    def _attach(self, callback: Callable[[Any], object]) -> None:
        with _transition:
            pending = self._state == PENDING
            watched = self._callbacks is not None
            if pending:
                self._callbacks = self._callbacks or []
                self._callbacks.append(callback)
        if not pending:
            self._run(callback)
        elif not watched:
            self._watch()

    def _detach(self, callback: Callable[[Any], object]) -> None:
        """Remove a callback that was attached and has not run; it may be running now."""
        with _transition:
            if self._callbacks and callback in self._callbacks:
                self._callbacks.remove(callback)

    def _run(self, callback: Callable[[Any], object]) -> None:
        try:
            callback(self)
        except raised_here(Exception):  # the user's code; the log has the traceback
            _log.exception("a callback of %r failed", self)

    def _look(self) -> bool:
        """Poll once, without running callbacks; return whether the work has ended."""
        if self._state == PENDING:
            with NoCallbacks():
                self._poll()
        return self._state != PENDING

    def _describe(self) -> str:
        """Return this object's name in error messages."""
        return "a Future"

    def _settle(self, timeout: Timeout) -> None:
        """Block until the end; raise the failure's exception, or CollectiveTimeout."""
        if self._state == PENDING:
            deadline = NEVER if timeout is None else Deadline.after(timeout)
            with NoCallbacks():
                self._block(deadline)
            if self._state == PENDING:
                what = self._describe()
                message = f"{what}: wait() timed out after {in_seconds(deadline.limit)}; it goes on"
                raise CollectiveTimeout(message, op=what)
        if self._exception is not None:
            raise copy_to_raise(self._exception)

    def _wait_async(self) -> Generator[Any, None, None]:
        """Suspend the running asyncio task until the end."""
        if self._look():
            return
        self._require_unattended("await")
        import asyncio  # only users of await need asyncio

        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()

        def end(_: object) -> None:
            if not ended.done():
                ended.set_result(None)

        def wake(_: object) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(end, None)

        self._attach(wake)
        yield from ended.__await__()


class NoCallbacks:
    """Mark this thread as waiting or polling, so that it runs no callbacks."""

    __slots__ = ("_entered", "_ident")

    def __enter__(self) -> None:
        self._ident = get_ident()
        self._entered = self._ident not in _waiting_threads
        _waiting_threads.add(self._ident)

    def __exit__(self, *_: object) -> None:
        if self._entered:
            _waiting_threads.discard(self._ident)


def copy_to_raise(error: BaseException) -> BaseException:
    """Copy `error` for a raise: with a traceback of its own, and the original as the cause."""
    note_told(error)
    kind = type(error)
    # A timeout is an OSError too, which only OSError's own `__new__` can create.
    make = OSError.__new__ if isinstance(error, OSError) else kind.__new__
    try:
        copy = make(kind, *error.args)
    except TypeError:  # the constructor takes other arguments: raise the original
        return error
    copy.args = error.args
    copy.__dict__.update(error.__dict__)
    if hasattr(error, "__notes__"):
        copy.__notes__ = list(error.__notes__)
    copy.__cause__ = error
    return copy


def note_told(error: BaseException | None) -> None:
    """Note that a caller gets `error`: the end of its group does not log it."""
    if isinstance(error, DistError):
        error._told = True
