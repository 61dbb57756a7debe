"""Operations in flight: steps that wait for MPI requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nc10d.backend.mpi.library import MPI, Request
from nc10d.backend.polled.launches import PolledWork, Steps, must_follow
from nc10d.base.deadline import Deadline
from nc10d.ops import Recv, Send


class Task:
    """The collectives of a launch; `seq` is their number in the group (0: a message)."""

    __slots__ = ("deadline", "places", "requests", "result", "seq", "steps", "work")

    def __init__(
        self, work: PolledWork, places: Sequence[int], deadline: Deadline, seq: int = 0
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

    def __init__(self, work: PolledWork, place: int, deadline: Deadline) -> None:
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
        return not other.requests and must_follow(self.op, other.op)

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
