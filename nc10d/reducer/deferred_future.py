"""Futures that end in the thread that waits for them: no other has to wake up for it.

Contract: nothing happens without a wait, for this Future or for what `then` or `collect_all` makes
of it. What would end without one is refused with a RuntimeError (Work.from_future, await, and what
another Future's callback returns), unless the end of the pass ends it. On a device that is the
point: what follows is queued on the waiting thread's current stream, behind what it follows from,
and the host goes on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from nc10d.base.deadline import Deadline, Timeout
from nc10d.errors import CollectiveTimeout
from nc10d.work import Future, Work

T = TypeVar("T")


class DeferredFuture(Future[T]):
    """A Future that `_bring` ends: a subclass's, called by who waits."""

    __slots__ = ()

    def _bring(self, deadline: Deadline | None) -> None:
        raise NotImplementedError

    def wait(self, timeout: Timeout = None) -> T:
        """Do what is left to do, and return the value or raise the exception."""
        deadline = None if timeout is None else Deadline.after(timeout)
        if not self.done():
            self._bring(deadline)
        return super().wait(_left(deadline))

    def _child(self) -> Future[Any]:
        return _Behind(self)

    def _together(self, futures: Sequence[Future[Any]]) -> Future[Any]:
        return _All(futures)


class _Behind(DeferredFuture[Any]):
    """What `then` makes of a Lazy: its callback ends it, or the Future which that returns."""

    __slots__ = ("_parent",)

    def __init__(self, parent: Future[Any]) -> None:
        super().__init__()
        self._parent = parent

    def _bring(self, deadline: Deadline | None) -> None:
        behind = None
        while behind is not self._parent:
            behind = self._parent
            with contextlib.suppress(Exception):  # the callback has seen it
                behind.wait(_left(deadline))

    def _require_unattended(self, what: str) -> None:
        self._parent._require_unattended(what)

    def _adopt(self, value: Any) -> None:
        if isinstance(value, Future):
            self._parent = value
        if isinstance(value, DeferredFuture):
            value._attach(lambda done: self._finish(done._exception, done._result))
        else:
            super()._adopt(value)


class _All(DeferredFuture[Any]):
    """What `collect_all` makes of several, a Lazy among them."""

    __slots__ = ("_parts",)

    def __init__(self, parts: Sequence[Future[Any]]) -> None:
        super().__init__()
        self._parts = parts

    def _bring(self, deadline: Deadline | None) -> None:
        for part in self._parts:
            with contextlib.suppress(Exception):  # who collects asks each one
                part.wait(_left(deadline))

    def _require_unattended(self, what: str) -> None:
        for part in self._parts:
            part._require_unattended(what)


class OrderedFuture(DeferredFuture[Any]):
    """The value of `step(value)`, where `value()` is what a Work or a Future ends with."""

    __slots__ = ("_outcome", "_step")

    def __init__(
        self, outcome: Work | Future[Any], step: Callable[[Callable[[], Any]], Any]
    ) -> None:
        super().__init__()
        self._outcome, self._step = outcome, step

    def _require_unattended(self, what: str) -> None:
        if not self.done():
            raise RuntimeError(
                f"{what}: this Future of a comm hook is ended by who waits for it, and nobody "
                "would: return it from the hook, wait() for it, or go on with its then()"
            )

    def _bring(self, deadline: Deadline | None) -> None:
        # A wait that is too short, or interrupted, is its caller's alone: no step is taken.
        try:
            self._outcome.wait(_left(deadline))
        except CollectiveTimeout:
            if not self._outcome._look():
                raise
        except Exception:  # noqa: BLE001  (the step sees it)
            pass
        try:
            self._finish(None, self._step(lambda: awaited(self._outcome)))
        except BaseException as error:
            self._finish(error)  # for those who wait again
            raise


def awaited(outcome: Work | Future[Any]) -> Any:
    """Wait for a Work or a Future as its kind does; return its value, or raise what failed."""
    return outcome.result() if isinstance(outcome, Work) else outcome.wait()


def _left(deadline: Deadline | None) -> float | None:
    return None if deadline is None else deadline.remaining()
