"""The CPU backend's Work: a submission that must end, and the last steps after that."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from nc10d.backend.cpu.engine.channel import Channel, Submission
from nc10d.backend.cpu.native import entry_points
from nc10d.backend.cpu.native import offsets as at
from nc10d.backend.prepared_protocol import Arguments
from nc10d.base.deadline import Deadline, Timeout, seconds
from nc10d.base.promise import DONE, PENDING
from nc10d.errors import DistError
from nc10d.ops import Op, Recv, Send
from nc10d.ops.facts import facts_of
from nc10d.work import Work


class GroupState(Protocol):
    """Whether a group works; see `health.py`."""

    def failure(self) -> DistError | None:
        """Return why the group has failed, or None."""

    def check(self) -> None:
        """Raise the group's failure, if any."""

    def engine_failed(self, channel: Channel, answer: int) -> None:
        """Turn a negative answer from the engine into the group's failure."""


class WorkWaiter(Protocol):
    """A Work's view of its group."""

    @property
    def health(self) -> GroupState:
        """Whether the group works."""

    ending: threading.RLock
    """Held while the last steps of a Work are done."""

    def wait_submission(self, work: CpuWork, until: Deadline) -> DistError | None:
        """Block until a Work's submission ends, or `until`; return the group's failure, if any."""

    def need_worker(self) -> None:
        """Start the worker unless it runs: no thread may wait for this Work."""

    def clear_way(self, channel: Channel) -> None:
        """Receive an unexpected message that blocks a channel."""

    def watch(self, work: Work) -> None:
        """Let the notifier finish a Work that nobody waits for."""

    def poke(self) -> None:
        """Make the notifier look at all watched Works."""


class CallOfWork(Protocol):
    """A prepared call as a Work sees it."""

    def ops(self, x: Arguments, y: Arguments) -> Sequence[Op]:
        """Return the call as operations."""


class _OfCall:
    """The operations in a Work that keeps a prepared call and the arguments."""

    __slots__ = ()

    _call: tuple[CallOfWork, Arguments, Arguments]

    @property
    def ops(self) -> Sequence[Op]:
        """The operations, made when they are asked for."""
        call, x, y = self._call
        return call.ops(x, y)

    @ops.setter
    def ops(self, ops: Sequence[Op]) -> None:
        """Replace the arrays, which are views, by the caller's own."""
        _, x, y = facts_of(ops[0]).split(ops[0])
        self._call = self._call[0], x, y  # type: ignore[misc]


class CompletedCall(_OfCall, Work):
    """A prepared call that ended as it was launched; the state never changes."""

    __slots__ = ("_call",)

    # Class attributes: an asynchronous call that ends at once is as cheap as a blocking one.
    _state = DONE
    _exception = _callbacks = _finished = None
    _started = _ended = 0.0

    def wait(self, timeout: Timeout = None) -> bool:
        """Return True; a wrong timeout is an error, as in a wait that blocks."""
        if timeout is not None:
            seconds(timeout)
        return True


def completed_call(call: CallOfWork, x: object, y: object, sender: int | None) -> CompletedCall:
    """Return the Work for a prepared call that has ended."""
    # Without __init__, which costs as much again.
    work: CompletedCall = _new_work(CompletedCall)
    work._call = call, x, y
    work._result = sender
    return work


_new_work = object.__new__


