"""Futures that end in the thread that waits for them: no other has to wake up for it.

Contract: nothing happens without a wait, for this Future or for what `then` makes of it; who only
attaches a callback (collect_all, Work.from_future, await) waits for ever. On a device that is the
point: what follows is queued on the waiting thread's current stream, behind what it follows from,
and the host goes on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

from nc10d.deadline import Timeout
from nc10d.work import Future, Work

T = TypeVar("T")


class Lazy(Future[T]):
    """A Future that `_bring` ends: a subclass's, called by who waits."""

    __slots__ = ()

    def _bring(self, timeout: Timeout) -> None:
        raise NotImplementedError

    def wait(self, timeout: Timeout = None) -> T:
        """Do what is left to do, and return the value or raise the exception."""
        if not self.done():
            self._bring(timeout)
        return super().wait(timeout)

    def _child(self) -> Future[Any]:
        return _Behind(self)


class _Behind(Lazy[Any]):
    """What `then` makes of a Lazy: its callback ends it, or the Future which that returns."""

    __slots__ = ("_parent",)

    def __init__(self, parent: Future[Any]) -> None:
        super().__init__()
        self._parent = parent

    def _bring(self, timeout: Timeout) -> None:
        behind = None
        while behind is not self._parent:
            behind = self._parent
            with contextlib.suppress(Exception):  # the callback has seen it
                behind.wait(timeout)

    def _adopt(self, value: Any) -> None:
        if isinstance(value, Future):
            self._parent = value
        super()._adopt(value)


class InOrder(Lazy[Any]):
    """The value of `step(value)`, where `value()` is what a Work or a Future ends with."""

    __slots__ = ("_outcome", "_step")

    def __init__(
        self, outcome: Work | Future[Any], step: Callable[[Callable[[], Any]], Any]
    ) -> None:
        super().__init__()
        self._outcome, self._step = outcome, step

    def _bring(self, timeout: Timeout) -> None:
        try:
            self._finish(None, self._step(lambda: awaited(self._outcome, timeout)))
        except BaseException as error:
            self._finish(error)  # for those who wait again
            raise


def awaited(outcome: Work | Future[Any], timeout: Timeout = None) -> Any:
    """Wait for a Work or a Future as its kind does; return its value, or raise what failed."""
    return outcome.result() if isinstance(outcome, Work) else outcome.wait(timeout)
