"""Receives from any source, and the order in which receives take messages.

If two receives fit a message, the earlier receive takes the message, as in MPI. A link keeps this
order for receives from a named rank. A receive from any source has no link until a message has
come. Until then the receive stands in a queue, and so do later receives with the same tag.

    receive                                        is posted to a link
    from a rank, with a tag that has no queue      at once
    from a rank, in a queue                        when it is the first of the queue
    from any source                                when it is the first, and a rank has sent for it

So a queue stays while its first receive is from any source, or waits for a batch's earlier
operations. A queue advances when a receive joins, when a thread waits for or tests one of the
receives, and when a thread probes. A prepared receive would bypass the queues. So while there is a
queue, `Inbox.in_order` sends prepared receives to the Mailbox.

A queue keeps receives, not Works. So a dropped Work leaves the receive posted, and a dropped group
leaves without garbage collection.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nc10d.backend.cpu.failure.health import Health
from nc10d.backend.cpu.lowering.ordering import INDEPENDENT, MessageDependencies
from nc10d.backend.cpu.works import WorkWaiter
from nc10d.base.deadline import Deadline
from nc10d.ops import Recv
from nc10d.work import Work

PAUSE = 0.05
"""Seconds between two looks by a thread that waits for a message from any rank."""


@dataclass(slots=True, eq=False)
class PendingReceive:
    """A receive in a queue; when leaving, the receive has a `work` or an `error`."""

    op: Recv
    deadline: Deadline
    dependencies: MessageDependencies
    """The batch's operations that must end first; INDEPENDENT once they have ended."""
    work: Work | None = None
    error: Exception | None = None

    @property
    def left(self) -> bool:
        """Whether the receive has left the queue, or is about to."""
        return self.work is not None or self.error is not None


class ReceiveQueues:
    """A group's queues, by tag; any thread may call."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        """Held while a queue changes, and by a thread that must find the queue unchanged."""
        self._queues: dict[int, deque[PendingReceive]] = {}

    def __contains__(self, tag: int) -> bool:
        return tag in self._queues

    def __bool__(self) -> bool:
        return bool(self._queues)

    def tags(self) -> list[int]:
        """Return the tags that have a queue."""
        return list(self._queues)

    def dependencies(self, tag: int) -> MessageDependencies:
        """Return those of a queue's first receive."""
        with self.lock:
            queue = self._queues.get(tag)
            return queue[0].dependencies if queue else INDEPENDENT

    def join(self, pending: PendingReceive) -> None:
        """Append a receive to the tag's queue."""
        with self.lock:
            self._queues.setdefault(pending.op.tag, deque()).append(pending)

    def advance(self, tag: int, post: Callable[[PendingReceive], Work | None]) -> None:
        """Post a queue's receives in order, up to the first for which `post` returns None."""
        with self.lock:
            queue = self._queues.get(tag)
            while queue:
                first = queue[0]
                if not (first.dependencies or first.left):
                    try:
                        first.work = post(first)
                    except Exception as error:  # noqa: BLE001  (the Work raises it)
                        # A traceback would keep this frame, and so the whole group.
                        first.error = error.with_traceback(None)
                if not first.left:
                    return
                queue.popleft()
            # Last of all: a thread that finds no queue posts a receive behind all of these.
            self._queues.pop(tag, None)

    def clear(self) -> None:
        """Drop all receives: the group has ended. Takes no lock."""
        self._queues.clear()


class QueuedReceive(Work):
    """The Work for a receive that was posted to a queue."""

    __slots__ = (
        *("_advance", "_await", "_awaited", "_health", "_next_words", "_peers", "_pending"),
        "_waiter",
    )

    def __init__(
        self,
        waiter: WorkWaiter,
        health: Health,
        pending: PendingReceive,
        peers: Sequence[int],
        advance: Callable[[int], None],
        next_words: Callable[[int], tuple[Sequence[tuple[int, int]], object]],
        await_words: Callable[[Sequence[tuple[int, int]], float], object],
    ) -> None:
        """`advance` advances a tag's queue. The message comes from one of `peers`.

        `next_words(tag)` returns (address, value) rows and what keeps the words' memory.
        `await_words(rows, seconds)` blocks until any word reaches the given value: then the queue
        may advance.
        """
        super().__init__((pending.op,))
        self._waiter, self._health = waiter, health
        self._pending, self._peers = pending, peers
        self._advance, self._next_words, self._await = advance, next_words, await_words
        self._awaited = False

    @property
    def deadline(self) -> Deadline:
        """The receive's deadline."""
        return self._pending.deadline

    def _poll(self) -> None:
        self._block(Deadline(0.0))

    def _block(self, deadline: Deadline) -> None:
        pending = self._pending
        if not pending.left:
            self._leave_queue(deadline)
        inner = pending.work
        if inner is not None:
            inner._block(deadline) if deadline.at > 0 else inner._poll()
            if inner._look():
                self._finish(inner._exception, inner._result)
        elif pending.error is not None:
            self._finish(pending.error)

    def _leave_queue(self, deadline: Deadline) -> None:
        """Advance the queue until this receive has left, has failed, or `deadline`."""
        pending, health = self._pending, self._health
        until = deadline if deadline.at < self.deadline.at else self.deadline
        words: Sequence[tuple[int, int]] | None = None
        while not pending.left:
            # Asked before matching, so that messages sent before the failure are found. A closed
            # group matches none: the memory may be gone.
            failing, failure = health.failing(), health.failure() if health.closed else None
            if failure is None and self.deadline.expired():
                failure = health.fail_timeout(self.ops, None, self.deadline.limit)
            if failure is not None:
                self._finish(failure)
                return
            # Asked before matching, so that messages sent before a rank left are found. A thread
            # that only polls has not asked to wait, and is no reason for an error.
            awaited = self._awaited or deadline.at > 0
            peers_left = awaited and health.peers.have_left(self._peers)
            self._advance(pending.op.tag)
            if pending.left:
                return
            if failing:
                failure = health.failure()
                assert failure is not None, "a group that has failed has a cause"
                self._finish(failure)
                return
            if peers_left:
                self._finish(health.fail_left(self._peers, self.ops))
                return
            if until.expired():
                return
            # The words are read before the queue advances: a message that another thread takes in
            # between has changed them, and this thread does not wait.
            if words is not None:
                self._await(words, until.slice(PAUSE))
            words, _memory = self._next_words(pending.op.tag)

    def _watch(self) -> None:
        self._awaited = True  # a callback or a coroutine waits
        self._waiter.watch(self)
