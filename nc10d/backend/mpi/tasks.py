"""What is on its way: steps that wait for MPI requests, and the Work that ends with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from nc10d.backend.mpi.library import MPI, Request, Steps
from nc10d.base.deadline import Deadline
from nc10d.ops import Op, Recv, Send
from nc10d.work import Work

if TYPE_CHECKING:
    from nc10d.backend.mpi.progress_thread import ProgressThread


class MpiWork(Work):
    """One launch: it ends with the last of its tasks, or with the group's failure.

    `over` are the places in the batch of operations that are.
    """

    __slots__ = ("_engine", "_left", "_results", "over")

    def __init__(self, ops: Sequence[Op], engine: ProgressThread, tasks: int) -> None:
        super().__init__(ops)
        self._engine = engine
        self._left = tasks
        self._results: list[int | None] = [None] * len(ops)
        self.over: set[int] = set()

    def one_over(self, places: Sequence[int], result: int | None) -> bool:
        """Take note that a task of the operations at `places` is over; True if it was the last."""
        self._results[places[0]] = result
        self.over.update(places)
        self._left -= 1
        return self._left == 0

    def outcome(self) -> Any:
        """Return what `result()` answers with: the sender, a list of them, or None."""
        if len(self.ops) == 1:
            return self._results[0]
        return self._results if any(isinstance(op, Recv) for op in self.ops) else None

    def describe(self) -> str:
        """Return what errors call it."""
        return self._describe()

    def _poll(self) -> None:
        self._engine.advance()

    def _block(self, deadline: Deadline) -> None:
        self._engine.wait(self, deadline)

    def _watch(self) -> None:
        self._engine.watch(self)


class Task:
    """The collectives of a launch: their steps, the requests waited for now, and a deadline.

    `seq` is their number in the group (0 for a message, which has none).
    """

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
        """Take the first step."""
        self.steps = steps
        self.requests = steps.send(None) or ()

    def advance(self) -> bool:
        """Go as far as the requests allow, without blocking; True when it is over."""
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
        """Say whether what it waits for is there."""
        return not self.requests or bool(MPI.Request.Testall(self.requests))


class MessageTask(Task):
    """One send or receive; `status` is what MPI says of a receive."""

    __slots__ = ("op", "status")

    def __init__(self, work: MpiWork, place: int, deadline: Deadline) -> None:
        super().__init__(work, [place], deadline)
        op = work.ops[place]
        assert isinstance(op, (Send, Recv)), "other operations are called by all ranks"
        self.op = op
        self.status = MPI.Status()

    def ready(self) -> bool:
        """Say whether what it waits for is there."""
        if isinstance(self.op, Send):
            return super().ready()
        return not self.requests or bool(self.requests[0].Test(self.status))

    def must_follow(self, other: MessageTask) -> bool:
        """Say whether this message, launched later, would break the order by beginning first."""
        if other.requests or type(other.op) is not type(self.op):
            return False
        mine, theirs = self.op.peer, other.op.peer
        return mine == theirs or mine is None or theirs is None

    def cancel(self) -> None:
        """Take a receive back that nobody has answered: the array is the user's again."""
        if isinstance(self.op, Recv):
            for request in filter(None, self.requests):  # one that has failed is null
                request.Cancel()


def after(gate: Callable[[], bool], steps: Steps) -> Steps:
    """Begin when `gate()` says so."""
    while not gate():
        yield None
    return (yield from steps)


def side_by_side(parts: Sequence[Steps]) -> Steps:
    """Run operations together: what each starts in a step is waited for at once."""
    left = list(parts)
    while left:
        begun: list[tuple[Steps, Any]] = [(part, next(part, None)) for part in left]
        left = [part for part, requests in begun if requests]
        yield [request for _, requests in begun for request in requests or ()]
