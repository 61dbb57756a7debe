"""Why a group has failed, in words: who, where, in which call, and what each rank did last.

Whoever notices a failure makes its error here; how all ranks come to raise the same one is up to
health.py.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from nc10d.arrays.dtypes import DType
from nc10d.backend.cpu.bootstrap.rank_info import RankInfo
from nc10d.backend.cpu.context import Context
from nc10d.backend.cpu.engine.call_sites import called, text_in
from nc10d.backend.cpu.engine.channel import Channel
from nc10d.backend.cpu.memory.group_memory import GroupMemory
from nc10d.backend.cpu.memory.host_peer import HostPeer, death, ended
from nc10d.backend.cpu.native import entry_points
from nc10d.backend.cpu.native import offsets as at
from nc10d.backend.cpu.transport.links import Links, sender_site
from nc10d.backend.cpu.transport.remote_group import RemoteGroup
from nc10d.base import error_wire
from nc10d.base.text import join_words
from nc10d.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    DistError,
    PeerLost,
)
from nc10d.ops import OP_NAMES, Op, Recv, Send

_DTYPES = {dtype.code: dtype for dtype in DType}
_ENDS = 4
"""Of how many links a rank is told that has exchanged nothing but messages."""


class ErrorText:
    """The errors of one group, as one of its ranks tells them."""

    def __init__(
        self,
        context: Context,
        name: str,
        memory: GroupMemory,
        channel: Channel,
        links: Links,
        remote: RemoteGroup | None,
    ) -> None:
        self._context = context
        self._name = name
        self._memory = memory
        self._channel = channel
        self._links = links
        self._remote = remote

    def number(self, blocked_on: int) -> int:
        """Return the rank that the engine means: a peer's number, or ~rank on another host."""
        return ~blocked_on if blocked_on < 0 else self._memory.numbers[blocked_on]

    def mine(self, ops: Sequence[Op], channel: Channel | None = None) -> tuple[str, int, str]:
        """Return what this rank is doing: operation, sequence number, both as text."""
        if ops and isinstance(ops[0], (Send, Recv)):
            name, seq = describe(ops), self._number_of(channel)
            return name, seq, f"{name} #{seq}"
        if not ops and channel is not None and channel.shared.kind != at.COLLECTIVE:
            name = "send" if channel.shared.kind == at.SENDER else "recv"
            seq = self._number_of(channel)
            return name, seq, f"{name} #{seq}"
        look = self._memory.last_record if ops else self._memory.latest
        seq, last = look(self._memory.rank)
        name = describe(ops) if ops else last.partition("(")[0]
        return name, seq, f"{name} #{seq}"

    def _number_of(self, channel: Channel | None) -> int:
        """Return the number of the message that is next on a link, or of all that I receive."""
        if channel is not None:
            return channel.get(at.C_OPS) + 1
        return 1 + sum(inbox.channel.get(at.C_OPS) for inbox in self._links.inboxes())

    def _known(self) -> dict[str, Any]:
        """Return what every failure tells: how far each rank is, and how long this one has waited.

        That is since it began the collective that it is in; None if it is in none.
        """
        begun = self._memory.begun(self._memory.rank) if self._channel.busy() else 0
        waited = (time.monotonic_ns() - begun) / 1e9 if begun else None
        return {"waited": waited, "last": self.numbers()}

    def numbers(self) -> dict[int, int]:
        """Return the number of what each rank of this host began last, on any device."""
        memory = self._memory
        return {number: memory.latest(peer)[0] for peer, number in enumerate(memory.numbers)}

    def late(
        self, peer: int | None, ops: Sequence[Op], channel: Channel | None
    ) -> CollectiveTimeout:
        """An operation has not ended within its deadline."""
        name, seq, text = self.mine(ops, channel)
        whom = "" if peer is None else f" waiting for rank {peer}"
        message = (
            f"{text} of group {self._name!r} timed out on rank {self._memory.number}{whom}"
            f"{self._elsewhere()}{self.everyone()}"
        )
        known = self._known()
        return CollectiveTimeout(message, rank=peer, op=name, seq=seq, cause="no answer", **known)

    def _elsewhere(self) -> str:
        """Say in which other groups ranks of this host wait for this one."""
        waits = []
        for name, memory in list(self._context.memories.items()):
            if memory is self._memory:
                continue
            mine, _ = memory.last_record(memory.rank)
            for peer, rank in enumerate(memory.numbers):
                seq, what = memory.last_record(peer)
                if seq > mine:
                    waits.append(
                        f"rank {rank} of group {name!r} has come to its #{seq} {what}, "
                        f"which this rank has not called"
                    )
        if not waits:
            return ""
        return f"; meanwhile {join_words(waits)}: use groups in the same order on all ranks"

    def late_message(self, peer: int | None, channel: Channel) -> CollectiveTimeout:
        """A message has not passed within its deadline."""
        sending = channel.shared.kind == at.SENDER
        name, what = ("send", "to") if sending else ("recv", "from")
        seq = self._number_of(channel)
        message = (
            f"{name} #{seq} {what} rank {peer} in group {self._name!r} timed out on rank "
            f"{self._memory.number}{self.everyone()}"
        )
        known = self._known()
        return CollectiveTimeout(message, rank=peer, op=name, seq=seq, cause="no answer", **known)

    def left(self, peer: int, ops: Sequence[Op], channel: Channel | None) -> PeerLost:
        """A rank has closed the group, but is still waited for."""
        name, seq, text = self.mine(ops, channel)
        message = (
            f"rank {peer} has left group {self._name!r}, but rank {self._memory.number} still "
            f"waits for it in {text}{self.everyone()}"
        )
        cause = "it has left the group"
        return PeerLost(message, rank=peer, op=name, seq=seq, cause=cause, **self._known())

    def dead(self, rank: int, peer: HostPeer) -> PeerLost:
        """A peer (by its number on the host) has died."""
        last = self._last(rank)
        rank, cause = self._memory.numbers[rank], death(peer)
        message = (
            f"rank {rank} of group {self._name!r} is lost: {cause} "
            f"(pid {peer.pid} on {peer.host}); its last operation was {last}"
            f"{self.everyone()}"
        )
        name, mine, _ = self.mine(())
        fields = {"host": peer.host, "pid": peer.pid, "cause": cause, **self._known()}
        return PeerLost(message, rank=rank, op=name, seq=mine, **fields)

    def gone(self, rank: int, card: RankInfo, reason: str) -> PeerLost:
        """A rank of another host can't be reached any more."""
        name, seq, text = self.mine(())
        message = (
            f"rank {rank} of group {self._name!r} is lost: {reason} (pid {card.pid} on "
            f"{card.host}); rank {self._memory.number} was last in {text}{self.everyone()}"
        )
        fields = {"host": card.host, "pid": card.pid, "cause": reason, **self._known()}
        return PeerLost(message, rank=rank, op=name, seq=seq, **fields)

    def unreadable(self, peer: int) -> PeerLost:
        """A peer's memory can't be reached any more: nearly always because it has just died."""
        process = self._memory.peers[peer]
        if ended(process):
            return self.dead(peer, process)
        name, seq, text = self.mine(())
        rank = self._memory.numbers[peer]
        message = (
            f"the memory of rank {rank} (pid {process.pid} on {process.host}) can't be reached "
            f"any more by rank {self._memory.number} in {text} of group {self._name!r}: its "
            "kernel refuses "
            "(has it changed its user, or a limit on ptrace? NC10D_CMA=0 does without)"
        )
        return PeerLost(message, rank=rank, host=process.host, pid=process.pid, op=name, seq=seq)

    def mismatch(self, channel: Channel) -> CollectiveMismatch:
        """A rank called something else than this one."""
        index = channel.get(at.C_BLOCKED_ON)
        seq = channel.get(at.C_OPS)
        memory = self._memory
        mine = memory.record(memory.rank, seq)
        ours = called(mine or "", memory.site(memory.rank, seq))
        peer = self.number(index)
        if self._remote is not None and index < 0:
            theirs = self._remote.streams.seen()
        else:
            last = seq if memory.record(index, seq) else memory.last_record(index)[0]
            theirs = called(memory.record(index, last) or "", memory.site(index, last))
        return CollectiveMismatch(
            f"ranks disagree on operation #{seq} of group {self._name!r}: "
            f"rank {self._memory.number} called {ours}, rank {peer} called {theirs}",
            rank=peer,
            op=(mine or "").partition("(")[0],
            seq=seq,
        )

    def waits_in(self, channel: Channel) -> tuple[int, str]:
        """Return the number and the name of what waits in a channel of this group."""
        if channel.shared.kind == at.COLLECTIVE:
            seq, what = self._memory.last_record(self._memory.rank)
            return seq, what.partition("(")[0]
        return channel.get(at.C_OPS) + 1, "recv" if channel.shared.kind == at.RECEIVER else "send"

    def wrong_sizes(self, channel: Channel) -> CollectiveMismatch:
        """A rank sends other sizes than are awaited from it."""
        if channel.shared.kind == at.RECEIVER:
            return self._wrong_message(channel)
        me, seq = self._memory.number, channel.get(at.C_OPS)
        peer = self.number(channel.get(at.C_BLOCKED_ON))
        op = (self._memory.record(self._memory.rank, seq) or "").partition("(")[0]
        sends = called(f"sends {channel.get(at.C_MESSAGE_BYTES)} bytes", self._site_of(peer, seq))
        awaits = called(f"awaits {channel.get(at.C_AWAITED)}", self._site_of(me, seq))
        return CollectiveMismatch(
            f"ranks disagree on sizes in {op} #{seq} of group {self._name!r}: "
            f"rank {peer} {sends} to rank {me}, which {awaits}",
            rank=peer,
            op=op,
            seq=seq,
        )

    def _wrong_message(self, channel: Channel) -> CollectiveMismatch:
        first = at.C_MESSAGE_TAG // 8
        tag, nbytes, dtype = (int(word) for word in channel.words[first : first + 3])
        peer = self._links.peer_of(channel)
        # Matching has put the receive that the message is for at the ring's head.
        receive = channel.first_descriptor()
        awaited, kind = (
            entry_points.load_word(receive + at.D_BYTES),
            entry_points.load_word(receive + at.D_DTYPE),
        )
        sent = called(f"{nbytes} bytes of {_label(dtype)}", sender_site(channel))
        wanted = called(
            f"{awaited} bytes of {_label(kind)}",
            text_in(entry_points.load_word(receive + at.D_SITE)),
        )
        return CollectiveMismatch(
            f"the message with tag {tag} from rank {peer} to rank {self._memory.number} has "
            f"{sent}, but the receive is for {wanted}",
            rank=peer,
            op="recv",
            seq=channel.get(at.C_OPS) + 1,
        )

    def _site_of(self, rank: int, seq: int) -> str:
        """Return where a rank made a call, "" if that is not known or it is on another host."""
        numbers = self._memory.numbers
        return self._memory.site(numbers.index(rank), seq) if rank in numbers else ""

    def everyone(self) -> str:
        """Return what each rank of this host began last, as the end of a message."""
        if self._memory.size > 16:
            return ""
        told = [f"rank {rank} {self._last(peer)}" for peer, rank in enumerate(self._memory.numbers)]
        return f"; last operations: {', '.join(told)}"

    def _last(self, rank: int) -> str:
        """Say what a rank of this host (by its number here) began last.

        Messages leave no record here that others could read, only counts; so they are told of a
        rank that has done nothing else.
        """
        seq, what = self._memory.latest(rank)
        if seq:
            return f"#{seq} {what}"
        ends = self._links.used(rank)
        more = f" and {len(ends) - _ENDS} more" if len(ends) > _ENDS else ""
        return f"a message ({', '.join(ends[:_ENDS])}{more})" if ends else what


