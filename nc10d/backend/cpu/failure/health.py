"""Whether a group still works and, if not, why: one answer for all of its ranks.

Whoever learns a cause publishes it (causes.py); everybody else finds it between two slices of a
wait. Before a failure is handed out, the group's channels are stopped, so that nothing touches
users' arrays any more. A thread that holds a channel's lock must give it up before it asks.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence

from nc10d.backend.cpu.bootstrap.rank_info import RankInfo
from nc10d.backend.cpu.context import Context
from nc10d.backend.cpu.control.group_control import GroupControl
from nc10d.backend.cpu.engine.channel import Channel
from nc10d.backend.cpu.failure import cause
from nc10d.backend.cpu.failure.cause import AgreedCause
from nc10d.backend.cpu.failure.error_text import ErrorText, named
from nc10d.backend.cpu.memory.group_memory import GroupMemory
from nc10d.backend.cpu.native import entry_points
from nc10d.backend.cpu.native import offsets as at
from nc10d.backend.cpu.transport.links import Links
from nc10d.backend.cpu.transport.remote_group import RemoteGroup
from nc10d.base.deadline import Deadline
from nc10d.base.promise import copy_to_raise
from nc10d.errors import (
    CollectiveMismatch,
    DistError,
    ForkedGroupError,
    GroupClosed,
)
from nc10d.ops import Op

# How long a broken link waits for the word of a control line, which knows more.
LAST_WORD = 1.0


class Health:
    """The state of one group on this rank: working, failed or closed."""

    def __init__(
        self,
        context: Context,
        name: str,
        memory: GroupMemory,
        channel: Channel,
        links: Links,
        remote: RemoteGroup | None,
        control: GroupControl,
    ) -> None:
        self._context = context
        self._name = name
        self._memory = memory
        self._remote = remote
        self._control = control
        self._agreed = None if remote is None else AgreedCause(control, memory, context.ring)
        self._channel = channel
        self._links = links
        self._text = ErrorText(context, name, memory, channel, links, remote)
        self._failure: DistError | None = None
        self._lock = threading.RLock()
        self.closed = False
        self._circle: DistError | None = None
        self.on_failure: Callable[[DistError], object] | None = None

    # -- asking ----------------------------------------------------------------------------

    def failure(self) -> DistError | None:
        """Return why the group has failed, or None; blocks until its channels are stopped."""
        if self._failure is None:
            found = cause.read(self._memory)
            if found is None:
                return None
            with self._lock:
                first = self._failure is None
                if first:
                    self._stop()
                    self._failure = found
            if first and self.on_failure is not None:
                self.on_failure(found)
            self._context.poke_notifier()
        return self._failure

    def check(self) -> None:
        """Raise the group's failure, if there is one."""
        failure = self.failure()
        if failure is not None:
            raise copy_to_raise(failure) from None  # it was never raised here: once is enough

    def stuck(self, channel: Channel, verdict: str) -> None:
        """Have the next `look` fail the group: a circle of ranks waits in a channel of it."""
        self._circle = self.in_circle(channel, verdict)

    def in_circle(self, channel: Channel, verdict: str) -> DistError:
        """Return the error of ranks that wait in a circle, this one in a channel."""
        rank, (seq, op) = self._blocked_on(channel), self._text.waits_in(channel)
        return CollectiveMismatch(verdict, rank=rank, op=op, seq=seq, cause="a circle of waits")

    def trouble(self, channel: Channel, deadline: Deadline) -> bool:
        """Say whether there is a reason to stop waiting; changes nothing."""
        if self._failure is not None or cause.read(self._memory) is not None:
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
        if self._circle is not None:
            return self._fail(self._circle)
        deserter = self._deserter(channel)
        if deserter is not None:
            return self._fail(self._text.left(deserter, ops, channel))
        return self.fail_timeout(ops, channel) if deadline.expired() else None

    def _deserter(self, channel: Channel) -> int | None:
        """Return the rank that a channel waits for, if it has left without doing its part."""
        peer = self._blocked_on(channel)
        if peer is None or not self.has_left(peer):
            return None
        if self._away(peer):
            return None  # what it has sent before may be on its way: the link's end will tell
        # In this order: who has just received the last message there looks for the next.
        arrived = not self.is_waiting(channel)
        return None if arrived or channel.is_over() else peer

    def waits_for(self) -> int | None:
        """Return the rank that this rank's collectives wait for right now, or None."""
        return self._blocked_on(self._channel) if self.is_waiting(self._channel) else None

    def is_waiting(self, channel: Channel) -> bool:
        """Say whether what a channel was blocked on last has still not come."""
        counter = channel.get(at.C_BLOCKED_AT)
        return bool(counter) and bool(
            entry_points.load_word(counter) < channel.get(at.C_BLOCKED_FOR)
        )

    def has_left(self, rank: int) -> bool:
        """Say whether a rank has closed the group."""
        if self._away(rank):
            return rank in self._control.left
        return self._memory.state(self._memory.numbers.index(rank)) == at.CLOSED

    def deserted(self) -> bool:
        """Say whether all other ranks have closed the group, and nothing can be on its way."""
        peers = [rank for rank in self._memory.numbers if rank != self._memory.number]
        return self._remote is None and bool(peers) and all(map(self.has_left, peers))

    def fail_deserted(self, ops: Sequence[Op]) -> DistError:
        """Whoever could do what these operations wait for has left: that fails the group."""
        peer = next(rank for rank in self._memory.numbers if rank != self._memory.number)
        return self._fail(self._text.left(peer, ops, None))

    def _away(self, rank: int) -> bool:
        return self._remote is not None and self._remote.has(rank)

    def _blocked_on(self, channel: Channel) -> int | None:
        if channel.get(at.C_BLOCKED_AT) == 0:
            return None
        if channel.shared.kind == at.COLLECTIVE:
            peer = self._text.number(channel.get(at.C_BLOCKED_ON))
            return None if peer == self._memory.number else peer  # a gate of my own
        return self._links.peer_of(channel)

    def whereabouts(self) -> tuple[str, dict[int, int]]:
        """Return what each rank of this host began last: as the end of a message, and numbers."""
        return self._text.everyone(), self._text.numbers()

    # -- failing ---------------------------------------------------------------------------

    def abort(self, reason: BaseException) -> None:
        """Fail the group with `reason` on every rank; the first reason wins."""
        error = named(reason)
        error.group = error.group or self._name
        op, seq, _ = self._text.mine(())
        error.op = error.op or op
        error.seq = seq if error.seq is None else error.seq
        if self._agreed is not None:
            # Not under the lock: the answer comes through a thread that may want it.
            self._agreed.report(error, wait=not self._context.in_control())
            self.failure()
            return
        # Once the group is closed, its memory may be another's.
        with self._lock:
            if self.closed:
                return
            cause.publish(self._memory, error)
            self._context.ring(self._memory.bits())
        self.failure()

    def close(self) -> bool:
        """End the group on this rank; False if that has happened before."""
        if self.on_failure is not None and not self.closed:
            self.failure()  # a rank that never asked is to leave its word, too
        with self._lock:
            if self.closed:
                return False
            self.closed = True
            # First of all: nobody may read arrays that their owners are about to get back.
            self._memory.show_closed()
            if self._agreed is not None:
                self._agreed.close()
            if self._failure is None:
                self._stop()
                message = f"group {self._name!r} has been closed on rank {self._memory.number}"
                self._failure = GroupClosed(message, group=self._name)
        return True

    def engine_failed(self, channel: Channel, answer: int) -> None:
        """Turn a negative answer of the engine into the group's failure."""
        if answer == at.LATE:
            self.fail_timeout((), channel)
        elif answer == at.MISMATCH:
            self.abort(self._text.mismatch(channel))
        elif answer == at.SIZES:
            self.abort(self._text.wrong_sizes(channel))
        elif answer == at.LOST:
            self._link_failed(channel)
        elif answer == at.UNREADABLE:
            self.abort(self._text.unreadable(channel.get(at.C_BLOCKED_ON)))
        else:
            self.failure()

    def fail_timeout(self, ops: Sequence[Op], channel: Channel | None) -> DistError:
        """An operation's own deadline has passed: that fails the group."""
        peer = None if channel is None else self._blocked_on(channel)
        if not ops and channel is not None and channel.shared.kind != at.COLLECTIVE:
            return self._fail(self._text.late_message(peer, channel))
        return self._fail(self._text.late(peer, ops, channel))

    def on_death(self, number: int) -> None:
        """React to the death of a process of this host, rank `number` of the job."""
        numbers = [peer.number for peer in self._memory.peers]
        if number not in numbers or self.closed:
            return
        rank = numbers.index(number)
        if self._memory.state(rank) != at.CLOSED:
            self.abort(self._text.dead(rank, self._memory.peers[rank]))

    def on_lost(self, rank: int, reason: str) -> None:
        """React to the end of the control connection to a rank on another host."""
        if not self.closed and not self.has_left(rank):
            self.abort(self._text.gone(rank, self._info_of(rank), reason))

    def _info_of(self, rank: int) -> RankInfo:
        return self._context.infos[self._control.members[rank]]

    def _link_failed(self, channel: Channel) -> None:
        """Fail the group after the end of a connection, with the cause that explains it best."""
        assert self._remote is not None
        rank = self._text.number(channel.get(at.C_BLOCKED_ON))
        control, agreed = self._control, self._agreed
        assert agreed is not None, "the group has a connection to another host"
        control.until(
            lambda: self.has_left(rank) or control.lost(rank) is not None or agreed.known(),
            LAST_WORD,
        )
        if self.failure() is not None:
            return
        if self.has_left(rank):
            self.abort(self._text.left(rank, (), channel))
            return
        reason = control.lost(rank) or self._remote.error(channel)
        self.abort(self._text.gone(rank, self._info_of(rank), reason))

    def _fail(self, error: DistError) -> DistError:
        self.abort(error)
        with self._lock:  # whoever is closing the group has said so by then
            failure = self.failure()
        assert failure is not None
        return failure

    def _stop(self) -> None:
        try:
            self._stop_channels()
        except KeyboardInterrupt:  # the caller is to have his arrays back, all the same
            self._stop_channels()
            raise

    def _stop_channels(self) -> None:
        self._channel.stop()
        self._links.stop()

    def disown(self) -> None:
        """Mark the group as inherited in a forked child; idempotent."""
        self._lock = threading.RLock()
        self.closed = True
        self._failure = ForkedGroupError(
            f"group {self._name!r} belongs to the process that forked this one",
            group=self._name,
            rank=self._memory.number,
            pid=os.getpid(),
        )
