"""A failed group's errors: the rank to blame, the call, and every rank's last operation.

The rank that detects a failure makes the error here. health.py distributes that error, so that all
ranks raise the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nc10d.arrays.call_info import beyond_text
from nc10d.arrays.dtypes import element_by_code
from nc10d.backend.cpu.bootstrap.rank_info import RankInfo
from nc10d.backend.cpu.context import Context
from nc10d.backend.cpu.control.group_control import GroupControl
from nc10d.backend.cpu.engine.call_sites import text_in
from nc10d.backend.cpu.engine.channel import Channel
from nc10d.backend.cpu.failure.awaited_peers import AwaitedPeers
from nc10d.backend.cpu.memory.group_memory import GroupMemory
from nc10d.backend.cpu.memory.host_peer import HostPeer, death, ended
from nc10d.backend.cpu.native import entry_points
from nc10d.backend.cpu.native import offsets as at
from nc10d.backend.cpu.transport.links import Links, sender_site
from nc10d.backend.cpu.transport.remote_group import RemoteGroup
from nc10d.base import error_wire
from nc10d.base.call_site import called
from nc10d.base.deadline import monotonic_ns
from nc10d.base.text import in_seconds, join_words
from nc10d.errors import CollectiveMismatch, CollectiveTimeout, DistError, PeerLost
from nc10d.ops import Op, Recv, Send
from nc10d.ops.facts import name_of

ENDING = "its program ends"
"""The reason when a rank leaves at its program's end. Soon the exit code tells more."""
_MOST_LINKS = 4
"""Most links that are named for a rank that has exchanged messages only."""


