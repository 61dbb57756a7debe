"""Sending and receiving for one rank of a group: matching, early messages, any source."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from nc10d.arrays.buffer import Buffer, as_buffer
from nc10d.arrays.dtypes import DType
from nc10d.backend.cpu.engine.call_sites import called, here
from nc10d.backend.cpu.engine.channel import Channel, Submission
from nc10d.backend.cpu.lowering.ordering import FREE, MessageDependencies
from nc10d.backend.cpu.lowering.prepared import PreparedMessage
from nc10d.backend.cpu.lowering.strided import resolve_message
from nc10d.backend.cpu.memory.bits import mask
from nc10d.backend.cpu.native import entry_points
from nc10d.backend.cpu.native import offsets as at
from nc10d.backend.cpu.native import prepared_calls as plain
from nc10d.backend.cpu.p2p.message_cache import MessageCache, Owned
from nc10d.backend.cpu.transport.links import HALF, Inbox, UnexpectedMessage, sender_site
from nc10d.backend.cpu.works import AnySourceReceive, CpuWork
from nc10d.base.deadline import Deadline
from nc10d.errors import CollectiveMismatch
from nc10d.ops import Recv, Send
from nc10d.work import Work

if TYPE_CHECKING:
    from nc10d.backend.cpu.backend import CpuBackend

# Where a link's words have the address of its sender's counter: of two ranks, the sender is 0.
_SENT = at.C_TABLES // 8 + at.TABLE_COUNTERS * 2
_LABELS = {dtype.code: dtype.label for dtype in DType}


@dataclass(frozen=True, slots=True)
class DeferredReceive:
    """A receive to be started by the caller of launch, when the gates before it are open."""

    passage: MessageDependencies
    start: Callable[[], Work]


class Mailbox(Owned["CpuBackend"]):
    """Launches sends and receives of one rank."""

    def __init__(self, backend: CpuBackend) -> None:
        super().__init__(backend)
        self.lanes = MessageCache(backend)

    def _remember(
        self, op: Send | Recv, buffer: Buffer, channel: Channel, inbox: Inbox | None
    ) -> None:
        if type(op.x) is np.ndarray and op.peer is not None and not self.lanes.knows(op):
            away = _away(channel)
            linked = self._owner.links.program(inbox is None, buffer.nbytes, away=away)
            model = Submission(linked, [0], None, 0, (op.tag, buffer.nbytes, buffer.dtype.code))
            small = buffer.nbytes <= HALF
            lane = PreparedMessage(channel, model, inbox, op.peer, small, not away, op.x.dtype)
            self.lanes.remember(op, lane)

    def launch(
        self, op: Send | Recv, deadline: Deadline, limit: int, passage: MessageDependencies = FREE
    ) -> Work | DeferredReceive:
        """Submit a message or a receive; returns its Work.

        Late: a receive with gates that only Python can carry out, once they are open.
        """
        if isinstance(op, Send):
            return self._send(op, deadline, limit, passage)
        if op.peer is not None:
            return self._receive(op, op.peer, deadline, limit, passage)
        if passage:
            return DeferredReceive(passage, lambda: self._receive_any(op, deadline, limit))
        return self._receive_any(op, deadline, limit)

    def _submission(
        self,
        op: Send | Recv,
        buffer: Buffer,
        limit: int,
        passage: MessageDependencies,
        channel: Channel,
    ) -> Submission:
        resolved = resolve_message(buffer)
        links, sending = self._owner.links, isinstance(op, Send)
        folded = not buffer.contiguous
        linked = links.program(sending, buffer.nbytes, folded, len(passage.waits), _away(channel))
        addresses = [*resolved.addresses, *passage.waits]
        keep = [*resolved.keep, passage.words]
        head = (op.tag, buffer.nbytes, buffer.dtype.code)
        return Submission(linked, addresses, keep, limit, head, passage.own)

    def _send(self, op: Send, deadline: Deadline, limit: int, passage: MessageDependencies) -> Work:
        buffer = as_buffer(op.x)
        channel = self._owner.links.to(op.peer)
        part = self._owner.enqueue(channel, self._submission(op, buffer, limit, passage, channel))
        self._remember(op, buffer, channel, None)
        return CpuWork(self._owner, (op,), [part], deadline)

    def _receive(
        self, op: Recv, peer: int, deadline: Deadline, limit: int, passage: MessageDependencies
    ) -> Work | DeferredReceive:
        inbox = self._owner.links.inbox(peer)
        with inbox.lock, inbox:
            return self._receive_from(inbox, op, peer, deadline, limit, passage)

    def _receive_from(
        self,
        inbox: Inbox,
        op: Recv,
        peer: int,
        deadline: Deadline,
        limit: int,
        passage: MessageDependencies,
    ) -> Work | DeferredReceive:
        """Receive from a peer; the caller holds the inbox."""
        buffer, channel = as_buffer(op.x), inbox.channel
        submission = self._submission(op, buffer, limit, passage, channel)
        early = inbox.take_early(op.tag)
        if early is not None:
            deliver = partial(self._deliver, op, peer, buffer, early, deadline)
            return DeferredReceive(passage, deliver) if passage else deliver()
        part = self._owner.enqueue(channel, submission)
        self._remember(op, buffer, channel, inbox)
        return CpuWork(self._owner, (op,), [part], deadline, sender=peer)

    def _deliver(
        self, op: Recv, peer: int, buffer: Buffer, early: UnexpectedMessage, deadline: Deadline
    ) -> Work:
        if early.data.size != buffer.nbytes or early.dtype != buffer.dtype.code:
            self._owner.abort(self._differs(peer, early, buffer))
            failure = self._owner.health.failure()
            assert failure is not None
            raise failure

        def deliver() -> None:
            flat = early.data.view(buffer.dtype.numpy)
            np.copyto(buffer.as_numpy(), flat.reshape(buffer.shape))

        # It may still be on its way.
        part = (self._owner.links.inbox(peer).channel, early.submission)
        return CpuWork(self._owner, (op,), [part], deadline, [deliver], peer)

    def _receive_any(self, op: Recv, deadline: Deadline, limit: int) -> Work:
        backend = self._owner
        peers = [rank for rank in range(backend.size) if rank != backend.rank]

        def match() -> Work | None:
            for peer in peers:
                inbox = backend.links.inbox(peer)
                with inbox.lock, inbox:  # what is ready must be received before another thread does
                    if self._ready(inbox, op.tag):
                        work = self._receive_from(inbox, op, peer, deadline, limit, FREE)
                        assert isinstance(work, Work), "nothing is before it"
                        return work
            return None

        def pause(seconds: float) -> None:
            self._await_message([backend.links.inbox(peer) for peer in peers], seconds)

        return AnySourceReceive(backend, (op,), deadline, match, pause)

    def _ready(self, inbox: Inbox, tag: int) -> bool:
        """Say whether a message with `tag` is here that no posted receive is entitled to."""
        channel = inbox.channel
        if inbox.receiving:  # what is at the head is being taken; what is behind it can wait
            return any(kept.tag == tag for kept in inbox.early)
        oldest = channel.oldest()
        if oldest is not None:
            # Receives are posted: let the link find out whether its next message is for one.
            answer = entry_points.wait(channel.address, oldest.address, 1)
            if answer < 0 and answer not in (at.ABORTED, at.UNMATCHED):
                self._owner.health.engine_failed(channel, answer)
            self._clear(inbox)
        elif channel.idle() and _arrived(channel):
            waiting = _head(channel)
            if waiting[0] == tag:
                return True
            self._take_aside(inbox, waiting)
        return any(kept.tag == tag for kept in inbox.early)

    def _await_message(self, inboxes: Sequence[Inbox], seconds: float) -> None:
        self.await_words(
            [_next_message(inbox.channel) for inbox in inboxes if not inbox.receiving],
            seconds,
        )

    def await_words(self, rows: Sequence[tuple[int, int]], seconds: float) -> bool:
        """Wait until one of some (address, value) has come to its value, or `seconds`."""
        table = np.array(rows, np.int64)
        host = self._owner.host
        slice_ns = max(1, int(seconds * 1e9))
        bit = mask([host.rank])
        answer = entry_points.wait_any(host.process, bit, plain.address(table), len(rows), slice_ns)
        return bool(answer >= 0)

    def absorb(self, channel: Channel) -> None:
        """Take the message at a link's head aside, unless somebody has asked for it meanwhile."""
        for inbox in self._owner.links.inboxes():
            if inbox.channel is channel:
                with inbox.lock, inbox:
                    self._clear(inbox)

    def _clear(self, inbox: Inbox) -> None:
        message = inbox.stray()
        if message is not None:
            self._take_aside(inbox, message)

    def _take_aside(self, inbox: Inbox, message: tuple[int, int, int]) -> None:
        """Post a receive of my own for a message; whoever advances the link brings it in."""
        tag, nbytes, dtype = message
        data, site = np.empty(nbytes, np.uint8), sender_site(inbox.channel)
        linked = self._owner.links.program(False, nbytes, away=_away(inbox.channel))
        submission = Submission(linked, [plain.address(data)], data, 0, message)
        inbox.channel.submit(submission)
        inbox.keep(UnexpectedMessage(tag, dtype, data, submission, site))

    def _differs(self, peer: int, early: UnexpectedMessage, buffer: Buffer) -> CollectiveMismatch:
        what = f"{early.data.size} bytes of {_LABELS.get(early.dtype)} with tag {early.tag}"
        wanted = f"{buffer.nbytes} bytes of {buffer.dtype.label}"
        return CollectiveMismatch(
            f"rank {peer} sent {called(what, early.site)}, but rank "
            f"{self._owner.rank} receives {called(wanted, here())}",
            rank=peer,
            op="recv",
        )


def _away(channel: Channel) -> bool:
    return channel.shared.streams != 0


def _next_message(channel: Channel) -> tuple[int, int]:
    """Return the word that will tell of a link's next message, and the value that it takes."""
    if _away(channel) and not _arrived(channel):
        return channel.get(at.C_BLOCKED_AT), channel.get(at.C_BLOCKED_FOR)
    return int(channel.words[_SENT]), channel.get(at.C_SEQ) + 1


def _arrived(channel: Channel) -> bool:
    if _away(channel):
        from nc10d.backend.cpu.native import net  # compiles what a single host does without

        net.peek(channel.address)
    sent = int(channel.words[_SENT])
    return bool(entry_points.load_word(sent) >= channel.get(at.C_SEQ) + 1)


def _head(channel: Channel) -> tuple[int, int, int]:
    sent = int(channel.words[_SENT])
    half = channel.get(at.C_ROUND) & 1
    first = sent + at.LINK_TAG + at.LINK_HEADER_BYTES * half
    tag, nbytes, dtype = (int(entry_points.load_word(first + 8 * i)) for i in range(3))
    return tag, nbytes, dtype
