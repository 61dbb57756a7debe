"""The CPU backend's Work: some submissions that must all end, and the last steps after that."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from nc10d.backend.cpu.engine.channel import Channel, Submission
from nc10d.base.deadline import Deadline
from nc10d.base.promise import DONE
from nc10d.errors import DistError
from nc10d.ops import Op, Recv, Send
from nc10d.work import Work

Part = tuple[Channel, Submission]


class GroupState(Protocol):
    """Whether a group works; `health.py` has it."""

    def failure(self) -> DistError | None:
        """Return why the group has failed, or None."""

    def check(self) -> None:
        """Raise the group's failure, if it has failed."""

    def engine_failed(self, channel: Channel, answer: int) -> None:
        """Turn a negative answer of the engine into the group's failure."""


class PartWaiter(Protocol):
    """A Work's view of the group that it belongs to."""

    @property
    def health(self) -> GroupState:
        """Whether the group works."""

    ending: threading.RLock
    """Held while the last steps of a Work are done."""

    def wait_part(self, work: CpuWork, part: Part, until: Deadline) -> DistError | None:
        """Block until a part has ended, or `until`; return the failure of the group, if any."""

    def need_worker(self) -> None:
        """Start the worker unless it runs: no thread may wait for this Work."""

    def clear_way(self, parts: Sequence[Part]) -> None:
        """Receive unexpected messages that block these parts."""

    def watch(self, work: Work) -> None:
        """Let the notifier finish a Work that nobody waits for."""

    def poke(self) -> None:
        """Make the notifier look at all watched Works."""


class CompletedMessage(Work):
    """A message that ended as it was launched; it never changes, so attributes are the class's."""

    __slots__ = ("_message",)

    _state = DONE
    _exception = _callbacks = _finished = None
    _started = _ended = 0.0

    def __init__(self, kind: type[Send | Recv], peer: int, x: Any, tag: int) -> None:
        self._message: tuple[type[Any], int | None, Any, int] = kind, peer, x, tag
        self._result = peer if kind is Recv else None

    @property
    def ops(self) -> Sequence[Op]:
        """The message, made anew."""
        kind, peer, x, tag = self._message
        return (kind(x, peer, tag),)

    @ops.setter
    def ops(self, ops: Sequence[Op]) -> None:
        """Replace the message's array, a view, by the caller's own."""
        (op,) = ops
        assert isinstance(op, (Send, Recv)), "a message was launched"
        self._message = type(op), op.peer, op.x, op.tag


class CpuWork(Work):
    """Operations in flight on channels; ended when all parts are, or when the group failed."""

    # It keeps its parts and its group until it is dropped, even after its end: other threads may
    # still read them, without a lock.

    __slots__ = ("_after", "_parts", "_sender", "_waiter", "deadline")

    def __init__(
        self,
        waiter: PartWaiter,
        ops: Sequence[Op],
        parts: list[Part],
        deadline: Deadline,
        after: Sequence[Callable[[], None]] = (),
        sender: int | None = None,
    ) -> None:
        super().__init__(ops)
        self._waiter, self._parts = waiter, parts
        self._after, self._sender = after, sender
        self.deadline = deadline

    def parts(self) -> Sequence[Part]:
        """Return the submissions, with their channels."""
        return self._parts

    def _poll(self) -> None:
        if all(submission.finished() for _, submission in self._parts):
            self._complete()
            return
        failure = self._waiter.health.failure()
        if failure is not None:
            self._finish(failure)
        else:
            self._waiter.clear_way(self._parts)

    def _block(self, deadline: Deadline) -> None:
        if all(submission.finished() for _, submission in self._parts):
            self._complete()
            return
        # The operation's own deadline fails the group; the caller's only ends this wait.
        until = deadline if deadline.at < self.deadline.at else self.deadline
        for part in list(self._parts):
            failure = self._waiter.wait_part(self, part, until)
            if failure is not None:
                self._finish(failure)
                return
            if not part[1].finished():
                return
        self._poll()

    def _complete(self) -> None:
        # Several threads may find the end: the first copies back, before any of them reports it.
        with self._waiter.ending:
            after, self._after = self._after, ()
            try:
                for step in after:
                    step()
            except Exception as error:  # noqa: BLE001  (an output that can't be written any more)
                self._finish(error)
                return
        for channel, submission in self._parts:
            channel.forget(submission)
        self._finish(None, self._sender)

    def _watch(self) -> None:
        self._waiter.watch(self)
        for _, submission in list(self._parts):
            if not submission.watch():
                self._waiter.poke()


class CombinedWork(Work):
    """A batch of several works that ends when all of them have; the first failure is its own.

    Its result has an entry for each operation: the sender of a receive, or None.
    """

    __slots__ = ("_messages", "_waiter", "_works")

    def __init__(
        self, waiter: PartWaiter, ops: Sequence[Op], works: Sequence[Work], messages: Sequence[Work]
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
