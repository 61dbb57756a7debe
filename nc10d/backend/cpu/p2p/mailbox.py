"""Sending and receiving for a rank of a group: posting, matching, receives from any source."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np

from nc10d.arrays.buffer import Buffer, as_buffer
from nc10d.arrays.dtypes import DType
from nc10d.backend.cpu.engine.channel import Channel, Submission, deadline_ns
from nc10d.backend.cpu.failure.health import Health
from nc10d.backend.cpu.lowering.ordering import INDEPENDENT, MessageDependencies
from nc10d.backend.cpu.lowering.prepared import PreparedMessage
from nc10d.backend.cpu.lowering.prepared_cache import PreparedCache
from nc10d.backend.cpu.lowering.strided import message_operands
from nc10d.backend.cpu.membership.group import Group
from nc10d.backend.cpu.memory.host_peer import mask
from nc10d.backend.cpu.native import entry_points
from nc10d.backend.cpu.native import offsets as at
from nc10d.backend.cpu.native import prepared_calls as plain
from nc10d.backend.cpu.p2p import unexpected
from nc10d.backend.cpu.transport.links import SLOT, Header, Inbox, LinksStopped, UnexpectedMessage
from nc10d.backend.cpu.works import CpuWork, PartWaiter
from nc10d.base.call_site import called, here
from nc10d.base.deadline import Deadline
from nc10d.base.promise import copy_to_raise
from nc10d.errors import CollectiveMismatch, DistError
from nc10d.ops import MessageInfo, Op, Recv, Send
from nc10d.work import Work

End = TypeVar("End")
_LABELS = {dtype.code: dtype.label for dtype in DType}
_PAUSE = 0.05
"""Seconds between two looks of a thread that waits for a message from any source."""


@dataclass(frozen=True, slots=True)
class DeferredReceive:
    """A receive that the caller of `launch` starts once the operations before it have ended."""

    dependencies: MessageDependencies
    start: Callable[[], Work]


class Mailbox:
    """Posts sends and receives of a rank; their Works wait through `waiter`."""

    def __init__(self, group: Group, waiter: PartWaiter, cache: PreparedCache) -> None:
        self._group, self._links = group, group.links
        self._waiter, self._cache = waiter, cache

    def launch(
        self, op: Send | Recv, deadline: Deadline, dependencies: MessageDependencies = INDEPENDENT
    ) -> Work | DeferredReceive:
        """Post a message or a receive, and return its Work."""
        # A receive with dependencies is deferred if the engine can't carry it out: its source is
        # any rank, or its message is in the unexpected queue.
        if isinstance(op, Send):
            return self._send(op, deadline, dependencies)
        if op.peer is not None:
            inbox = self._end(self._links.inbox, op.peer)
            with inbox.lock, inbox:
                return self._receive_from(inbox, op, op.peer, deadline, dependencies)
        if dependencies:
            receive = partial(self._receive_any, op, deadline)
            return DeferredReceive(dependencies, receive)
        return self._receive_any(op, deadline)

    def _end(self, find: Callable[[int], End], peer: int) -> End:
        """Return an end of a link to or from a rank; raises the group's failure."""
        try:
            return find(peer)
        except LinksStopped:
            raise copy_to_raise(self._group.health.reason_to_stop()) from None

    def _submission(
        self,
        op: Send | Recv,
        buffer: Buffer,
        deadline: Deadline,
        dependencies: MessageDependencies,
        channel: Channel,
    ) -> Submission:
        operands = message_operands(buffer)
        strided, waits = not buffer.contiguous, dependencies.waits
        linked = self._links.program(
            isinstance(op, Send), buffer.nbytes, strided, len(waits), unexpected.is_remote(channel)
        )
        addresses = [*operands.addresses, *waits]
        keep = [*operands.keep, dependencies.words]
        head = (op.tag, buffer.nbytes, buffer.dtype.code)
        limit = deadline_ns(deadline)
        return Submission(linked, addresses, keep, limit, head, dependencies.own)

    def _send(self, op: Send, deadline: Deadline, dependencies: MessageDependencies) -> Work:
        buffer = as_buffer(op.x)
        channel = self._end(self._links.to, op.peer)
        submission = self._submission(op, buffer, deadline, dependencies, channel)
        channel.submit(submission)
        self._prepare(op, buffer, channel, None)
        return CpuWork(self._waiter, (op,), [(channel, submission)], deadline)

    def _receive_from(
        self,
        inbox: Inbox,
        op: Recv,
        peer: int,
        deadline: Deadline,
        dependencies: MessageDependencies,
    ) -> Work | DeferredReceive:
        """Receive from a peer; the caller holds the inbox."""
        buffer, channel = as_buffer(op.x), inbox.channel
        submission = self._submission(op, buffer, deadline, dependencies, channel)
        early = inbox.take_unexpected(op.tag)
        if early is not None:
            deliver = partial(self._deliver, op, peer, buffer, early, deadline)
            return DeferredReceive(dependencies, deliver) if dependencies else deliver()
        channel.submit(submission)
        self._prepare(op, buffer, channel, inbox)
        return CpuWork(self._waiter, (op,), [(channel, submission)], deadline, sender=peer)

    def _prepare(
        self, op: Send | Recv, buffer: Buffer, channel: Channel, inbox: Inbox | None
    ) -> None:
        """Prepare a message that has passed all checks, for the next time."""
        if type(op.x) is not np.ndarray or op.peer is None or not op.x.flags.carray:
            return
        if inbox is None and self._links.sync_sends:  # a prepared send does not wait
            return
        if self._cache.knows(op):
            return
        remote = unexpected.is_remote(channel)
        linked = self._links.program(inbox is None, buffer.nbytes, away=remote)
        model = Submission(linked, [0], None, 0, (op.tag, buffer.nbytes, buffer.dtype.code))
        small = buffer.nbytes <= SLOT
        prepared = PreparedMessage(channel, model, inbox, op.peer, small, not remote, op.x)
        self._cache.remember(op, prepared)

    def _deliver(
        self, op: Recv, peer: int, buffer: Buffer, early: UnexpectedMessage, deadline: Deadline
    ) -> Work:
        """Receive a message that was taken aside; it may still be on its way."""
        if early.data.size != buffer.nbytes or early.dtype != buffer.dtype.code:
            sent = f"{early.data.size} bytes of {_LABELS.get(early.dtype)} with tag {early.tag}"
            wanted = f"{buffer.nbytes} bytes of {buffer.dtype.label}"
            message = (
                f"rank {peer} sent {called(sent, early.site)}, but rank {self._group.rank} "
                f"receives {called(wanted, here())}"
            )
            self._group.health.abort(CollectiveMismatch(message, rank=peer, op="recv"))
            failure = self._group.health.failure()
            assert failure is not None, "the group was just aborted"
            raise failure

        def copy() -> None:
            flat = early.data.view(buffer.dtype.numpy)
            np.copyto(buffer.as_numpy(), flat.reshape(buffer.shape))

        part = (self._end(self._links.inbox, peer).channel, early.submission)
        return CpuWork(self._waiter, (op,), [part], deadline, [copy], peer)

    # -- receives from any source ----------------------------------------------------------------

    def _receive_any(self, op: Recv, deadline: Deadline) -> Work:
        group = self._group
        peers = [rank for rank in range(group.size) if rank != group.rank]

        def match() -> Work | None:
            for peer in peers:
                inbox = self._end(self._links.inbox, peer)
                with inbox.lock, inbox:  # no other thread may receive a message that is ready
                    if self._ready(inbox, op.tag) is not None:
                        work = self._receive_from(inbox, op, peer, deadline, INDEPENDENT)
                        assert isinstance(work, Work), "it has no dependencies"
                        return work
            return None

        pause = partial(self._pause, peers)
        return AnySourceReceive(self._waiter, group.health, (op,), deadline, match, pause)

    def _ready(self, inbox: Inbox, tag: int | None) -> Header | None:
        """Return the next message with `tag` (None: any) to which no posted receive is entitled."""
        channel = inbox.channel
        if inbox.receiving:  # the head is being received; messages behind it can wait
            return inbox.first_unexpected(tag)
        oldest = channel.oldest()
        if oldest is not None:
            # Receives are posted: let the link find out whether its next message matches.
            answer = entry_points.wait(channel.address, oldest.address, 1)
            if answer < 0 and answer not in (at.ABORTED, at.UNMATCHED):
                self._group.health.engine_failed(channel, answer)
            unexpected.receive_unexpected_from(self._links, inbox)
        elif inbox.first_unexpected(tag) is None and channel.idle() and unexpected.arrived(channel):
            header = unexpected.head(channel)
            if tag in (None, header[0]):
                return header
            unexpected.post_unexpected(self._links, inbox, header)
        return inbox.first_unexpected(tag)

    def probe(self, peer: int | None, tag: int | None, deadline: Deadline) -> MessageInfo | None:
        """Return the next message; see Backend.probe. Blocks."""
        group, health = self._group, self._group.health
        others = [rank for rank in range(group.size) if rank != group.rank]
        peers = others if peer is None else [peer]
        while True:
            health.check()
            # Asked before looking, so that messages sent before a rank left are found.
            left = health.have_left(peers)
            for rank in peers:
                inbox = self._end(self._links.inbox, rank)
                with inbox.lock, inbox:
                    found = self._ready(inbox, tag)
                if found is not None:
                    return MessageInfo(rank, *found[:2])
            if deadline.expired():
                return None
            if left:
                raise copy_to_raise(health.fail_left(peers, (Recv(None, peer, tag or 0),)))
            self._pause(peers, deadline.slice(_PAUSE))

    def _pause(self, peers: Sequence[int], seconds: float) -> None:
        """Wait for a message from any of `peers`, for `seconds` at most."""
        inboxes = [self._end(self._links.inbox, peer) for peer in peers]
        waiting = [inbox.channel for inbox in inboxes if not inbox.receiving]
        self.await_words([*map(unexpected.next_message, waiting)], seconds)

    def await_words(self, rows: Sequence[tuple[int, int]], seconds: float) -> bool:
        """Wait for `seconds`, or until the word of any (address, value) reaches its value."""
        table = np.array(rows, np.int64)
        context = self._group.context
        slice_ns = max(1, int(seconds * 1e9))
        bit = mask([context.rank])
        rows_at, block = plain.address(table), context.rank_block
        answer = entry_points.wait_any(block, bit, rows_at, len(rows), slice_ns)
        return bool(answer >= 0)


