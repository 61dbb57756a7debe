"""Launches in flight: collectives as steps of UCC, and messages, which the CPU backend carries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nc10d.backend.polled.progress_thread import ProgressThread
from nc10d.backend.ucc.ucc_collectives import Steps, Waitable
from nc10d.base.deadline import Deadline
from nc10d.ops import Op, Recv, Send
from nc10d.work import Work


class UccWork(Work):
    """One launch; `ended` holds the places in the batch of the operations that have ended.

    `agreement` is the Work in which all ranks agree on the call, once it has begun.
    """

    __slots__ = ("_engine", "_parts_left", "_results", "agreement", "ended")

    def __init__(self, ops: Sequence[Op], engine: ProgressThread, parts: int) -> None:
        super().__init__(ops)
        self._engine = engine
        self._parts_left = parts
        self._results: list[int | None] = [None] * len(ops)
        self.ended: set[int] = set()
        self.agreement: Work | None = None

    def part_ended(self, places: Sequence[int], result: int | None = None) -> bool:
        """Record that the operations at `places` have ended; return whether they were the last."""
        self._results[places[0]] = result
        self.ended.update(places)
        self._parts_left -= 1
        return self._parts_left == 0

    def outcome(self) -> Any:
        """Return the value of `result()`: the sender, a list of senders, or None."""
        if len(self.ops) == 1:
            return self._results[0]
        return self._results if any(isinstance(op, Recv) for op in self.ops) else None

    def _poll(self) -> None:
        self._engine.advance()

    def _block(self, deadline: Deadline) -> None:
        if self.agreement is not None:  # the CPU backend sleeps until all ranks have come
            self.agreement._block(deadline)
        self._engine.wait(self, deadline)

    def _watch(self) -> None:
        self._engine.watch(self)


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
        self._waiting_for: Sequence[Waitable] = ()

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
        self.work, self.place, self.earlier, self.deadline, self.op = (
            *(work, place, earlier, deadline),
            op,
        )
        self.inner: InnerWork | None = None

    def must_follow(self, other: HeldMessage) -> bool:
        """Return whether this message, launched later than `other`, must begin after it."""
        if other.inner is not None or type(other.op) is not type(self.op):
            return False
        own_peer, other_peer = self.op.peer, other.op.peer
        return own_peer == other_peer or own_peer is None or other_peer is None


def nothing() -> Steps:
    """Return no steps."""
    yield from ()


def side_by_side(parts: Sequence[Steps]) -> Steps:
    """Run operations concurrently: each step waits for the requests of all of them."""
    running = list(parts)
    while running:
        started: list[tuple[Steps, Any]] = [(part, next(part, None)) for part in running]
        running = [part for part, requests in started if requests]
        yield [request for _, requests in started for request in requests or ()]
