"""How a launched operation ends: Work for operations, Future for values.

Both go from pending to done or failed exactly once, in `_finish`. A backend subclasses Work and
fills in three hooks:

    _poll()           look without blocking; call `_finish` if the operation is over
    _block(deadline)  return when the operation is over (after `_finish`) or the deadline has
                      passed; raise nothing of its own but KeyboardInterrupt
    _watch()          called once, when the first callback is attached; from then on the
                      backend's notifier thread must call `_finish`, even if a thread in
                      `_block` or `_poll` has done so before

A callback that is attached to a pending Work runs on the thread that finishes it, but never on a
thread that merely waits or polls: what `_poll` and `_block` find is published at once, and the
callbacks are left to the notifier. A callback that is attached afterwards runs at once, in the
thread that attaches it. What a callback raises is logged.
"""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from threading import get_ident
from time import perf_counter
from typing import Any, Generic, TypeVar, cast

from nc10d.deadline import NEVER, Deadline, Timeout
from nc10d.errors import CollectiveTimeout
from nc10d.ops import (
    OP_NAMES,
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Gather,
    Op,
    Recv,
    Reduce,
    ReduceScatter,
    Scatter,
)

T = TypeVar("T")
S = TypeVar("S")

_log = logging.getLogger(__name__)

_PENDING, _DONE, _FAILED = 0, 1, 2

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


class _Outcome:
    """The one transition, the callbacks and the gate that both Work and Future stand on."""

    __slots__ = ("__weakref__", "_callbacks", "_ended", "_exception", "_gate", "_result", "_state")

    def __init__(self) -> None:
        self._state = _PENDING
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
            if self._state != _PENDING:
                return
            gate = self._gate = self._gate or threading.Event()
        gate.wait(min(deadline.remaining(), threading.TIMEOUT_MAX))

    def _watch(self) -> None:
        """See to it that `_finish` is called without anyone waiting; the base always is."""

    def _finish(self, exception: BaseException | None = None, result: Any = None) -> bool:
        """Become done, or failed with `exception`; say whether this call was the first."""
        with _transition:
            first = self._state == _PENDING
            if first:
                self._exception, self._result = exception, result
                self._ended = perf_counter()
                self._state = _DONE if exception is None else _FAILED
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
            pending = self._state == _PENDING
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
        if self._state == _PENDING:
            with _Guest():
                self._poll()
        return self._state != _PENDING

    def _settle(self, timeout: Timeout, what: str) -> None:
        """Block until it is over, then raise what made it fail."""
        if self._state == _PENDING:
            deadline = NEVER if timeout is None else Deadline.after(timeout)
            with _Guest():
                self._block(deadline)
            if self._state == _PENDING:
                message = f"{what} did not end within wait({timeout}); it goes on"
                raise CollectiveTimeout(message, op=what)
        if self._exception is not None:
            raise fresh(self._exception)

    def _wait_async(self) -> Generator[Any, None, None]:
        """Suspend the running asyncio task until it is over."""
        if self._look():
            return
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


class _Guest:
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
    try:
        copy = kind.__new__(kind, *error.args)
    except TypeError:  # a type with a constructor of its own is raised as it is
        return error
    copy.args = error.args
    copy.__dict__.update(error.__dict__)
    copy.__cause__ = error
    return copy


_OUTPUT = {
    AllReduce: "x",
    Reduce: "x",
    Broadcast: "x",
    Recv: "x",
    AllGather: "out",
    ReduceScatter: "out",
    AllToAll: "out",
    Gather: "out",
    Scatter: "out",
}


def _outputs(ops: Iterable[Op]) -> list[Any]:
    """Return the arrays that `ops` write, lists flattened, in order."""
    found: list[Any] = []
    for op in ops:
        out = getattr(op, _OUTPUT.get(type(op), ""), None)
        found.extend(out if isinstance(out, (list, tuple)) else [] if out is None else [out])
    return found