@dataclass(frozen=True, slots=True)
class GroupErrors:
    """Makes a group's errors on this rank, from the group's data there."""

    context: Context
    name: str
    memory: GroupMemory
    channel: Channel
    links: Links
    remote: RemoteGroup | None
    control: GroupControl
    peers: AwaitedPeers

    def own_operation(
        self, ops: Sequence[Op], channel: Channel | None = None
    ) -> tuple[str, int, str]:
        """Return name and number of this rank's operation, and both as text."""
        # The operation is `ops`, else `channel`'s message, else the latest one on record.
        if ops and isinstance(ops[0], (Send, Recv)):
            name, seq = describe(ops), self._message_number(channel)
        elif not ops and channel is not None and channel.spec.kind != at.COLLECTIVE:
            name, seq = _message_name(channel), self._message_number(channel)
        else:
            look = self.memory.last_record if ops else self.memory.latest
            seq, last = look(self.memory.rank)
            name = describe(ops) if ops else last.partition("(")[0]
        return name, seq, f"{name} #{seq}"

    def _message_number(self, channel: Channel | None) -> int:
        """Return the number of a link's next message; without a link, of the next received."""
        if channel is not None:
            return channel.get(at.C_OPS) + 1
        return 1 + sum(inbox.channel.get(at.C_OPS) for inbox in self.links.inboxes())

    def _common_fields(self) -> dict[str, Any]:
        """Return fields of timeouts and lost peers: `last` numbers by rank, `waited` in seconds."""
        # `waited` counts from the beginning of this rank's collective; None outside collectives.
        # There the time on record belongs to the last collective.
        begun = self.memory.begun(self.memory.rank) if self.channel.busy() else 0
        waited = (monotonic_ns() - begun) / 1e9 if begun else None
        return {"waited": waited, "last": self.last_numbers()}

    def last_numbers(self) -> dict[int, int]:
        """Return the number of the last operation that each local rank began, by rank."""
        memory = self.memory
        return {number: memory.latest(peer)[0] for peer, number in enumerate(memory.group_ranks)}

    def timeout(
        self, peer: int | None, ops: Sequence[Op], channel: Channel | None, limit: float
    ) -> CollectiveTimeout:
        """Return the error for an operation that has not ended within the timeout `limit`."""
        name, seq, text = self.own_operation(ops, channel)
        call, elsewhere = f"{text} of group {self.name!r}", self._awaited_elsewhere()
        return self._timeout(call, channel, limit, elsewhere, (peer, name, seq))

    def message_timeout(
        self, peer: int | None, channel: Channel, limit: float
    ) -> CollectiveTimeout:
        """Return the error for a message that has not passed within the timeout `limit`."""
        name, seq = _message_name(channel), self._message_number(channel)
        link = f"{'to' if name == 'send' else 'from'} rank {peer} in group {self.name!r}"
        return self._timeout(f"{name} #{seq} {link}", channel, limit, "", (peer, name, seq))

    def _timeout(
        self,
        call: str,
        channel: Channel | None,
        limit: float,
        end: str,
        place: tuple[int | None, str, int],
    ) -> CollectiveTimeout:
        peer, name, seq = place
        if channel is not None and channel.spec.kind != at.COLLECTIVE:
            waiting = channel.oldest()
            words, field = (
                (channel.words, at.C_SITE) if waiting is None else (waiting.words, at.D_SITE)
            )
            site = text_in(int(words[field // 8]))
        else:
            site = self.memory.site(self.memory.rank, seq)
        fields = self._common_fields()
        waited = fields["waited"] if math.isinf(limit) else limit
        after = "" if waited is None else f" after {in_seconds(waited)}"
        whom = "" if peer is None else f", waiting for rank {peer}"
        advice = "a rank that is slow needs a longer timeout; NC10D_DUMP_SIGNAL shows where it is"
        message = (
            f"{called(call, site)} timed out on rank {self.memory.group_rank}{after}{whom}{end}; "
            f"{advice}{self.last_operations()}"
        )
        return CollectiveTimeout(message, rank=peer, op=name, seq=seq, cause="no answer", **fields)

    def _awaited_elsewhere(self) -> str:
        """Return, as text, the other groups in which ranks on this host wait for this rank."""
        waits = []
        for group in self.context.live_groups.all():
            memory = group.memory
            if memory is self.memory:
                continue
            mine, _ = memory.last_record(memory.rank)
            for peer, rank in enumerate(memory.group_ranks):
                seq, what = memory.last_record(peer)
                # A peer is ahead there: a sign that the ranks use groups in different orders.
                if seq > mine:
                    waits.append(
                        f"rank {rank} of group {group.name!r} has come to its #{seq} {what}, "
                        f"which this rank has not called"
                    )
        if not waits:
            return ""
        return f"; meanwhile {join_words(waits)}: use groups in the same order on all ranks"

    def peer_left(
        self, peer: int, ops: Sequence[Op], channel: Channel | None, within: str = ""
    ) -> PeerLost:
        """Return the error for a rank that has closed the group while this rank waits for it."""
        name, seq, text = self.own_operation(ops, channel)
        text = within or text
        why = self._why_left(peer)
        message = (
            f"rank {peer} has left group {self.name!r}{f' ({why})' if why else ''}, but rank "
            f"{self.memory.group_rank} still waits for it in {text}{self.last_operations()}"
        )
        cause = why or "it has left the group"
        return PeerLost(message, rank=peer, op=name, seq=seq, cause=cause, **self._common_fields())

    def _why_left(self, peer: int) -> str:
        """Return the error with which a rank has left, or how the process has ended; "" if unknown.

        Blocks for a moment for a rank whose program ends.
        """
        memory = self.memory
        if peer not in memory.group_ranks:
            return self.control.left.get(peer, "")
        index = memory.group_ranks.index(peer)
        process = memory.peers[index]
        said = memory.read_cause(index)
        why = str(error_wire.decode_error(said)) if said else ""
        return death(process) if why == ENDING and ended(process) else why

    def died(self, rank: int, peer: HostPeer) -> PeerLost:
        """Return the error for a local peer (`rank` is its index here) that has died."""
        name, seq, _ = self.own_operation(())
        end = f"its last operation: {self._last(rank)}"
        return self._lost(self.memory.group_ranks[rank], peer, death(peer), end, name, seq)

    def unreachable(
        self, rank: int, info: RankInfo, reason: str, channel: Channel | None = None
    ) -> PeerLost:
        """Return the error for a rank on another host whose connection has ended."""
        name, seq, text = self.own_operation((), channel)
        end = f"rank {self.memory.group_rank} was last in {text}"
        return self._lost(rank, info, reason, end, name, seq)

    def _lost(
        self, rank: int, peer: HostPeer | RankInfo, cause: str, end: str, name: str, seq: int
    ) -> PeerLost:
        message = (
            f"rank {rank} of group {self.name!r} is lost: {cause} (pid {peer.pid} on {peer.host}); "
            f"{end}{self.last_operations()}"
        )
        fields = {"host": peer.host, "pid": peer.pid, "cause": cause, **self._common_fields()}
        return PeerLost(message, rank=rank, op=name, seq=seq, **fields)

    def memory_unreadable(self, channel: Channel) -> PeerLost:
        """Return the error for a peer whose memory the kernel no longer lets this rank access."""
        # Nearly always the peer has just died. A link counts its two ends, not the group's ranks.
        rank = self.links.peer_of(channel)
        if rank is None:
            rank = self.peers.rank_of(channel.get(at.C_BLOCKED_ON))
        peer = self.memory.group_ranks.index(rank)
        process = self.memory.peers[peer]
        # The pidfd shows a death before the control thread has processed it.
        if ended(process):
            return self.died(peer, process)
        name, seq, text = self.own_operation((), channel)
        message = (
            f"the memory of rank {rank} (pid {process.pid} on {process.host}) can't be reached "
            f"any more by rank {self.memory.group_rank} in {text} of group {self.name!r}: its "
            "kernel refuses (has it unmapped the array, changed its user, or a limit on ptrace? "
            "NC10D_CMA=0 does without the kernel)"
        )
        return PeerLost(message, rank=rank, host=process.host, pid=process.pid, op=name, seq=seq)

    def mismatch(self, channel: Channel) -> CollectiveMismatch:
        """Return the error for a rank that has called another operation than this rank."""
        index = channel.get(at.C_BLOCKED_ON)
        seq = channel.get(at.C_OPS)
        memory = self.memory
        mine = memory.record(memory.rank, seq)
        ours = called(mine or "", memory.site(memory.rank, seq))
        peer = self.peers.rank_of(index)
        if self.remote is not None and index < 0:
            # A remote rank's record comes over the connection; peers' records are in group memory.
            theirs = self.remote.streams.remote_call()
        else:
            last = seq if memory.record(index, seq) else memory.last_record(index)[0]
            theirs = called(memory.record(index, last) or "", memory.site(index, last))
        return CollectiveMismatch(
            f"ranks disagree on operation #{seq} of group {self.name!r}: "
            f"rank {self.memory.group_rank} called {ours}, rank {peer} called "
            f"{theirs}{beyond_text(mine or '', theirs.partition(' at ')[0])}",
            rank=peer,
            op=(mine or "").partition("(")[0],
            seq=seq,
        )

    def waiting_call(self, channel: Channel) -> tuple[int, str]:
        """Return number and name of the call that waits in a channel."""
        if channel.spec.kind == at.COLLECTIVE:
            seq, what = self.memory.last_record(self.memory.rank)
            return seq, what.partition("(")[0]
        return channel.get(at.C_OPS) + 1, _message_name(channel)

    def size_mismatch(self, channel: Channel) -> CollectiveMismatch:
        """Return the error for a rank that sends other sizes than the peer awaits."""
        if channel.spec.kind == at.RECEIVER:
            return self._message_mismatch(channel)
        seq = channel.get(at.C_OPS)
        sender, receiver = (
            self.peers.rank_of(channel.get(word)) for word in (at.C_BLOCKED_ON, at.C_AWAITED_BY)
        )
        op = (self.memory.record(self.memory.rank, seq) or "").partition("(")[0]
        sends = called(f"sends {channel.get(at.C_MESSAGE_BYTES)} bytes", self._site_of(sender, seq))
        awaits = called(f"awaits {channel.get(at.C_AWAITED)}", self._site_of(receiver, seq))
        return CollectiveMismatch(
            f"ranks disagree on sizes in {op} #{seq} of group {self.name!r}: "
            f"rank {sender} {sends} to rank {receiver}, which {awaits}",
            rank=sender,
            op=op,
            seq=seq,
        )

    def _message_mismatch(self, channel: Channel) -> CollectiveMismatch:
        first = at.C_MESSAGE_TAG // 8
        tag, nbytes, dtype = (int(word) for word in channel.words[first : first + 3])
        peer = self.links.peer_of(channel)
        # Matching has put the receive that the message is for at the ring's head.
        receive = channel.first_descriptor()
        fields = (at.D_BYTES, at.D_DTYPE, at.D_SITE)
        awaited, kind, site = (entry_points.load_word(receive + field) for field in fields)
        sent = called(f"{nbytes} bytes of {_label(dtype)}", sender_site(channel))
        wanted = called(f"{awaited} bytes of {_label(kind)}", text_in(site))
        return CollectiveMismatch(
            f"the message with tag {tag} from rank {peer} to rank {self.memory.group_rank} has "
            f"{sent}, but the receive is for {wanted}",
            rank=peer,
            op="recv",
            seq=channel.get(at.C_OPS) + 1,
        )

    def _site_of(self, rank: int, seq: int) -> str:
        """Return the source line of a rank's call; "" if unknown or on another host."""
        numbers = self.memory.group_ranks
        return self.memory.site(numbers.index(rank), seq) if rank in numbers else ""

    def last_operations(self) -> str:
        """Return each local rank's last operation, as the end of a message."""
        # A longer list would hide the reason, and be cut where the shared cause is (CAUSE_BYTES).
        if self.memory.size > 16:
            return ""
        ranks = enumerate(self.memory.group_ranks)
        last = [f"rank {rank} {self._last(peer)}" for peer, rank in ranks]
        return f"; last operations: {', '.join(last)}"

    def _last(self, rank: int) -> str:
        """Return the last operation that a local rank (by index) began."""
        # Messages leave no record that peers can read, only a count for each link. So links are
        # named only for a rank that has run no other operation.
        seq, what = self.memory.latest(rank)
        if seq:
            return f"#{seq} {what}"
        ends = self.links.used(rank)
        more = f" and {len(ends) - _MOST_LINKS} more" if len(ends) > _MOST_LINKS else ""
        return f"a message ({', '.join(ends[:_MOST_LINKS])}{more})" if ends else what


def as_dist_error(reason: BaseException) -> DistError:
    """Return a copy of `reason` as a DistError; the caller's object stays unchanged."""
    # Other ranks must be able to decode the error: a caller's own type becomes one of nc10d's.
    own = error_wire.wire_type(reason)(error_wire.message_of(reason))
    if isinstance(reason, DistError):
        own.__dict__.update(reason.__dict__)
    return own


def _message_name(channel: Channel) -> str:
    return "send" if channel.spec.kind == at.SENDER else "recv"


def _label(code: int) -> str:
    found = element_by_code(code)
    return "bytes" if found is None else found.label


def message_in_words(peer: int | None, tag: int, nbytes: int, code: int, *, sending: bool) -> str:
    """Return the text for the send or recv that has passed a message."""
    found = element_by_code(code)
    count = nbytes if found is None else nbytes // found.itemsize
    name, whom = ("send", "dst") if sending else ("recv", "src")
    return f"{name}(dtype={_label(code)}, count={count}, {whom}={peer}, tag={tag})"


def describe(ops: Sequence[Op]) -> str:
    """Return the text for operations in an error."""
    if len(ops) != 1:
        return f"a batch of {len(ops)} operations" if ops else "an operation"
    op = ops[0]
    if isinstance(op, Send):
        return f"send(dst={op.peer}, tag={op.tag})"
    if isinstance(op, Recv):
        return f"recv(src={'any' if op.peer is None else op.peer}, tag={op.tag})"
    return name_of(op)
