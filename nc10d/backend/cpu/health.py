"""Whether a group still works and, if not, why: one answer for all of its ranks.

Whoever learns a cause publishes it (causes.py); everybody else finds it between two slices of a
wait. Before a failure is handed out, the group's channels are stopped, so that nothing touches
users' arrays any more. A thread that holds a channel's lock must give it up before it asks.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

from nc10d.backend.cpu import causes
from nc10d.backend.cpu.area import Areas
from nc10d.backend.cpu.channel import Channel
from nc10d.backend.cpu.links import Links
from nc10d.backend.cpu.mates import Card, Mate
from nc10d.backend.cpu.native import engine
from nc10d.backend.cpu.native import layout as at
from nc10d.backend.cpu.outside import Outside
from nc10d.deadline import Deadline
from nc10d.dtypes import DType
from nc10d.errors import (
    Aborted,
    CollectiveMismatch,
    CollectiveTimeout,
    DistError,
    ForkedGroupError,
    GroupClosed,
    PeerLost,
)
from nc10d.ops import OP_NAMES, Op, Recv, Send
from nc10d.outcome import fresh

# How long a broken link waits for the word of a control line, which knows more.
LAST_WORD = 1.0
_LABELS = {dtype.code: dtype.label for dtype in DType}


class Health:
    """The state of one group on this rank: working, failed or closed."""

    def __init__(
        self,
        name: str,
        areas: Areas,
        channel: Channel,
        links: Links,
        outside: Outside | None = None,
    ) -> None:
        self._name = name
        self._areas = areas
        self._outside = outside
        self._channel = channel
        self._links = links
        self._failure: DistError | None = None
        self._lock = threading.RLock()
        self.closed = False

    # -- asking ----------------------------------------------------------------------------

    def failure(self) -> DistError | None:
        """Return why the group has failed, or None; blocks until its channels are stopped."""
        if self._failure is None:
            found = causes.read(self._areas)
            if found is None:
                return None
            with self._lock:
                if self._failure is None:
                    self._stop()
                    self._failure = found
            self._areas.host.poke_notifier()
        return self._failure

    def check(self) -> None:
        """Raise the group's failure, if there is one."""
        failure = self.failure()
        if failure is not None:
            raise fresh(failure) from None  # it was never raised here: once is enough

    def trouble(self, channel: Channel, deadline: Deadline) -> bool:
        """Say whether there is a reason to stop waiting; changes nothing."""
        if self._failure is not None or causes.read(self._areas) is not None:
            return True
        return self._deserter(channel) is not None or deadline.expired()

    def settled(self, ops: Sequence[Op], channel: Channel, deadline: Deadline) -> DistError | None:
        """Like `look`, for a thread whose channel was stopped: waits for who is saying why."""
        with self._lock:
            return self.look(ops, channel, deadline)

    def look(self, ops: Sequence[Op], channel: Channel, deadline: Deadline) -> DistError | None:
        """Return the failure; a peer that has left, or the operation's deadline, makes one."""
        failure = self.failure()
        if failure is not None:
            return failure
        deserter = self._deserter(channel)
        if deserter is not None:
            return self._fail(self._left(deserter, ops, channel))
        return self.fail_timeout(ops, channel) if deadline.expired() else None

    def _deserter(self, channel: Channel) -> int | None:
        """Return the rank that a channel waits for, if it has left without doing its part."""
        peer = self._blocked_on(channel)
        if peer is None or not self.has_left(peer):
            return None
        if self._away(peer):
            return None  # what it has sent before may be on its way: the link's end will tell
        arrived = engine.load_word(channel.get(at.C_BLOCKED_AT))
        return peer if arrived < channel.get(at.C_BLOCKED_FOR) else None

    def has_left(self, rank: int) -> bool:
        """Say whether a rank has closed the group."""
        if self._away(rank):
            assert self._outside is not None
            return rank in self._outside.council.left
        return self._areas.state(self._areas.numbers.index(rank)) == at.CLOSED

    def _away(self, rank: int) -> bool:
        return self._outside is not None and self._outside.has(rank)

    def _blocked_on(self, channel: Channel) -> int | None:
        if channel.get(at.C_BLOCKED_AT) == 0:
            return None
        if channel.shared.kind == at.COLLECTIVE:
            peer = self._number(channel.get(at.C_BLOCKED_ON))
            return None if peer == self._areas.number else peer  # a gate of my own
        return self._links.peer_of(channel)

    def _number(self, blocked_on: int) -> int:
        """Return the rank that the engine means: a mate's number, or ~rank on another host."""
        return ~blocked_on if blocked_on < 0 else self._areas.numbers[blocked_on]

    # -- failing ---------------------------------------------------------------------------

    def abort(self, reason: BaseException) -> None:
        """Fail the group with `reason` on every rank; the first reason wins."""
        error = _named(reason)
        error.group = error.group or self._name
        op, seq, _ = self._mine(())
        error.op = error.op or op
        error.seq = seq if error.seq is None else error.seq
        if self._outside is not None:
            # Not under the lock: the answer comes through a thread that may want it.
            self._outside.council.report(error, wait=not self._areas.host.in_control())
            self.failure()
            return
        # Once the group is closed, its memory may be another's.
        with self._lock:
            if self.closed:
                return
            causes.publish(self._areas, error)
            self._areas.host.ring(self._areas.bits())
        self.failure()

    def close(self) -> bool:
        """End the group on this rank; False if that has happened before."""
        with self._lock:
            if self.closed:
                return False
            self.closed = True
            # First of all: nobody may read arrays that their owners are about to get back.
            self._areas.show_closed()
            if self._outside is not None:
                self._outside.council.close()
            if self._failure is None:
                self._stop()
                message = f"group {self._name!r} has been closed on rank {self._areas.number}"
                self._failure = GroupClosed(message, group=self._name)
        return True

    def engine_failed(self, channel: Channel, answer: int) -> None:
        """Turn a negative answer of the engine into the group's failure."""
        if answer == at.LATE:
            self.fail_timeout((), channel)
        elif answer == at.MISMATCH:
            self.abort(self._mismatch(channel))
        elif answer == at.SIZES:
            self.abort(self._wrong_sizes(channel))
        elif answer == at.LOST:
            self._link_failed(channel)
        elif answer == at.UNREADABLE:
            self.abort(self._unreadable(channel.get(at.C_BLOCKED_ON)))
        else:
            self.failure()

    def fail_timeout(self, ops: Sequence[Op], channel: Channel | None) -> DistError:
        """An operation's own deadline has passed: that fails the group."""
        peer = None if channel is None else self._blocked_on(channel)
        if not ops and channel is not None and channel.shared.kind != at.COLLECTIVE:
            return self._fail(self._late_message(peer, channel))
        return self._fail(self._late(peer, ops, channel))

    def on_death(self, mate: Mate) -> None:
        """The kernel says that a rank of the host is gone."""
        if mate.rank not in self._areas.members or self.closed:
            return
        rank = self._areas.members.index(mate.rank)
        if self._areas.state(rank) != at.CLOSED:
            self.abort(self._dead(rank, mate))

    def on_lost(self, rank: int, card: Card, reason: str) -> None:
        """A rank of another host can't be reached any more."""
        assert self._outside is not None
        self._outside.council.notify()
        if not self.closed and not self.has_left(rank):
            self.abort(self._gone(rank, card, reason))

    def _link_failed(self, channel: Channel) -> None:
        """A link has ended under a program: say what has become of the rank behind it."""
        assert self._outside is not None
        rank = self._number(channel.get(at.C_BLOCKED_ON))
        council = self._outside.council
        council.await_word(rank, LAST_WORD)
        if self.failure() is not None:
            return
        if self.has_left(rank):
            self.abort(self._left(rank, (), channel))
            return
        card = self._areas.host.cards[council.members[rank]]
        self.abort(self._gone(rank, card, council.lost(rank) or self._outside.error(channel)))

    def _fail(self, error: DistError) -> DistError:
        self.abort(error)
        with self._lock:  # whoever is closing the group has said so by then
            failure = self.failure()
        assert failure is not None
        return failure

    def _stop(self) -> None:
        self._channel.stop()
        self._links.stop()

    def disown(self) -> None:
        """Be over in a forked child."""
        self._lock = threading.RLock()
        self.closed = True
        self._failure = ForkedGroupError(
            f"group {self._name!r} belongs to the process that forked this one",
            group=self._name,
            rank=self._areas.number,
            pid=os.getpid(),
        )

    # -- saying why ------------------------------------------------------------------------

    def _mine(self, ops: Sequence[Op], channel: Channel | None = None) -> tuple[str, int, str]:
        """Return what this rank is doing: operation, sequence number, both as text."""
        if ops and isinstance(ops[0], (Send, Recv)):
            name, seq = describe(ops), self._number_of(channel)
            return name, seq, f"{name} #{seq}"
        seq, last = self._areas.last_record(self._areas.rank)
        name = describe(ops) if ops else last.partition("(")[0]
        return name, seq, f"{name} #{seq}"

    def _number_of(self, channel: Channel | None) -> int:
        """Return the number of the message that is next on a link, or of all that I receive."""
        if channel is not None:
            return channel.get(at.C_OPS) + 1
        return 1 + sum(inbox.channel.get(at.C_OPS) for inbox in self._links.inboxes())

    def _late(
        self, peer: int | None, ops: Sequence[Op], channel: Channel | None
    ) -> CollectiveTimeout:
        name, seq, text = self._mine(ops, channel)
        whom = "" if peer is None else f" waiting for rank {peer}"
        message = (
            f"{text} of group {self._name!r} timed out on rank {self._areas.number}{whom}"
            f"{self._everyone()}"
        )
        return CollectiveTimeout(message, rank=peer, op=name, seq=seq)

    def _late_message(self, peer: int | None, channel: Channel) -> CollectiveTimeout:
        sending = channel.shared.kind == at.SENDER
        name, what = ("send", "to") if sending else ("recv", "from")
        seq = self._number_of(channel)
        message = (
            f"{name} #{seq} {what} rank {peer} in group {self._name!r} timed out on rank "
            f"{self._areas.number}{self._everyone()}"
        )
        return CollectiveTimeout(message, rank=peer, op=name, seq=seq)

    def _left(self, peer: int, ops: Sequence[Op], channel: Channel) -> PeerLost:
        name, seq, text = self._mine(ops, channel)
        message = (
            f"rank {peer} has left group {self._name!r}, but rank {self._areas.number} still waits "
            f"for it in {text}{self._everyone()}"
        )
        return PeerLost(message, rank=peer, op=name, seq=seq)

    def _dead(self, rank: int, mate: Mate) -> PeerLost:
        seq, what = self._areas.last_record(rank)
        rank = self._areas.numbers[rank]
        message = (
            f"rank {rank} of group {self._name!r} is lost: {causes.death(mate)} "
            f"(pid {mate.pid} on {mate.host}); its last operation was #{seq} {what}"
            f"{self._everyone()}"
        )
        name, mine, _ = self._mine(())
        return PeerLost(message, rank=rank, host=mate.host, pid=mate.pid, op=name, seq=mine)

    def _gone(self, rank: int, card: Card, reason: str) -> PeerLost:
        name, seq, text = self._mine(())
        message = (
            f"rank {rank} of group {self._name!r} is lost: {reason} (pid {card.pid} on "
            f"{card.host}); rank {self._areas.number} was last in {text}"
        )
        return PeerLost(message, rank=rank, host=card.host, pid=card.pid, op=name, seq=seq)

    def _unreadable(self, peer: int) -> PeerLost:
        """A peer's memory can't be read any more: nearly always because it has just died."""
        mate = self._areas.host.mates[self._areas.members[peer]]
        if causes.ended(mate):
            return self._dead(peer, mate)
        name, seq, text = self._mine(())
        message = (
            f"the memory of rank {peer} (pid {mate.pid} on {mate.host}) can't be read any more by "
            f"rank {self._areas.rank} in {text} of group {self._name!r}: its kernel refuses "
            "(has it changed its user, or a limit on ptrace? NC10D_CMA=0 does without)"
        )
        return PeerLost(message, rank=peer, host=mate.host, pid=mate.pid, op=name, seq=seq)

    def _mismatch(self, channel: Channel) -> CollectiveMismatch:
        mate, seq = channel.get(at.C_BLOCKED_ON), channel.get(at.C_OPS)
        mine = self._areas.record(self._areas.rank, seq)
        peer = self._number(mate)
        if self._outside is not None and mate < 0:
            theirs = self._outside.streams.seen()
        else:
            theirs = self._areas.record(mate, seq) or self._areas.last_record(mate)[1]
        return CollectiveMismatch(
            f"ranks disagree on operation #{seq} of group {self._name!r}: "
            f"rank {self._areas.number} called {mine}, rank {peer} called {theirs}",
            rank=peer,
            op=(mine or "").partition("(")[0],
            seq=seq,
        )

    def _wrong_sizes(self, channel: Channel) -> CollectiveMismatch:
        if channel.shared.kind == at.RECEIVER:
            return self._wrong_message(channel)
        me, seq = self._areas.number, channel.get(at.C_OPS)
        peer = self._number(channel.get(at.C_BLOCKED_ON))
        op = (self._areas.record(self._areas.rank, seq) or "").partition("(")[0]
        return CollectiveMismatch(
            f"ranks disagree on sizes in {op} #{seq} of group {self._name!r}: "
            f"rank {peer} sends {channel.get(at.C_MESSAGE_BYTES)} bytes to rank {me}, which awaits "
            f"{channel.get(at.C_AWAITED)}",
            rank=peer,
            op=op,
            seq=seq,
        )

    def _wrong_message(self, channel: Channel) -> CollectiveMismatch:
        first = at.C_MESSAGE_TAG // 8
        tag, nbytes, dtype = (int(word) for word in channel.words[first : first + 3])
        peer = self._links.peer_of(channel)
        return CollectiveMismatch(
            f"the message with tag {tag} from rank {peer} to rank {self._areas.number} has "
            f"{nbytes} bytes of {_LABELS.get(dtype)}, which is not what the receive expects",
            rank=peer,
            op="recv",
        )

    def _everyone(self) -> str:
        if self._areas.size > 16:
            return ""
        last = [self._areas.last_record(rank) for rank in range(self._areas.size)]
        told = [
            f"rank {rank} #{seq} {what}"
            for rank, (seq, what) in zip(self._areas.numbers, last, strict=True)
        ]
        return f"; last operations: {', '.join(told)}"


def _named(reason: BaseException) -> DistError:
    """Return the reason as an error of this group's own: the caller's object stays as it is."""
    if not isinstance(reason, DistError):
        return Aborted(str(reason))
    own = type(reason)(str(reason))
    own.__dict__.update(reason.__dict__)
    return own


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
