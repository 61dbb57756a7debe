"""Whether a group still works and, if not, why: the same cause on all ranks.

| a group's state on this rank | is entered when |
|---|---|
| working | initially |
| failing | this rank or a peer publishes a cause (cause.py), which this rank has not seen yet |
| failed | `failure` finds the cause, completes calls whose data have come, and stops the channels |
| closed | `close` is called; a working group's failure is then GroupClosed |

A rank publishes a cause when a peer has died or left, a deadline has passed, or the engine reports
an error. Waiting ranks look for a cause between two slices of their wait.

Invariant: the channels are stopped before `failure` first returns an error. So nothing touches
users' arrays after a caller has seen the error. Stopping takes the channels' locks: a thread
releases a channel's lock before calling `failure`.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence

from nc10d.backend.cpu.bootstrap.rank_info import RankInfo
from nc10d.backend.cpu.control.group_control import GroupControl
from nc10d.backend.cpu.engine.channel import Channel
from nc10d.backend.cpu.failure import cause
from nc10d.backend.cpu.failure.cause import AgreedCause
from nc10d.backend.cpu.failure.error_text import ENDING, GroupErrors, as_dist_error
from nc10d.backend.cpu.native import entry_points
from nc10d.backend.cpu.native import offsets as at
from nc10d.base import error_wire
from nc10d.base.deadline import Deadline
from nc10d.base.promise import copy_to_raise, note_told
from nc10d.base.text import RETURNED
from nc10d.errors import CollectiveMismatch, DistError, ForkedGroupError, GroupClosed, PeerLost
from nc10d.ops import Op

_log = logging.getLogger("nc10d")
# Seconds that a failed data connection waits for a cause from the control connection. The control
# connection knows more: whether the peer has left or its process has ended.
CONTROL_GRACE = 1.0
A_MOMENT = 0.001
"""Seconds between two looks for a cause that another thread is about to publish."""
_LONGEST_WHY = 200
"""The most characters in an error that a leaving rank shows to the others."""


class Health:
    """A group's state on this rank: working, failed or closed."""

    def __init__(self, text: GroupErrors, control: GroupControl) -> None:
        self._text, self._control = text, control
        self._context, self._name, self._memory = text.context, text.name, text.memory
        self._channel, self._links, self._remote = text.channel, text.links, text.remote
        self.peers = text.peers
        self._agreed: AgreedCause | None = None
        if text.remote is not None:
            self._agreed = AgreedCause(control, text.memory, text.context.ring)
        self._failure: DistError | None = None
        self._lock = threading.RLock()
        self.closed = self._ending = self._ended = False
        self.why_closed = ""
        self._deadlock: DistError | None = None
        self.on_failure: list[Callable[[DistError], object]] = []
        self._cut_off = False
        """Whether the failure has ended an operation on this rank."""
        self._unfinished: PeerLost | None = None

    # -- asking ----------------------------------------------------------------------------

    def failure(self) -> DistError | None:
        """Return why the group has failed, or None; blocks until the channels are stopped."""
        if self._failure is None:
            found = cause.read(self._memory)
            if found is None:
                return None
            # One thread stops the channels; the others wait here, since they may return the failure
            # only afterwards.
            with self._lock:
                first = self._failure is None
                if first:
                    self._stop()
                    self._failure = found
            try:
                # Without the lock: an observer may take long, and other threads need the failure.
                for observe in self.on_failure if first else ():
                    observe(found)
            finally:
                # Works with callbacks end now; the notifier finishes them.
                self._context.poke_notifier()
        return self._failure

    def check(self) -> None:
        """Raise the group's failure, if there is any."""
        failure = self.failure()
        if failure is not None:
            # `from None`: Python would print the original as the cause, with the same text.
            raise copy_to_raise(failure) from None

    def reason_to_stop(self) -> DistError:
        """Return why a group's channels are stopped; blocks until that is stored."""
        with self._lock:  # a thread that fails or closes the group holds the lock until then
            failure = self.failure()
        assert failure is not None
        return failure

    def report_deadlock(self, channel: Channel, text: str) -> None:
        """Make the next `check_wait` fail the group: this rank's wait is part of a deadlock."""
        self._deadlock = self.deadlock_error(channel, text)

    def deadlock_error(self, channel: Channel, text: str) -> DistError:
        """Return the error for a deadlock, in which this rank waits in a channel."""
        rank, (seq, op) = self.peers.awaited(channel), self._text.waiting_call(channel)
        if RETURNED in text:
            return PeerLost(text, rank=rank, op=op, seq=seq, cause="it has returned")
        return CollectiveMismatch(text, rank=rank, op=op, seq=seq, cause="a circle of waits")

    def failing(self) -> bool:
        """Return whether the group has a failure; stops no channel."""
        return self._failure is not None or cause.has_failed(self._memory)

    def must_stop(self, channel: Channel, deadline: Deadline) -> bool:
        """Return whether there is a reason to stop waiting."""
        # Stops no channel, so a thread with a channel's lock may call this, unlike `failure`.
        if self.failing():
            return True
        return self.peers.departed(channel) is not None or deadline.expired()

    def check_stopped(
        self, ops: Sequence[Op], channel: Channel, deadline: Deadline
    ) -> DistError | None:
        """Do as `check_wait`, after waiting for the thread that has stopped the channel."""
        # That thread holds the lock until the failure is stored.
        with self._lock:
            return self.check_wait(ops, channel, deadline)

    def check_wait(
        self, ops: Sequence[Op], channel: Channel, deadline: Deadline
    ) -> DistError | None:
        """Return the group's failure, or None if the wait for `ops` in `channel` can go on."""
        # A deadlock, a peer that has left, and an expired deadline fail the group first.
        # A published cause first: an error made here would only lose.
        failure = self.failure()
        if failure is not None:
            return failure
        if self._deadlock is not None:
            return self._fail(self._deadlock)
        peer = self.peers.departed(channel)
        if peer is not None:
            return self._fail(self._text.peer_left(peer, ops, channel))
        return self.fail_timeout(ops, channel, deadline.limit) if deadline.expired() else None

    def error_of_left(self, peer: int, within: str) -> PeerLost:
        """Return the error for a peer that has left; this rank waits for it in `within`."""
        return self._text.peer_left(peer, (), None, within)

    def fail_left(self, peers: Sequence[int], ops: Sequence[Op]) -> DistError:
        """Fail the group: all `peers`, which alone could end `ops`, have left. Return why."""
        return self._fail(self._text.peer_left(peers[0], ops, None))

    def whereabouts(self) -> tuple[str, dict[int, int]]:
        """Return each local rank's last operation: as text, and as numbers by rank."""
        return self._text.last_operations(), self._text.last_numbers()

    # -- failing ---------------------------------------------------------------------------

    def abort(self, reason: BaseException) -> None:
        """Fail the group with `reason` on every rank; the first reason wins."""
        # Blocks until a cause is agreed, except in the control thread.
        # A copy: the fields below must not change the caller's object.
        error = as_dist_error(reason)
        error.group = error.group or self._name
        op, seq, _ = self._text.own_operation(())
        error.op = error.op or op
        error.seq = seq if error.seq is None else error.seq
        if self._agreed is not None:
            # Without the lock: the control thread, which receives the answer, may need the lock.
            self._agreed.report(error, wait=not self._context.in_control())
            self.failure()
            return
        # After `close` the memory may belong to another group.
        with self._lock:
            if self.closed:
                return
            cause.publish(self._memory, error)
            self._context.ring(self._memory.bits())
        self.failure()

    def abort_for_caller(self, reason: BaseException) -> None:
        """Do as `abort`, for a caller who has the reason already."""
        first = not self.failing()
        self.abort(reason)
        if first:
            note_told(self.failure())

    def close(self) -> bool:
        """End the group on this rank; return False if already ended.

        A repeated call completes a close that a signal handler's error has cut off.
        """
        if not self.closed:
            self.failure()  # a rank that has never looked for a cause learns the cause here
        with self._lock:
            if self._ending or self._ended:
                return False
            self._ending = True
            try:
                self._end()
                self._ended = True
            finally:
                self._ending = False
        return True

    def fail_by_submissions(self) -> None:
        """Fail the group if calls in flight differ; blocks for CONTROL_GRACE at most."""
        for channel in () if self.closed else (self._channel, *self._links.channels()):
            oldest = channel.oldest()
            answer = 0 if oldest is None else entry_points.wait(channel.address, oldest.address, 1)
            if answer in (at.MISMATCH, at.SIZES):
                self.engine_failed(channel, answer)
            elif answer == at.ABORTED:  # the worker has the engine's answer: it publishes the cause
                soon = Deadline.after(CONTROL_GRACE)
                while not (self.failing() or soon.expired()):
                    time.sleep(A_MOMENT)

    def _note_unfinished(self) -> None:
        """Note a collective in flight that can't end, since a peer left without taking part."""
        # After this rank has published its leaving: of two ranks that leave, one sees the other.
        peer = self.peers.departed(self._channel) if self._channel.oldest() else None
        if peer is not None:
            self._unfinished = self._text.peer_left(peer, (), self._channel)

    def log_untold(self) -> None:
        """Log the error that has ended an operation on this rank, unless a call has raised it."""
        error = self._failure if self._cut_off else self._unfinished
        if error is not None and not error._told:
            _log.error("nc10d: %s; no call has raised this error", error)

    def _end(self) -> None:
        # Deaths and messages that the control thread processes from here on are ignored.
        self.closed = True
        # A rank that leaves amid an error: peers that wait for this rank learn the reason.
        error = sys.exc_info()[1]
        if isinstance(error, SystemExit):
            self.why_closed = ENDING
        elif error is not None:
            words = error_wire.message_of(error).partition("; last operations")[0]
            self.why_closed = f"{type(error).__name__}: {words[:_LONGEST_WHY]}"
        # First of all: no peer may read arrays that are about to return to their owners.
        self._memory.publish_closed(
            error_wire.encode_error(PeerLost(self.why_closed), at.CAUSE_BYTES)
            if self.why_closed
            else b""
        )
        if self._agreed is not None:
            self._agreed.close()
        if self._failure is None:
            self._note_unfinished()
            message = f"group {self._name!r} has been closed on rank {self._memory.group_rank}"
            closed = GroupClosed(message, group=self._name)
            try:
                self._stop_channels()
            except BaseException:  # Ctrl-C: the caller must still get the arrays back
                self._stop_channels()
                self._failure = closed
                raise
            self._failure = closed

    def engine_failed(self, channel: Channel, answer: int) -> None:
        """Turn a negative answer from the engine into the group's failure."""
        if answer == at.LATE:
            self.fail_timeout((), channel)
        elif answer == at.MISMATCH:
            self.abort(self._text.mismatch(channel))
        elif answer == at.SIZES:
            self.abort(self._text.size_mismatch(channel))
        elif answer == at.LOST:
            self._socket_failed(channel)
        elif answer == at.UNREADABLE:
            self.abort(self._text.memory_unreadable(channel))
        else:
            self.failure()

    def fail_timeout(
        self, ops: Sequence[Op], channel: Channel | None, limit: float = math.inf
    ) -> DistError:
        """Fail the group, since an operation's own deadline has passed; return the failure.

        `limit` is the operation's timeout, math.inf if unknown.
        """
        peer = None if channel is None else self.peers.awaited(channel)
        if not ops and channel is not None and channel.spec.kind != at.COLLECTIVE:
            return self._fail(self._text.message_timeout(peer, channel, limit))
        return self._fail(self._text.timeout(peer, ops, channel, limit))

    def on_death(self, number: int) -> None:
        """React to the death of a local process, the job's rank `number`."""
        numbers = [peer.number for peer in self._memory.peers]
        if number not in numbers or self.closed:
            return
        rank = numbers.index(number)
        # A process that closed the group before its end has done its part.
        if self._memory.state(rank) != at.CLOSED:
            self.abort(self._text.died(rank, self._memory.peers[rank]))

    def on_lost(self, rank: int, reason: str) -> None:
        """React when the control connection to a rank on another host ends."""
        # The announcement of leaving arrives before the connection ends.
        if not self.closed and not self.peers.has_closed(rank):
            self.abort(self._text.unreachable(rank, self._info_of(rank), reason))

    def _info_of(self, rank: int) -> RankInfo:
        return self._context.infos[self._control.members[rank]]

    def _socket_failed(self, channel: Channel) -> None:
        """Fail the group after a connection's end, with the cause that explains the end best."""
        assert self._remote is not None
        rank = self.peers.rank_of(channel.get(at.C_BLOCKED_ON))
        control, agreed = self._control, self._agreed
        assert agreed is not None, "the group has a connection to another host"
        control.until(
            lambda: self.peers.has_closed(rank) or control.lost(rank) is not None or agreed.known(),
            CONTROL_GRACE,
        )
        # The best cause first: the agreed cause, a rank that has left, the control connection's
        # end, and only then this socket's error.
        if self.failure() is not None:
            return
        if self.peers.has_closed(rank):
            self.abort(self._text.peer_left(rank, (), channel))
            return
        reason = control.lost(rank) or self._remote.error(channel)
        self.abort(self._text.unreachable(rank, self._info_of(rank), reason, channel))

    def _fail(self, error: DistError) -> DistError:
        self.abort(error)
        return self.reason_to_stop()

    def _stop(self) -> None:
        try:
            for channel in (self._channel, *self._links.channels()):
                channel.advance()
                self._cut_off = self._cut_off or channel.oldest() is not None
            self._stop_channels()
        except BaseException:  # Ctrl-C: the caller must still get the arrays back
            self._stop_channels()
            raise

    def _stop_channels(self) -> None:
        self._channel.stop()
        self._links.stop()

    def disown(self) -> None:
        """Mark the group as inherited in a forked child; idempotent."""
        # Another thread in the parent may have held the lock during the fork.
        self._lock = threading.RLock()
        self.closed = self._ended = True
        self._failure = ForkedGroupError(
            f"group {self._name!r} belongs to the process that forked this one",
            group=self._name,
            rank=self._memory.group_rank,
            pid=os.getpid(),
        )
