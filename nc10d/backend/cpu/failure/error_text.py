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
from nc10d.backend.cpu.engine.call_sites import called, text_in
from nc10d.backend.cpu.engine.channel import Channel
from nc10d.backend.cpu.memory.group_memory import GroupMemory
from nc10d.backend.cpu.memory.host_peer import HostPeer, death, ended
from nc10d.backend.cpu.native import entry_points
from nc10d.backend.cpu.native import offsets as at
from nc10d.backend.cpu.transport.links import Links, sender_site
from nc10d.backend.cpu.transport.remote_group import RemoteGroup
from nc10d.base import error_wire
from nc10d.base.text import listing
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
        name: str,
        areas: GroupMemory,
        channel: Channel,
        links: Links,
        outside: RemoteGroup | None,
    ) -> None:
        self._name = name
        self._areas = areas
        self._channel = channel
        self._links = links
        self._outside = outside

    def number(self, blocked_on: int) -> int:
        """Return the rank that the engine means: a mate's number, or ~rank on another host."""
        return ~blocked_on if blocked_on < 0 else self._areas.numbers[blocked_on]

    def mine(self, ops: Sequence[Op], channel: Channel | None = None) -> tuple[str, int, str]:
        """Return what this rank is doing: operation, sequence number, both as text."""
        if ops and isinstance(ops[0], (Send, Recv)):
            name, seq = describe(ops), self._number_of(channel)
            return name, seq, f"{name} #{seq}"
        if not ops and channel is not None and channel.shared.kind != at.COLLECTIVE:
            name = "send" if channel.shared.kind == at.SENDER else "recv"
            seq = self._number_of(channel)
            return name, seq, f"{name} #{seq}"
        look = self._areas.last_record if ops else self._areas.latest
        seq, last = look(self._areas.rank)
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
        begun = self._areas.begun(self._areas.rank) if self._channel.busy() else 0
        waited = (time.monotonic_ns() - begun) / 1e9 if begun else None
        return {"waited": waited, "last": self.numbers()}

    def numbers(self) -> dict[int, int]:
        """Return the number of what each rank of this host began last, on any device."""
        areas = self._areas
        return {number: areas.latest(mate)[0] for mate, number in enumerate(areas.numbers)}

    def late(
        self, peer: int | None, ops: Sequence[Op], channel: Channel | None
    ) -> CollectiveTimeout:
        """An operation has not ended within its deadline."""
        name, seq, text = self.mine(ops, channel)
        whom = "" if peer is None else f" waiting for rank {peer}"
        message = (
            f"{text} of group {self._name!r} timed out on rank {self._areas.number}{whom}"
            f"{self._elsewhere()}{self.everyone()}"
        )
        known = self._known()
        return CollectiveTimeout(message, rank=peer, op=name, seq=seq, cause="no answer", **known)

    def _elsewhere(self) -> str:
        """Say in which other groups ranks of this host wait for this one."""
        told = []
        for group in self._areas.host.live_groups():
            areas = group.areas
            if areas is self._areas:
                continue
            mine, _ = areas.last_record(areas.rank)
            for mate, rank in enumerate(areas.numbers):
                seq, what = areas.last_record(mate)
                # It is in there still, unless it leads.
                if seq > mine:
                    told.append(
                        f"rank {rank} of group {group.group_name!r} has come to its #{seq} {what}, "
                        f"which this rank has not called"
                    )
        if not told:
            return ""
        return f"; meanwhile {listing(told)}: use groups in the same order on all ranks"

    def late_message(self, peer: int | None, channel: Channel) -> CollectiveTimeout:
        """A message has not passed within its deadline."""
        sending = channel.shared.kind == at.SENDER
        name, what = ("send", "to") if sending else ("recv", "from")
        seq = self._number_of(channel)
        message = (
            f"{name} #{seq} {what} rank {peer} in group {self._name!r} timed out on rank "
            f"{self._areas.number}{self.everyone()}"
        )
        known = self._known()
        return CollectiveTimeout(message, rank=peer, op=name, seq=seq, cause="no answer", **known)

    def left(self, peer: int, ops: Sequence[Op], channel: Channel | None) -> PeerLost:
        """A rank has closed the group, but is still waited for."""
        name, seq, text = self.mine(ops, channel)
        message = (
            f"rank {peer} has left group {self._name!r}, but rank {self._areas.number} still waits "
            f"for it in {text}{self.everyone()}"
        )
        cause = "it has left the group"
        return PeerLost(message, rank=peer, op=name, seq=seq, cause=cause, **self._known())

    def dead(self, rank: int, mate: HostPeer) -> PeerLost:
        """A mate (by its number on the host) has died."""
        last = self._last(rank)
        rank, cause = self._areas.numbers[rank], death(mate)
        message = (
            f"rank {rank} of group {self._name!r} is lost: {cause} "
            f"(pid {mate.pid} on {mate.host}); its last operation was {last}"
            f"{self.everyone()}"
        )
        name, mine, _ = self.mine(())
        fields = {"host": mate.host, "pid": mate.pid, "cause": cause, **self._known()}
        return PeerLost(message, rank=rank, op=name, seq=mine, **fields)

    def gone(self, rank: int, card: RankInfo, reason: str) -> PeerLost:
        """A rank of another host can't be reached any more."""
        name, seq, text = self.mine(())
        message = (
            f"rank {rank} of group {self._name!r} is lost: {reason} (pid {card.pid} on "
            f"{card.host}); rank {self._areas.number} was last in {text}{self.everyone()}"
        )
        fields = {"host": card.host, "pid": card.pid, "cause": reason, **self._known()}
        return PeerLost(message, rank=rank, op=name, seq=seq, **fields)

    def unreadable(self, peer: int) -> PeerLost:
        """A mate's memory can't be reached any more: nearly always because it has just died."""
        mate = self._areas.host.mates[self._areas.members[peer]]
        if ended(mate):
            return self.dead(peer, mate)
        name, seq, text = self.mine(())
        rank = self._areas.numbers[peer]
        message = (
            f"the memory of rank {rank} (pid {mate.pid} on {mate.host}) can't be reached any more "
            f"by rank {self._areas.number} in {text} of group {self._name!r}: its kernel refuses "
            "(has it changed its user, or a limit on ptrace? NC10D_CMA=0 does without)"
        )
        return PeerLost(message, rank=rank, host=mate.host, pid=mate.pid, op=name, seq=seq)

    def mismatch(self, channel: Channel) -> CollectiveMismatch:
        """A rank called something else than this one."""
        mate = channel.get(at.C_BLOCKED_ON)
        seq = channel.get(at.C_DISAGREED) or channel.get(at.C_OPS)
        mine = self._areas.record(self._areas.rank, seq)
        told = called(mine or "", self._areas.site(self._areas.rank, seq))
        peer = self.number(mate)
        if self._outside is not None and mate < 0:
            theirs = self._outside.streams.seen()
        else:
            last = seq if self._areas.record(mate, seq) else self._areas.last_record(mate)[0]
            theirs = called(self._areas.record(mate, last) or "", self._areas.site(mate, last))
        return CollectiveMismatch(
            f"ranks disagree on operation #{seq} of group {self._name!r}: "
            f"rank {self._areas.number} called {told}, rank {peer} called {theirs}",
            rank=peer,
            op=(mine or "").partition("(")[0],
            seq=seq,
        )

    def waits_in(self, channel: Channel) -> tuple[int, str]:
        """Return the number and the name of what waits in a channel of this group."""
        if channel.shared.kind == at.COLLECTIVE:
            seq, what = self._areas.last_record(self._areas.rank)
            return seq, what.partition("(")[0]
        return channel.get(at.C_OPS) + 1, "recv" if channel.shared.kind == at.RECEIVER else "send"

    def wrong_sizes(self, channel: Channel) -> CollectiveMismatch:
        """A rank sends other sizes than are awaited from it."""
        if channel.shared.kind == at.RECEIVER:
            return self._wrong_message(channel)
        me, seq = self._areas.number, channel.get(at.C_OPS)
        peer = self.number(channel.get(at.C_BLOCKED_ON))
        op = (self._areas.record(self._areas.rank, seq) or "").partition("(")[0]
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
            f"the message with tag {tag} from rank {peer} to rank {self._areas.number} has "
            f"{sent}, but the receive is for {wanted}",
            rank=peer,
            op="recv",
            seq=channel.get(at.C_OPS) + 1,
        )

    def _site_of(self, rank: int, seq: int) -> str:
        """Return where a rank made a call, "" if that is not known or it is on another host."""
        numbers = self._areas.numbers
        return self._areas.site(numbers.index(rank), seq) if rank in numbers else ""

    def everyone(self) -> str:
        """Return what each rank of this host began last, as the end of a message."""
        if self._areas.size > 16:
            return ""
        told = [f"rank {rank} {self._last(mate)}" for mate, rank in enumerate(self._areas.numbers)]
        return f"; last operations: {', '.join(told)}"

    def _last(self, rank: int) -> str:
        """Say what a rank of this host (by its number here) began last.

        Messages leave no record here that others could read, only counts; so they are told of a
        rank that has done nothing else.
        """
        seq, what = self._areas.latest(rank)
        if seq:
            return f"#{seq} {what}"
        ends = self._links.used(rank)
        more = f" and {len(ends) - _ENDS} more" if len(ends) > _ENDS else ""
        return f"a message ({', '.join(ends[:_ENDS])}{more})" if ends else what


def named(reason: BaseException) -> DistError:
    """Return the reason as an error of this group's own: the caller's object stays as it is."""
    own = error_wire.kind_of(reason)(error_wire.in_words(reason))
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
