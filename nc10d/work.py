"""The end of a launched operation: Work for operations, Future for values.

A backend subclasses Work and fills in `_poll`, `_block` and `_watch`. nc10d.base.promise documents
their contracts and the threads on which callbacks run. A Work is cheap to make: there is no lock,
and no event before a thread needs one.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, ClassVar, Generic, TypeVar, cast

from nc10d.arrays.access import outputs
from nc10d.base.deadline import NEVER, Deadline, Timeout, monotonic, seconds
from nc10d.base.promise import DONE, PENDING, Promise, copy_to_raise, note_told
from nc10d.base.signal_errors import Event
from nc10d.base.text import in_seconds
from nc10d.errors import CollectiveTimeout
from nc10d.ops import Op
from nc10d.ops.facts import name_of

T = TypeVar("T")
S = TypeVar("S")


class Work(Promise):
    """A launched operation, or a launched batch of operations; keeps its arrays alive.

    `await work` suspends an asyncio task until the operation is over, and raises as `wait` does.
    """

    __slots__ = ("_started", "ops")

    on_stream: ClassVar[bool] = False
    """Whether `wait()` makes the current stream wait for the operation, and not the host."""

    def __init__(self, ops: Sequence[Op] = ()) -> None:
        # Written out instead of super().__init__(): every async call makes a Work.
        self._state = PENDING
        self._exception = None
        self._result = None
        self._callbacks = None
        self._finished = None
        self._ended = 0.0
        self.ops = ops
        self._started = monotonic()

    @classmethod
    def from_future(cls, future: Future[Any]) -> Work:
        """Make a Work that ends as `future` does, with its value as the result.

        RuntimeError for a Future of a comm hook that ends only while a thread waits for it.
        """
        future._require_unattended("Work.from_future")
        work = Work()
        future._attach(lambda done: work._finish(done._exception, done._result))
        return work

    def wait(self, timeout: Timeout = None) -> bool:
        """Block until the operation is over and return True; raise the error of a failed operation.

        With `timeout` (seconds or timedelta), raise CollectiveTimeout in this caller alone if the
        operation is not over by then; the operation goes on, and can be waited for again. Without
        `timeout`, the operation's own timeout is the limit.
        """
        if self._state != DONE:
            self._settle(timeout)
        elif timeout is not None:
            seconds(timeout)  # a wrong timeout is an error whoever comes first
        return True

    def synchronize(self) -> None:
        """Make the results safe to use in this thread: on the CPU, the same as `wait()`."""
        self.wait()

    def block_current_stream(self) -> None:
        """Order the current CUDA stream's later work after the results; on the CPU, `wait()`."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether the operation is over, done or failed; never blocks."""
        return self._look()

    def is_success(self) -> bool:
        """Return whether the operation is over and did not fail; never blocks."""
        return self._look() and self.exception() is None

    def exception(self) -> BaseException | None:
        """Return the error of a failed operation, else None (also while pending); never blocks."""
        self._look()
        note_told(self._exception)
        return self._exception

    def result(self) -> Any:
        """Wait, then return the sender's rank in the group (a receive) or the outputs as a list."""
        self.wait()
        return self._value()

    @property
    def duration(self) -> float | None:
        """The seconds from launch to end, as this rank saw them; None while pending."""
        return None if self._state == PENDING else self._ended - self._started

    def get_future(self) -> Future[Any]:
        """Return a Future that ends with this Work, with `result()` as its value."""
        future = _WorkFuture(self)
        self._attach(future._end_as)
        return future

    def add_done_callback(self, callback: Callable[[Work], object]) -> None:
        """Call `callback(self)` when the operation is over; at once if that is already so."""
        self._attach(callback)

    def __await__(self) -> Generator[Any, None, bool]:
        yield from self._wait_async()
        return self.wait()

    def _value(self) -> object:
        return self._result if self._result is not None else outputs(self.ops)

    def _describe(self) -> str:
        names = [name_of(op) for op in self.ops]
        return names[0] if len(names) == 1 else f"a batch of {len(names)}" if names else "a work"

    def __repr__(self) -> str:
        state = ("pending", "done", "failed")[self._state]
        return f"<{type(self).__name__} {self._describe()}: {state}>"


