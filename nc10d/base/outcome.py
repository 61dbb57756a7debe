"""Something that ends once, done or failed: what Work and Future have in common.

From pending to done or failed leads one method, `_finish`. Whoever makes an Outcome fills in three
hooks:

    _poll()           look without blocking; call `_finish` if it is over
    _block(deadline)  return when it is over (after `_finish`) or the deadline has passed; raise
                      nothing of its own but KeyboardInterrupt
    _watch()          called once, when the first callback is attached; from then on `_finish`
                      must be called by a thread of the maker's, even if a thread in `_block` or
                      `_poll` has done so before

A callback that is attached while it is pending runs on the thread that finishes it, but never on
one that merely waits or polls: what `_poll` and `_block` find is published at once, and the
callbacks are left to the maker's thread. A callback that is attached afterwards runs at once, in
the thread that attaches it. What a callback raises is logged.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Generator, Sequence
from threading import get_ident
from time import perf_counter
from typing import Any

from nc10d.base.deadline import NEVER, Deadline, Timeout
from nc10d.errors import CollectiveTimeout

_log = logging.getLogger(__name__)

PENDING, DONE, FAILED = 0, 1, 2

# One lock for all transitions: it is held for a few assignments only, and a Work must be too
# cheap to carry one of its own. Re-entrant, because a finalizer may run inside.
_transition = threading.RLock()

# Threads that are inside some `_poll` or `_block`.
_guests: set[int] = set()


def _renew_after_fork() -> None:
    """Give the child a lock of its own: another thread may have held it during the fork."""
    global _transition
    _transition = threading.RLock()
    _guests.clear()


os.register_at_fork(after_in_child=_renew_after_fork)


class Promise:
    """The one transition, the callbacks and the gate that both Work and Future stand on."""

    __slots__ = ("__weakref__", "_callbacks", "_ended", "_exception", "_gate", "_result", "_state")

    def __init__(self) -> None:
        self._state = PENDING
        self._exception: BaseException | None = None
        self._result: Any = None
        self._callbacks: list[Callable[[Any], object]] | None = None
        self._gate: threading.Event | None = None
        self._ended = 0.0

    def _poll(self) -> None:
        """Look without blocking whether it is over; the base is finished by others."""

    def _block(self, deadline: Deadline) -> None:
        """Return when it is over or the deadline has passed; the base waits for `_finish`."""
        with _transition:
            if self._state != PENDING:
                return
            gate = self._gate = self._gate or threading.Event()
        gate.wait(min(deadline.remaining(), threading.TIMEOUT_MAX))

    def _watch(self) -> None:
        """See to it that `_finish` is called without anyone waiting; the base always is."""

    def _require_unattended(self, what: str) -> None:
        """Raise the RuntimeError that says that `what` alone ends nothing, if so; the base ends."""

    def _finish(self, exception: BaseException | None = None, result: Any = None) -> bool:
        """Become done, or failed with `exception`; say whether this call was the first."""
        with _transition:
            first = self._state == PENDING
            if first:
                self._exception, self._result = exception, result
                self._ended = perf_counter()
                self._state = DONE if exception is None else FAILED
            callbacks: Sequence[Callable[[Any], object]] = ()
            if self._callbacks and get_ident() not in _guests:
                callbacks, self._callbacks = self._callbacks, []
            gate = self._gate
        if gate is not None:
            gate.set()
        for callback in callbacks:
            self._run(callback)
        return first

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

    def _run(self, callback: Callable[[Any], object]) -> None:
        try:
            callback(self)
        except Exception:  # noqa: BLE001  (the user's code; the log has the traceback)
            _log.exception("a callback of %r failed", self)

    def _look(self) -> bool:
        """Poll once, as a guest; say whether it is over."""
        if self._state == PENDING:
            with Guest():
                self._poll()
        return self._state != PENDING

    def _describe(self) -> str:
        """Name it in an error."""
        return "a Future"

    def _settle(self, timeout: Timeout) -> None:
        """Block until it is over, then raise what made it fail."""
        if self._state == PENDING:
            deadline = NEVER if timeout is None else Deadline.after(timeout)
            with Guest():
                self._block(deadline)
            if self._state == PENDING:
                what = self._describe()
                message = f"{what} did not end within wait({timeout}); it goes on"
                raise CollectiveTimeout(message, op=what)
        if self._exception is not None:
            raise fresh(self._exception)

    def _wait_async(self) -> Generator[Any, None, None]:
        """Suspend the running asyncio task until it is over."""
        if self._look():
            return
        self._require_unattended("await")
        import asyncio  # imported by whoever awaits, not by everyone who imports nc10d

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


class Guest:
    """Mark this thread as one that waits or polls, so that it runs nobody's callbacks."""

    __slots__ = ("_entered", "_ident")

    def __enter__(self) -> None:
        self._ident = get_ident()
        self._entered = self._ident not in _guests
        _guests.add(self._ident)

    def __exit__(self, *_: object) -> None:
        if self._entered:
            _guests.discard(self._ident)


def fresh(error: BaseException) -> BaseException:
    """Copy `error` for one raise: a traceback of its own, and the original as its cause."""
    kind = type(error)
    # A timeout is an OSError too, and those can be made by OSError's own `__new__` only.
    make = OSError.__new__ if isinstance(error, OSError) else kind.__new__
    try:
        copy = make(kind, *error.args)
    except TypeError:  # a type with a constructor of its own is raised as it is
        return error
    copy.args = error.args
    copy.__dict__.update(error.__dict__)
    if hasattr(error, "__notes__"):
        copy.__notes__ = list(error.__notes__)
    copy.__cause__ = error
    return copy
