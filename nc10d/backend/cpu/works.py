"""The CPU backend's Work: some submissions that must all end, and what to do when they have."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from nc10d.backend.cpu.engine.channel import Channel, Submission
from nc10d.base.deadline import Deadline
from nc10d.base.outcome import DONE
from nc10d.ops import Op, Recv, Send
from nc10d.work import Work

if TYPE_CHECKING:
    from nc10d.backend.cpu.waiter import Waiter

Part = tuple[Channel, Submission]


class CompletedMessage(Work):
    """A message that was over as it was launched; its operation is made when somebody asks.

    It never changes, so most of what a Work keeps is kept here once for all.
    """

    __slots__ = ("_message",)

    _state = DONE
    _exception = _callbacks = _gate = None
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
        """Be about the caller's own array, of which the message's was a view."""
        (op,) = ops
        assert isinstance(op, (Send, Recv)), "a message was launched"
        self._message = type(op), op.peer, op.x, op.tag


class CpuWork(Work):
    """Operations in flight on channels; ended when all parts are, or when the group failed."""

    __slots__ = ("_after", "_backend", "_parts", "_sender", "deadline")

    def __init__(
        self,
        backend: Waiter,
        ops: Sequence[Op],
        parts: list[Part],
        deadline: Deadline,
        after: Sequence[Callable[[], None]] = (),
        sender: int | None = None,
    ) -> None:
        super().__init__(ops)
        self._backend = backend
        self._parts = parts
        self._after = after
        self._sender = sender
        self.deadline = deadline

    def _poll(self) -> None:
        if all(submission.finished() for _, submission in self._parts):
            self._complete()
            return
        failure = self._backend.health.failure()
        if failure is not None:
            self._finish(failure)
        else:
            self._backend.clear_way(self._parts)

    def _block(self, deadline: Deadline) -> None:
        if all(submission.finished() for _, submission in self._parts):
            self._complete()
            return
        # The operation's own deadline fails the group; the caller's only ends this wait.
        until = deadline if deadline.at < self.deadline.at else self.deadline
        for channel, submission in list(self._parts):
            wait_part = self._backend.wait_part
            failure = wait_part(channel, submission, until, self.deadline, self.ops)
            if failure is not None:
                self._finish(failure)
                return
            if not submission.finished():
                return
        self._poll()

    def _complete(self) -> None:
        # Several threads may find the end: one copies back, before anybody is told.
        with self._backend.ending:
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
        self._backend.watch(self)
        for _, submission in list(self._parts):
            if not submission.watch():
                self._backend.host.poke_notifier()


class AnySourceReceive(Work):
    """A receive from whoever sends first; matched when somebody waits for it or looks."""

    __slots__ = ("_awaited", "_backend", "_inner", "_match", "_matching", "_pause", "deadline")

    def __init__(
        self,
        backend: Waiter,
        ops: Sequence[Op],
        deadline: Deadline,
        match: Callable[[], Work | None],
        pause: Callable[[float], None],
    ) -> None:
        super().__init__(ops)
        self._backend = backend
        self._match = match
        self._pause = pause
        self._matching = threading.Lock()
        self._inner: Work | None = None
        self._awaited = False
        self.deadline = deadline

    def _poll(self) -> None:
        self._block(Deadline(0.0))

    def _block(self, deadline: Deadline) -> None:
        until = deadline if deadline.at < self.deadline.at else self.deadline
        while self._inner is None:
            failure = self._backend.health.failure()
            if failure is None and self.deadline.expired():
                failure = self._backend.health.fail_timeout(self.ops, None)
            if failure is not None:
                self._finish(failure)
                return
            # First, so that what was sent before is found; who only looks has not asked to wait.
            asked = self._awaited or deadline.at > 0
            deserted = asked and self._backend.health.deserted()
            # The notifier and several waiters may look at the same time: one takes the message.
            with self._matching:
                if self._inner is None:
                    self._inner = self._match()
            if self._inner is None:
                if deserted:
                    self._finish(self._backend.health.fail_deserted(self.ops))
                    return
                if until.expired():
                    return
                self._pause(until.slice(0.05))
        inner = self._inner
        inner._block(deadline) if deadline.at > 0 else inner._poll()
        if inner._look():
            self._finish(inner._exception, inner._result)

    def _watch(self) -> None:
        self._awaited = True  # by a callback, or by a coroutine
        self._backend.watch(self)


class CombinedWork(Work):
    """A batch of several works that ends when all of them have; the first failure is its own.

    Its result has an entry for each operation: the sender of a receive, or None.
    """

    __slots__ = ("_backend", "_messages", "_works")

    def __init__(
        self,
        backend: Waiter,
        ops: Sequence[Op],
        works: Sequence[Work],
        messages: Sequence[Work],
    ) -> None:
        super().__init__(ops)
        self._backend = backend
        self._works = works
        self._messages = messages

    def _poll(self) -> None:
        ended = [work._look() for work in self._works]
        if all(ended):
            self._end()

    def _block(self, deadline: Deadline) -> None:
        for work in self._works:
            if not work._look():
                work._block(deadline)
        self._poll()

    def _end(self) -> None:
        failures = [work._exception for work in self._works if work._exception is not None]
        senders = (work._result for work in self._messages)
        results = [next(senders) if isinstance(op, (Send, Recv)) else None for op in self.ops]
        self._finish(failures[0] if failures else None, results)

    def _watch(self) -> None:
        self._backend.watch(self)
        for work in self._works:
            work._watch()