class Future(Promise, Generic[T]):
    """A value that will be there later; the maker calls `set_result` or `set_exception`."""

    __slots__ = ()

    def set_result(self, value: T) -> None:
        """End with `value`; RuntimeError if the Future has ended before."""
        if not self._finish(None, value):
            raise RuntimeError("this Future has a result or an exception already")

    def set_exception(self, error: BaseException) -> None:
        """End with `error`; RuntimeError if the Future has ended before."""
        if not isinstance(error, BaseException):
            raise TypeError(f"set_exception needs an exception, got {error!r}")
        if not self._finish(error):
            raise RuntimeError("this Future has a result or an exception already")

    def done(self) -> bool:
        """Return whether the Future has ended; never blocks."""
        return self._look()

    def wait(self, timeout: Timeout = None) -> T:
        """Block until the Future has ended; return the value or raise the exception.

        A Work's Future ends on a notifier thread. Don't wait for such a Future in a callback:
        attach with `then`.
        """
        self._settle(timeout)
        return cast(T, self._result)

    def value(self) -> T:
        """Return the value or raise the exception; never blocks, RuntimeError while pending."""
        if not self._look():
            raise RuntimeError("this Future has no value yet: wait() for it, or attach with then()")
        return self.wait()

    def add_done_callback(self, callback: Callable[[Future[T]], object]) -> None:
        """Call `callback(self)` when the Future has ended; at once if that has happened already."""
        self._attach(callback)

    def then(self, callback: Callable[[Future[T]], Any]) -> Future[Any]:
        """Return a Future for the result of `callback(self)`, called once this Future has ended.

        The callback is called after a failure too: `value()` raises there. If the callback returns
        a Future or a Work, the returned Future ends as that does.
        """
        child = self._child()

        def run(parent: Future[T]) -> None:
            try:
                child._adopt(callback(parent))
            except Exception as error:  # noqa: BLE001  (the child Future carries it)
                child._finish(error)

        self._attach(run)
        return child

    def _child(self) -> Future[Any]:
        """Return the Future that `then` returns."""
        return Future()

    def _together(self, futures: Sequence[Future[Any]]) -> Future[Any] | None:
        """Return the Future for `collect_all` to return, if this Future needs a special kind."""
        return None

    def _adopt(self, value: object) -> None:
        if isinstance(value, Work):
            value = value.get_future()
        if isinstance(value, Future):
            value._require_unattended("what another Future's callback returns")
            value._attach(lambda done: self._finish(done._exception, done._result))
        else:
            self._finish(None, value)

    def __await__(self) -> Generator[Any, None, T]:
        yield from self._wait_async()
        return self.wait()

    def __repr__(self) -> str:
        return f"<Future: {('pending', 'done', 'failed')[self._state]}>"


class _WorkFuture(Future[Any]):
    """The Future of a Work: ended for every thread once the Work has ended."""

    __slots__ = ("_work",)

    def __init__(self, work: Work) -> None:
        super().__init__()
        self._work: Work | None = work

    def _poll(self) -> None:
        work = self._work
        if work is not None and work._look():  # perhaps before the thread that runs callbacks
            self._end_as(work)

    def _block(self, deadline: Deadline) -> None:
        self._poll()
        super()._block(deadline)

    def _end_as(self, work: Work) -> None:
        self._finish(work._exception, work._value())
        self._work = None  # whose inputs may go


def collect_all(futures: Sequence[Future[S]]) -> Future[list[Future[S]]]:
    """Return a Future that ends when all of `futures` have; its value is the list of them.

    The returned Future never fails: ask each Future in the list for its value.
    """
    special = [kind for future in futures if (kind := future._together(futures)) is not None]
    together: Future[list[Future[S]]] = special[0] if special else Future()
    missing = len(futures)
    counting = threading.Lock()

    def count_down(_: object) -> None:
        nonlocal missing
        with counting:
            missing -= 1
            last = missing == 0
        if last:
            together._finish(None, list(futures))

    for future in futures:
        future._attach(count_down)
    if not futures:
        together._finish(None, [])
    return together


