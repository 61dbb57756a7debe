"""Launches in flight: collectives as steps of UCC, and messages, which the CPU backend carries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nc10d.backend.polled.launches import PolledWork, Steps, must_follow
from nc10d.backend.polled.progress_thread import ProgressThread
from nc10d.base.deadline import Deadline
from nc10d.ops import Op, Recv, Send
from nc10d.work import Work


class UccWork(PolledWork):
    """One launch; `agreement`, once it has begun, is the Work in which ranks agree on the call."""

    __slots__ = ("agreement",)

    def __init__(self, ops: Sequence[Op], engine: ProgressThread, parts: int) -> None:
        super().__init__(ops, engine, parts)
        self.agreement: Work | None = None

    def _block(self, deadline: Deadline) -> None:
        if self.agreement is not None:  # the CPU backend sleeps until all ranks have come
            self.agreement._block(deadline)
        super()._block(deadline)


class InnerWork:
    """A Work of the CPU backend as a step that a launch waits for."""

    __slots__ = ("work",)

    def __init__(self, work: Work | None) -> None:
        assert work is not None, "an asynchronous launch returns a Work"
        self.work = work

    def ready(self) -> bool:
        """Return whether the Work has ended; raises its error."""
        if not self.work.is_completed():
            return False
        error = self.work.exception()
        if error is not None:
            raise error
        return True


class CollectivesTask:
    """The collectives of a launch; `checked` once all ranks have agreed on the call."""

    __slots__ = ("_waiting_for", "checked", "deadline", "places", "seq", "steps", "work")

    def __init__(self, work: UccWork, places: Sequence[int], deadline: Deadline, seq: int) -> None:
        self.work, self.places, self.deadline, self.seq = work, places, deadline, seq
        self.checked = False
        self.steps: Steps = nothing()
        self._waiting_for: Sequence[Any] = ()

    def advance(self) -> bool:
        """Run steps as far as possible, without blocking; return whether all have ended."""
        while all(waitable.ready() for waitable in self._waiting_for):
            try:
                waiting_for = next(self.steps)
            except StopIteration:
                return True
            self._waiting_for = waiting_for or ()
            if waiting_for is None:
                return False
        return False


class HeldMessage:
    """A send or receive of a launch with collectives; `inner` once it has begun."""

    __slots__ = ("deadline", "earlier", "inner", "op", "place", "work")

    def __init__(
        self, work: UccWork, place: int, earlier: frozenset[int], deadline: Deadline
    ) -> None:
        op = work.ops[place]
        assert isinstance(op, (Send, Recv)), "collectives are called by all ranks"
        self.work, self.place, self.op = work, place, op
        self.earlier, self.deadline = earlier, deadline
        self.inner: InnerWork | None = None

    def must_follow(self, other: HeldMessage) -> bool:
        """Return whether this message, launched later than `other`, must begin after it."""
        return other.inner is None and must_follow(self.op, other.op)


def nothing() -> Steps:
    """Return no steps."""
    yield from ()
