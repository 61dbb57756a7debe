"""Sending and receiving for a rank in a group: post, match and probe messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np

from nc10d.arrays.buffer import Buffer, as_buffer
from nc10d.arrays.dtypes import element_by_code
from nc10d.backend.cpu.engine.channel import Channel, Submission, deadline_ns
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
from nc10d.backend.cpu.p2p.receive_queues import PAUSE, PendingReceive, QueuedReceive, ReceiveQueues
from nc10d.backend.cpu.transport.links import SLOT, Header, Inbox, LinksStopped, UnexpectedMessage
from nc10d.backend.cpu.works import CpuWork, WorkWaiter
from nc10d.base.call_site import called, here
from nc10d.base.deadline import Deadline
from nc10d.base.promise import copy_to_raise
from nc10d.errors import CollectiveMismatch
from nc10d.ops import MessageInfo, Recv, Send
from nc10d.work import Work

End = TypeVar("End")
_SHORT = 0.001
"""Seconds for which a thread waits behind a message that has been moved aside."""


@dataclass(frozen=True, slots=True)
class DeferredReceive:
    """A receive that the caller of `launch` starts once the earlier operations have ended."""

    dependencies: MessageDependencies
    start: Callable[[], Work]


class Mailbox:
    """Posts a rank's sends and receives; their Works wait through `waiter`."""

    def __init__(self, group: Group, waiter: WorkWaiter, cache: PreparedCache) -> None:
        self._group, self._links = group, group.links
        self._waiter, self._cache = waiter, cache
        self._others = [rank for rank in range(group.size) if rank != group.rank]
        self._all_inboxes: list[Inbox] = []
        self._queues = ReceiveQueues()
        self._in_order: bool | None = False
        """Whether prepared receives come to this Mailbox; None while the inboxes are switched."""
        # The callback must not refer to this Mailbox, which refers to the group and its health.
        queues = self._queues
        group.health.on_failure.append(lambda _: queues.clear())

    def launch(
        self, op: Send | Recv, deadline: Deadline, dependencies: MessageDependencies = INDEPENDENT
    ) -> Work | DeferredReceive:
        """Post a message or a receive, and return the Work."""
        # A receive with dependencies is deferred if the engine can't carry it out: a receive that
        # stands in a queue (receive_queues.py), or whose message is in the unexpected queue.
        if isinstance(op, Send):
            return self._send(op, deadline, dependencies)
        if op.peer is None or op.tag in self._queues:
            return self._receive_in_order(op, deadline, dependencies)
        inbox = self._end(self._links.inbox, op.peer)
        with inbox.lock, inbox:
            return self._receive_from(inbox, op, op.peer, deadline, dependencies)

    def _end(self, find: Callable[[int], End], peer: int) -> End:
        """Return an end of a link to or from a rank; raises the group's failure, if any."""
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
        return CpuWork(self._waiter, (op,), channel, submission, deadline)

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
        return CpuWork(self._waiter, (op,), channel, submission, deadline, sender=peer)

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
        """Receive a message that was taken aside; the message may still be on its way."""
        if early.data.size != buffer.nbytes or early.dtype != buffer.dtype.code:
            found = element_by_code(early.dtype)
            label = "records" if found is None else found.label
            sent = f"{early.data.size} bytes of {label} with tag {early.tag}"
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

        channel = self._end(self._links.inbox, peer).channel
        return CpuWork(self._waiter, (op,), channel, early.submission, deadline, [copy], peer)

    # -- receives in queues ----------------------------------------------------------------------

    def _receive_in_order(
        self, op: Recv, deadline: Deadline, dependencies: MessageDependencies
    ) -> Work | DeferredReceive:
        """Post a receive to the tag's queue: from any source, or behind such a receive."""
        pending = PendingReceive(op, deadline, dependencies)
        with self._queues.lock:
            self._queues.join(pending)
            self._advance(op.tag)
        if pending.work is not None:
            return pending.work
        peers = self._others if op.peer is None else [op.peer]
        work = QueuedReceive(
            *(self._waiter, self._group.health, pending, peers),
            *(self._advance, self._next_words, self.await_words),
        )
        if not dependencies:
            return work

        def start() -> Work:
            pending.dependencies = INDEPENDENT
            return work

        return DeferredReceive(dependencies, start)

    def _advance(self, tag: int) -> None:
        """Post what a tag's queue can post, and let prepared receives pass if none is left."""
        with self._queues.lock:
            self._queues.advance(tag, self._post)
            wanted = bool(self._queues)
            if wanted is not self._in_order:
                self._in_order = None  # Ctrl-C may come: the next call repeats what is half done
                for inbox in self._inboxes():
                    inbox.keep_in_order(wanted)
                self._in_order = wanted

    def _inboxes(self) -> Sequence[Inbox]:
        """Return the inboxes of all other ranks, made if need be."""
        if not self._all_inboxes:
            self._all_inboxes = [self._end(self._links.inbox, peer) for peer in self._others]
        return self._all_inboxes

    def _post(self, pending: PendingReceive) -> Work | None:
        """Post a queue's first receive to a link; None if no message has come."""
        op, deadline = pending.op, pending.deadline
        for peer, inbox in zip(self._others, self._inboxes(), strict=True):
            if op.peer not in (None, peer):
                continue
            with inbox.lock, inbox:  # no other thread may receive a message that is ready
                if op.peer is not None or self._ready(inbox, op.tag.__eq__) is not None:
                    work = self._receive_from(inbox, op, peer, deadline, INDEPENDENT)
                    assert isinstance(work, Work), "it has no dependencies"
                    return work
        return None

    def drop_pending(self) -> None:
        """Drop the receives in queues, whose group has ended on this rank."""
        self._queues.clear()

    # -- looking at messages ---------------------------------------------------------------------

    def _ready(self, inbox: Inbox, fits: Callable[[int], bool]) -> Header | None:
        """Return the next message with a fitting tag to which no posted receive is entitled."""
        # The caller holds the inbox.
        channel = inbox.channel
        before = None
        while not inbox.receiving:  # else the head is being received; messages behind can wait
            # Messages with other tags are moved aside, as long as there is one at the head.
            oldest = channel.oldest()
            state = len(inbox.unexpected), oldest is None
            if state == before:
                break
            before = state
            if oldest is not None:
                # Receives are posted: let the link find out whether the next message matches.
                answer = entry_points.wait(channel.address, oldest.address, 1)
                if answer < 0 and answer not in (at.ABORTED, at.UNMATCHED):
                    self._group.health.engine_failed(channel, answer)
                unexpected.receive_unexpected_from(self._links, inbox)
            if (found := inbox.first_unexpected(fits)) is not None:
                return found
            if oldest is None and channel.idle() and unexpected.arrived(channel):
                header = unexpected.head(channel)
                if fits(header[0]):
                    return header
                unexpected.post_unexpected(self._links, inbox, header)
        return inbox.first_unexpected(fits)

    def probe(self, peer: int | None, tag: int | None, deadline: Deadline) -> MessageInfo | None:
        """Return the next message; see Backend.probe. Blocks."""
        health, peers = self._group.health, self._others if peer is None else [peer]
        while True:
            health.check()
            # Asked before looking, so that messages sent before a rank left are found.
            left = health.peers.have_left(peers)
            found = self._look(peers, tag)
            if found is not None or deadline.expired():
                return found
            if left:
                raise copy_to_raise(health.fail_left(peers, (Recv(None, peer, tag or 0),)))
            self.await_words(self._announced(peers), deadline.slice(PAUSE))

    def _look(self, peers: Sequence[int], tag: int | None) -> MessageInfo | None:
        """Return the next message from any of `peers` that no pending receive will take."""
        with self._queues.lock:
            for queued in self._queues.tags():
                self._advance(queued)
            # A queue that is left takes the next message with its tag, which may come now.
            taken = self._queues.tags()
            for rank in peers:
                inbox = self._end(self._links.inbox, rank)
                with inbox.lock, inbox:
                    found = self._ready(inbox, lambda t: tag in (None, t) and t not in taken)
                if found is not None:
                    return MessageInfo(rank, *found[:2])
        return None

    def _next_words(self, tag: int) -> tuple[list[tuple[int, int]], MessageDependencies]:
        """Return the words that let a queue advance, of gates or next messages; see QueuedReceive.

        There are none once all gates are open, until the batch's thread has seen that.
        """
        # The batch may end meanwhile: the gates stay as long as these dependencies.
        waiting = self._queues.dependencies(tag)
        if not waiting:
            return self._announced(), waiting
        closed = [(gate, 1) for gate in waiting.waits if not entry_points.load_word(gate)]
        return closed, waiting

    def _announced(self, peers: Sequence[int] | None = None) -> list[tuple[int, int]]:
        """Return the words that announce the next messages from `peers` (None: any)."""
        found = peers if peers is not None else self._others
        inboxes = [self._end(self._links.inbox, peer) for peer in found]
        waiting = [inbox.channel for inbox in inboxes if not inbox.receiving]
        return [*map(unexpected.next_message, waiting)]

    def await_gate(self, gate: int, seconds: float) -> bool:
        """Wait for `seconds`, or until a batch's gate opens; return whether the gate has opened.

        Messages that block the batch's receives are moved aside; behind one there may be another,
        so the wait is short then.
        """
        moved = False
        for inbox in self._links.inboxes():
            if inbox.channel.get(at.C_UNMATCHED):
                moved = True
                with inbox.lock, inbox:
                    unexpected.receive_unexpected_from(self._links, inbox)
        return self.await_words([(gate, 1)], min(seconds, _SHORT) if moved else seconds)

    def await_words(self, rows: Sequence[tuple[int, int]], seconds: float) -> bool:
        """Wait for `seconds`, or until the word of any (address, value) reaches that value."""
        table = np.array(rows, np.int64)
        context = self._group.context
        slice_ns = max(1, int(seconds * 1e9))
        bit = mask([context.rank])
        rows_at, block = plain.address(table), context.rank_block
        answer = entry_points.wait_any(block, bit, rows_at, len(rows), slice_ns)
        return bool(answer >= 0)