def wait_all(futures: Sequence[Future[S]], timeout: Timeout = None) -> list[S]:
    """Block until all of `futures` have ended; return their values, or raise the first failure."""
    deadline = NEVER if timeout is None else Deadline.after(timeout)
    return [
        future.wait(None if deadline.at == math.inf else deadline.remaining()) for future in futures
    ]


def wait_any(works: Iterable[Promise | None], timeout: Timeout = None) -> int | None:
    """Block until any of `works` has ended; return the lowest index if several have.

    A None in the list is skipped, so a loop sets `works[index] = None` and goes on; the result is
    None when only Nones are left. Raises the Work's error if the operation failed. With `timeout`
    (seconds or timedelta), CollectiveTimeout in this caller alone if none has ended by then. An
    operation on a device is awaited on the host until its end. Futures may stand in the list, too.
    """
    works = _checked(works, "wait_any")
    ended = _some_ended(works, timeout, "wait_any")
    if not ended:
        return None
    _raise_failure(works[ended[0]])
    return ended[0]


def wait_some(works: Iterable[Promise | None], timeout: Timeout = None) -> list[int]:
    """Block until any of `works` has ended; return the indices of all that have ended by then.

    As wait_any; the list is empty when only Nones are left. Raises the error of the first failed
    Work, if any failed.
    """
    works = _checked(works, "wait_some")
    ended = _some_ended(works, timeout, "wait_some")
    for index in ended:
        _raise_failure(works[index])
    return ended


POLLING = 0.001
"""Seconds for which wait_any looks at the Works again and again, yielding the core; then it sleeps
until a notifier wakes it."""


def _checked(works: Iterable[Promise | None], call: str) -> list[Promise | None]:
    """Return the works as a list; TypeError for an element that is none."""
    found = [*works]
    for index, work in enumerate(found):
        if work is not None and not isinstance(work, Promise):
            kind = type(work).__name__
            raise TypeError(f"{call}: expected Works, Futures and Nones, got {kind} at {index}")
    return found


def _some_ended(works: Sequence[Promise | None], timeout: Timeout, call: str) -> list[int]:
    """Return the indices of the works that have ended; block until there is any."""
    deadline = NEVER if timeout is None else Deadline.after(timeout)
    ended = _ended(works)
    pending = [work for work in works if work is not None]
    if ended or not pending:
        return ended
    for work in pending:
        work._require_unattended(f"{call} of what")
    until = Deadline.after(POLLING)
    while not (ended or until.expired() or deadline.expired()):
        os.sched_yield()
        ended = _ended(works)
    if not ended:
        _wait_for_one(pending, deadline)
        ended = _ended(works)
    if not ended:
        what = f"{call} of {len(pending)}"
        message = f"{what}: none has ended within {in_seconds(deadline.limit)}; they go on"
        raise CollectiveTimeout(message, op=call)
    return ended


def _ended(works: Sequence[Promise | None]) -> list[int]:
    return [index for index, work in enumerate(works) if work is not None and work._look()]


def _wait_for_one(pending: Sequence[Promise], deadline: Deadline) -> None:
    """Sleep until any of `pending` has ended, or until `deadline`."""
    woken = Event()

    def wake(_: object) -> None:
        woken.set()

    try:
        for work in pending:
            work._attach(wake)
        woken.wait(min(deadline.remaining(), threading.TIMEOUT_MAX))
    finally:  # a loop of waits must not pile up callbacks on a Work that ends last
        for work in pending:
            work._detach(wake)


def _raise_failure(work: Promise | None) -> None:
    if work is not None and work._exception is not None:
        raise copy_to_raise(work._exception)