class CpuWork(Work):
    """Operations in flight as a channel's submission; the group's failure ends them, too."""

    # A Work keeps submission and group until it is dropped, even after its end: other threads may
    # still read them, without a lock.

    __slots__ = ("_after", "_deadline", "_sender", "_waiter", "channel", "submission")

    def __init__(
        self,
        waiter: WorkWaiter,
        ops: Sequence[Op],
        channel: Channel,
        submission: Submission,
        deadline: Deadline,
        after: Sequence[Callable[[], None]] = (),
        sender: int | None = None,
    ) -> None:
        super().__init__(ops)
        self._waiter, self.channel, self.submission = waiter, channel, submission
        self._after, self._sender = after, sender
        self._deadline = deadline

    @property
    def deadline(self) -> Deadline:
        """The operations' deadline."""
        return self._deadline

    def _poll(self) -> None:
        # First, since it ends a submission whose data have come before the failure.
        failure = self._waiter.health.failure()
        if self.submission.finished():
            self._complete()
        elif failure is not None:
            self._finish(failure)
        else:
            self._waiter.clear_way(self.channel)

    def _block(self, deadline: Deadline) -> None:
        if self.submission.finished():
            self._complete()
            return
        # The operation's own deadline fails the group; the caller's only ends this wait.
        until = deadline if deadline.at < self.deadline.at else self.deadline
        failure = self._waiter.wait_submission(self, until)
        if failure is not None or self.submission.finished():
            self._poll()

    def _complete(self) -> None:
        # Several threads may find the end: the first copies back, before any reports.
        with self._waiter.ending:
            after, self._after = self._after, ()
            try:
                for step in after:
                    step()
            except Exception as error:  # noqa: BLE001  (an output that can't be written any more)
                self._finish(error)
                return
        self.channel.forget(self.submission)
        self._finish(None, self._sender)

    def _watch(self) -> None:
        self._waiter.watch(self)
        if not self.submission.watch():
            self._waiter.poke()


class PreparedWork(_OfCall, CpuWork):
    """A prepared call in flight, as one submission; its operations are made when asked for."""

    __slots__ = ("_call", "_timeout")

    def __init__(
        self,
        waiter: WorkWaiter,
        call: CallOfWork,
        x: Arguments,
        y: Arguments,
        channel: Channel,
        submission: Submission,
        started: float,
        timeout: float,
        sender: int | None = None,
    ) -> None:
        """`started` is a time of `monotonic`."""
        # Written out instead of super().__init__(): each frame costs a small call a tenth.
        self._state = PENDING
        self._exception = self._result = self._callbacks = self._finished = None
        self._ended = 0.0
        self._started, self._timeout = started, timeout
        self._waiter, self.channel, self.submission = waiter, channel, submission
        self._call, self._sender, self._after = (call, x, y), sender, ()

    @property
    def deadline(self) -> Deadline:
        """The operations' deadline."""
        return Deadline(self._started + self._timeout, self._timeout)

    def wait(self, timeout: Timeout = None) -> bool:
        """See Work; blocks."""
        if self._state == PENDING and timeout is None:
            # The common case in a single frame. Whatever else happens, CpuWork deals with it.
            channel, address = self.channel, self.submission.address
            answer = entry_points.wait(channel.address, address, entry_points.SLICE_NS)
            if answer == at.FINISHED:
                channel.in_flight.pop(address, None)
                if channel.in_flight:
                    channel.reap()
                self._finish_waiting(self._sender)
                if self._state == DONE:
                    return True
            elif answer < 0 and answer != at.ABORTED:  # told to a single thread: this one
                self._waiter.health.engine_failed(channel, answer)
        return super().wait(timeout)


class CombinedWork(Work):
    """A batch of several works that ends when all of them have; the first failure is its own.

    Its result has an entry for each operation: the sender of a receive, or None.
    """

    __slots__ = ("_messages", "_waiter", "_works")

    def __init__(
        self, waiter: WorkWaiter, ops: Sequence[Op], works: Sequence[Work], messages: Sequence[Work]
    ) -> None:
        super().__init__(ops)
        self._waiter, self._works, self._messages = waiter, works, messages

    def _poll(self) -> None:
        ended = [work._look() for work in self._works]
        if not all(ended):
            return
        failures = [work._exception for work in self._works if work._exception is not None]
        senders = (work._result for work in self._messages)
        results = [next(senders) if isinstance(op, (Send, Recv)) else None for op in self.ops]
        self._finish(failures[0] if failures else None, results)

    def _block(self, deadline: Deadline) -> None:
        for work in self._works:
            if not work._look():
                work._block(deadline)
        self._poll()

    def _watch(self) -> None:
        self._waiter.watch(self)
        for work in self._works:
            work._watch()