class AnySourceReceive(Work):
    """A receive from the first rank that sends; matched when a thread waits for it or looks."""

    # `match` returns the Work of the matched receive, or None; `pause` waits for any message for
    # some seconds at most.

    __slots__ = (
        *("_awaited", "_health", "_inner", "_match", "_matching", "_pause", "_waiter"),
        "deadline",
    )

    def __init__(
        self,
        waiter: PartWaiter,
        health: Health,
        ops: Sequence[Op],
        deadline: Deadline,
        match: Callable[[], Work | None],
        pause: Callable[[float], None],
    ) -> None:
        super().__init__(ops)
        self._waiter, self._health = waiter, health
        self._match, self._pause = match, pause
        self._matching = threading.Lock()
        self._inner: Work | None = None
        self._awaited = False
        self.deadline = deadline

    def _poll(self) -> None:
        self._block(Deadline(0.0))

    def _block(self, deadline: Deadline) -> None:
        until = deadline if deadline.at < self.deadline.at else self.deadline
        while self._inner is None:
            failure = self._health.failure()
            if failure is None and self.deadline.expired():
                failure = self._health.fail_timeout(self.ops, None, self.deadline.limit)
            if failure is not None:
                self._finish(failure)
                return
            # Asked before matching, so that messages sent before a rank left are found. A thread
            # that only polls has not asked to wait, and is no reason for an error.
            awaited = self._awaited or deadline.at > 0
            all_left = awaited and self._health.all_left()
            # The notifier and several waiting threads may match: a single thread takes the message.
            with self._matching:
                if self._inner is None:
                    try:
                        self._inner = self._match()
                    except DistError as error:
                        self._finish(error)
                        return
            if self._inner is None:
                if all_left:
                    self._finish(self._health.fail_all_left(self.ops))
                    return
                if until.expired():
                    return
                self._pause(until.slice(_PAUSE))
        inner = self._inner
        inner._block(deadline) if deadline.at > 0 else inner._poll()
        if inner._look():
            self._finish(inner._exception, inner._result)

    def _watch(self) -> None:
        self._awaited = True  # a callback or a coroutine waits
        self._waiter.watch(self)