def named(reason: BaseException) -> DistError:
    """Return the reason as an error of this group's own: the caller's object stays as it is."""
    own = error_wire.wire_type(reason)(error_wire.message_of(reason))
    if isinstance(reason, DistError):
        own.__dict__.update(reason.__dict__)
    return own


def _label(code: int) -> str:
    return _DTYPES[code].label if code in _DTYPES else "bytes"


def message_in_words(peer: int | None, tag: int, nbytes: int, code: int, *, sending: bool) -> str:
    """Return a message that has passed as the call that sent or received it."""
    count = nbytes // _DTYPES[code].itemsize if code in _DTYPES else nbytes
    name, whom = ("send", "dst") if sending else ("recv", "src")
    return f"{name}(dtype={_label(code)}, count={count}, {whom}={peer}, tag={tag})"


def describe(ops: Sequence[Op]) -> str:
    """Name operations as an error does."""
    if len(ops) != 1:
        return f"a batch of {len(ops)} operations" if ops else "an operation"
    op = ops[0]
    if isinstance(op, Send):
        return f"send(dst={op.peer}, tag={op.tag})"
    if isinstance(op, Recv):
        return f"recv(src={'any' if op.peer is None else op.peer}, tag={op.tag})"
    return OP_NAMES[type(op)]