class Work(_Outcome):
    """One launched operation, or one batch of them; keeps its arrays alive.

    `await work` suspends an asyncio task until the operation is over, and raises as `wait` does.
    """

    __slots__ = ("_started", "ops")

    def __init__(self, ops: Sequence[Op] = ()) -> None:
        # Written out instead of super().__init__(): one of these is made per async call.
        self._state = _PENDING
        self._exception = None
        self._result = None
        self._callbacks = None
        self._gate = None
        self._ended = 0.0
        self.ops = ops
        self._started = perf_counter()

    @classmethod
    def from_future(cls, future: Future[Any]) -> Work:
        """Make a Work that ends as `future` does, with its value as the result."""
        work = Work()
        future._attach(lambda done: work._finish(done._exception, done._result))
        return work

    def wait(self, timeout: Timeout = None) -> bool:
        """Block until the operation is over and return True; raise what made it fail.

        With `timeout` (seconds or timedelta), raise CollectiveTimeout in this caller alone if the
        operation is not over by then; it goes on, and can be waited for again. Without, the
        operation's own timeout is the limit.
        """
        self._settle(timeout, self._describe())
        return True

    def synchronize(self) -> None:
        """Make the results safe to use in this thread: on the CPU, the same as `wait()`."""
        self.wait()

    def block_current_stream(self) -> None:
        """Hold back what this thread does next until the results are there; `wait()` on the CPU."""
        self.wait()

    def is_completed(self) -> bool:
        """Say whether the operation is over, done or failed; never blocks."""
        return self._look()

    def is_success(self) -> bool:
        """Say whether the operation is over and did not fail; never blocks."""
        return self._look() and self._exception is None

    def exception(self) -> BaseException | None:
        """Return what made the operation fail, or None (also while it is pending)."""
        self._look()
        return self._exception

    def result(self) -> Any:
        """Wait, then return the sender's rank in the group (a receive) or the list of outputs."""
        self.wait()
        return self._value()

    @property
    def duration(self) -> float | None:
        """The seconds from launch to end as this rank saw them; None while pending."""
        return None if self._state == _PENDING else self._ended - self._started

    def get_future(self) -> Future[Any]:
        """Return a Future that ends with this Work, with `result()` as its value."""
        future: Future[Any] = Future()
        self._attach(lambda work: future._finish(work._exception, work._value()))
        return future

    def add_done_callback(self, callback: Callable[[Work], object]) -> None:
        """Call `callback(self)` when the operation is over; at once if it is already."""
        self._attach(callback)

    def __await__(self) -> Generator[Any, None, bool]:
        yield from self._wait_async()
        return self.wait()

    def _value(self) -> Any:
        return self._result if self._result is not None else _outputs(self.ops)

    def _describe(self) -> str:
        names = [OP_NAMES[type(op)] for op in self.ops]
        return names[0] if len(names) == 1 else f"a batch of {len(names)}" if names else "a work"

    def __repr__(self) -> str:
        state = ("pending", "done", "failed")[self._state]
        return f"<{type(self).__name__} {self._describe()}: {state}>"


class Future(_Outcome, Generic[T]):
    """A value that will be there later; whoever makes it calls `set_result` or `set_exception`."""

    __slots__ = ()

    def set_result(self, value: T) -> None:
        """End with `value`; RuntimeError if it has ended before."""
        if not self._finish(None, value):
            raise RuntimeError("this Future has a result or an exception already")

    def set_exception(self, error: BaseException) -> None:
        """End with `error`; RuntimeError if it has ended before."""
        if not isinstance(error, BaseException):
            raise TypeError(f"set_exception needs an exception, got {error!r}")
        if not self._finish(error):
            raise RuntimeError("this Future has a result or an exception already")

    def done(self) -> bool:
        """Say whether it has ended; never blocks."""
        return self._look()

    def wait(self, timeout: Timeout = None) -> T:
        """Block until it has ended; return the value or raise the exception.

        A Future of a Work ends on a notifier thread: don't wait for one in a callback, attach
        with `then`.
        """
        self._settle(timeout, "a Future")
        return cast(T, self._result)

    def value(self) -> T:
        """Return the value, or raise the exception; RuntimeError while it is pending."""
        if not self._look():
            raise RuntimeError("this Future has no value yet: wait() for it, or attach with then()")
        return self.wait()

    def add_done_callback(self, callback: Callable[[Future[T]], object]) -> None:
        """Call `callback(self)` when it has ended; at once if it has already."""
        self._attach(callback)

    def then(self, callback: Callable[[Future[T]], Any]) -> Future[Any]:
        """Return a Future of what `callback(self)` returns once this one has ended.

        The callback is called after a failure too: `value()` raises there. If it returns a Future
        or a Work, the result is that one's.
        """
        child: Future[Any] = Future()

        def run(parent: Future[T]) -> None:
            try:
                value = callback(parent)
            except Exception as error:  # noqa: BLE001  (the child Future carries it)
                child._finish(error)
            else:
                child._adopt(value)

        self._attach(run)
        return child

    def _adopt(self, value: Any) -> None:
        if isinstance(value, Work):
            value = value.get_future()
        if isinstance(value, Future):
            value._attach(lambda done: self._finish(done._exception, done._result))
        else:
            self._finish(None, value)

    def __await__(self) -> Generator[Any, None, T]:
        yield from self._wait_async()
        return self.wait()

    def __repr__(self) -> str:
        return f"<Future: {('pending', 'done', 'failed')[self._state]}>"


def collect_all(futures: Sequence[Future[S]]) -> Future[list[Future[S]]]:
    """Return a Future that ends when all of `futures` have, with the list of them as its value.

    It does not fail by itself: ask each one for its value.
    """
    together: Future[list[Future[S]]] = Future()
    missing = [len(futures)]

    def one_less(_: object) -> None:
        with _transition:
            missing[0] -= 1
            last = missing[0] == 0
        if last:
            together._finish(None, list(futures))

    for future in futures:
        future._attach(one_less)
    if not futures:
        together._finish(None, [])
    return together


def wait_all(futures: Sequence[Future[S]], timeout: Timeout = None) -> list[S]:
    """Block until all of `futures` have ended; return their values, or raise the first failure."""
    deadline = NEVER if timeout is None else Deadline.after(timeout)
    return [
        future.wait(None if deadline.at == math.inf else deadline.remaining()) for future in futures
    ]
