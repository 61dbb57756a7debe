"""Operations in flight: steps that wait for MPI requests, and the Work that ends with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from nc10d.backend.mpi.library import MPI, Request, Steps
from nc10d.backend.polled.progress_thread import ProgressThread
from nc10d.base.deadline import Deadline
from nc10d.ops import Op, Recv, Send
from nc10d.work import Work


class MpiWork(Work):
    """One launch; `ended` holds the places in the batch of the operations that have ended."""

    __slots__ = ("_engine", "_results", "_tasks_left", "ended")

    def __init__(self, ops: Sequence[Op], engine: ProgressThread, tasks: int) -> None:
        super().__init__(ops)
        self._engine = engine
        self._tasks_left = tasks
        self._results: list[int | None] = [None] * len(ops)
        self.ended: set[int] = set()

    def task_ended(self, places: Sequence[int], result: int | None) -> bool:
        """Record that a task of the operations at `places` has ended; return if it was the last."""
        self._results[places[0]] = result
        self.ended.update(places)
        self._tasks_left -= 1
        return self._tasks_left == 0

    def outcome(self) -> Any:
        """Return the value of `result()`: the sender, a list of senders, or None."""
        if len(self.ops) == 1:
            return self._results[0]
        return self._results if any(isinstance(op, Recv) for op in self.ops) else None

    def _poll(self) -> None:
        self._engine.advance()

    def _block(self, deadline: Deadline) -> None:
        self._engine.wait(self, deadline)

    def _watch(self) -> None:
        self._engine.watch(self)


class Task:
    """The collectives of a launch; `seq` is their number in the group (0: a message)."""

    __slots__ = ("deadline", "places", "requests", "result", "seq", "steps", "work")

    def __init__(
        self, work: MpiWork, places: Sequence[int], deadline: Deadline, seq: int = 0
    ) -> None:
        self.work = work
        self.places = places
        self.deadline = deadline
        self.seq = seq
        self.result: int | None = None
        self.steps: Steps
        self.requests: Sequence[Request] = ()

    def begin(self, steps: Steps) -> None:
        """Run the first step."""
        self.steps = steps
        self.requests = steps.send(None) or ()

    def advance(self) -> bool:
        """Run steps as far as the requests allow, without blocking; return whether all ended."""
        while self.ready():
            try:
                requests = next(self.steps)
            except StopIteration as end:
                self.result = end.value
                return True
            self.requests = requests or ()
            if requests is None:
                return False
        return False

    def ready(self) -> bool:
        """Return whether the requests of the current step have ended."""
        return not self.requests or bool(MPI.Request.Testall(self.requests))


class MessageTask(Task):
    """One send or receive; `status` is MPI's status of a receive."""

    __slots__ = ("op", "status")

    def __init__(self, work: MpiWork, place: int, deadline: Deadline) -> None:
        super().__init__(work, [place], deadline)
        op = work.ops[place]
        assert isinstance(op, (Send, Recv)), "other operations are called by all ranks"
        self.op = op
        self.status = MPI.Status()

    def ready(self) -> bool:
        """Return whether the requests of the current step have ended."""
        if isinstance(self.op, Send):
            return super().ready()
        return not self.requests or bool(self.requests[0].Test(self.status))

    def must_follow(self, other: MessageTask) -> bool:
        """Return whether this message, launched later than `other`, must begin after it."""
        if other.requests or type(other.op) is not type(self.op):
            return False
        own_peer, other_peer = self.op.peer, other.op.peer
        return own_peer == other_peer or own_peer is None or other_peer is None

    def cancel(self) -> None:
        """Cancel a receive that has no message yet; the caller may reuse its array."""
        if isinstance(self.op, Recv):
            for request in filter(None, self.requests):  # a failed request is null
                request.Cancel()


def after(condition: Callable[[], bool], steps: Steps) -> Steps:
    """Return steps that begin when `condition()` is true."""
    while not condition():
        yield None
    return (yield from steps)


def side_by_side(parts: Sequence[Steps]) -> Steps:
    """Run operations concurrently: each step waits for the requests of all of them."""
    running = list(parts)
    while running:
        started: list[tuple[Steps, Any]] = [(part, next(part, None)) for part in running]
        running = [part for part, requests in started if requests]
        yield [request for _, requests in started for request in requests or ()]
