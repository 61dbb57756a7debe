"""Futures that the waiting thread completes, as std::launch::deferred does in C++.

Contract: such a Future makes progress only inside a wait, for itself or for a Future that `then` or
`collect_all` derives from it. Uses that would block forever raise a RuntimeError: Work.from_future,
await, and returning it from another Future's callback. (A pass's end completes a Future of sparse
rows, so these are allowed there.) On a device the order is the point: the waiting thread queues the
next step on its current stream, behind the outcome, and does not block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from nc10d.base.deadline import Deadline, Timeout
from nc10d.base.signal_errors import raised_here, suppress_here
from nc10d.errors import CollectiveTimeout
from nc10d.work import Future, Work

T = TypeVar("T")


class DeferredFuture(Future[T]):
    """A Future that a subclass completes in `_complete`, which the waiting thread calls."""

    __slots__ = ()

    def _complete(self, deadline: Deadline | None) -> None:
        raise NotImplementedError

    def wait(self, timeout: Timeout = None) -> T:
        """Do the remaining work, and return the value or raise the exception."""
        deadline = None if timeout is None else Deadline.after(timeout)
        if not self.done():
            self._complete(deadline)
        return super().wait(_remaining(deadline))

    def _child(self) -> Future[Any]:
        return _ChainedFuture(self)

    def _together(self, futures: Sequence[Future[Any]]) -> Future[Any]:
        return _CollectedFuture(futures)


class _ChainedFuture(DeferredFuture[Any]):
    """The Future that `then` returns; the callback ends it, or the Future that that returns."""

    __slots__ = ("_parent",)

    def __init__(self, parent: Future[Any]) -> None:
        super().__init__()
        self._parent = parent

    def _complete(self, deadline: Deadline | None) -> None:
        # A callback that returns a Future replaces the parent (see _adopt): wait for that, too.
        awaited_parent = None
        while awaited_parent is not self._parent:
            awaited_parent = self._parent
            _wait_out(awaited_parent, deadline)  # the callback has received its error

    def _require_unattended(self, what: str) -> None:
        self._parent._require_unattended(what)

    def _adopt(self, value: object) -> None:
        if isinstance(value, Future):
            self._parent = value
        if isinstance(value, DeferredFuture):
            value._attach(lambda done: self._finish(done._exception, done._result))
        else:
            super()._adopt(value)


class _CollectedFuture(DeferredFuture[Any]):
    """The Future that `collect_all` returns if any given Future is a DeferredFuture."""

    __slots__ = ("_parts",)

    def __init__(self, parts: Sequence[Future[Any]]) -> None:
        super().__init__()
        self._parts = parts

    def _complete(self, deadline: Deadline | None) -> None:
        for part in self._parts:
            _wait_out(part, deadline)  # the caller checks each part

    def _require_unattended(self, what: str) -> None:
        for part in self._parts:
            part._require_unattended(what)


class OrderedFuture(DeferredFuture[Any]):
    """The result of `step(value)`; `value()` waits for a Work or Future and returns its value."""

    __slots__ = ("_outcome", "_step")

    def __init__(
        self, outcome: Work | Future[Any], step: Callable[[Callable[[], Any]], Any]
    ) -> None:
        super().__init__()
        self._outcome, self._step = outcome, step

    def _require_unattended(self, what: str) -> None:
        if not self.done():
            raise RuntimeError(
                f"{what}: this Future of a comm hook ends only inside a wait for it, and "
                "nobody would wait: return it from the hook, wait() for it, or chain its then()"
            )

    def _complete(self, deadline: Deadline | None) -> None:
        # A wait that times out or is interrupted affects the caller only: the step does not run.
        try:
            self._outcome.wait(_remaining(deadline))
        except raised_here(Exception) as error:  # the step receives it
            if isinstance(error, CollectiveTimeout) and not self._outcome._look():
                raise
        try:
            self._finish(None, self._step(lambda: awaited(self._outcome)))
        except BaseException as error:
            self._finish(error)  # later waits raise the error again
            raise


def awaited(outcome: Work | Future[Any]) -> Any:
    """Wait for a Work or a Future; return its value, or raise its error."""
    return outcome.result() if isinstance(outcome, Work) else outcome.wait()


def _wait_out(future: Future[Any], deadline: Deadline | None) -> None:
    """Wait until a Future has ended, or the deadline; its own error is not raised."""
    with suppress_here(Exception):
        future.wait(_remaining(deadline))


def _remaining(deadline: Deadline | None) -> float | None:
    return None if deadline is None else deadline.remaining()
