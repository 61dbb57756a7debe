"""Waiting for a group's submissions; a thread that waits also helps, and looks for failures.

A wait goes in slices of 25 to 50 ms. Between two slices the thread receives unexpected messages
that block its own message, and checks whether the group has failed or the deadline has passed.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence

from nc10d.backend.cpu.deadlock.detector import DeadlockDetector
from nc10d.backend.cpu.engine.channel import Channel, Submission
from nc10d.backend.cpu.failure.error_text import describe
from nc10d.backend.cpu.failure.health import A_MOMENT
from nc10d.backend.cpu.membership.group import Group
from nc10d.backend.cpu.native import entry_points, prepared_exchange
from nc10d.backend.cpu.native import offsets as at
from nc10d.backend.cpu.p2p.receive_queues import QueuedReceive
from nc10d.backend.cpu.p2p.unexpected import receive_unexpected
from nc10d.backend.cpu.works import CpuWork
from nc10d.base.deadline import Deadline, monotonic
from nc10d.base.promise import copy_to_raise
from nc10d.errors import Aborted, DistError
from nc10d.ops import Op
from nc10d.work import Work

SLICE_NS = entry_points.SLICE_NS
SLICE = SLICE_NS / 1e9

Flight = tuple[Channel, Submission]
"""A submission in flight, and the channel."""


class Waiter:
    """Waits for a group's operations. Methods that block are marked so."""

    def __init__(self, group: Group, detector: DeadlockDetector) -> None:
        self.group = group
        self.ending = threading.RLock()
        self.health = group.health
        self._context = group.context
        self.need_worker = group.context.need_worker  # a frame less for each call in flight
        self._detector = detector
        self._watched: set[Work] = set()
        group.context.add_work_list(self)

    def wait_submission(self, work: CpuWork, until: Deadline) -> DistError | None:
        """See WorkWaiter; blocks."""
        channel, submission, limit = work.channel, work.submission, work.deadline
        try:
            while True:
                slice_ns = max(1, int(until.slice(SLICE / 2) * 1e9))
                answer = entry_points.wait(channel.address, submission.address, slice_ns)
                if answer == at.FINISHED:
                    return None
                if answer == at.UNMATCHED:
                    receive_unexpected(self.group.links, channel)
                elif answer < 0 and answer != at.ABORTED:
                    self.health.engine_failed(channel, answer)
                # A wait that ends earlier by itself gets no notice, which would not stay true.
                elif answer == 0 and until.at >= limit.at:
                    self._check_deadlock(channel, limit.limit, submission)
                failure = self.health.check_wait(work.ops, channel, limit)
                if failure is not None or until.expired():
                    return failure
                if answer == at.ABORTED:  # another thread is about to publish the cause
                    time.sleep(A_MOMENT)
        finally:
            self._detector.clear()

    def drive(self, channel: Channel, answer: int, ops: Sequence[Op], timeout: float) -> None:
        """Drive a program, after the engine's `answer`, to its end; blocks, raises the failure."""
        # `run` has spent a slice already.
        deadline = Deadline(monotonic() + max(0.0, timeout - SLICE), timeout)
        try:
            while answer == at.BLOCKED and not self.health.must_stop(channel, deadline):
                if self._check_deadlock(channel, timeout):
                    break
                slice_ns = max(1, int(deadline.slice(SLICE / 2) * 1e9))
                answer = entry_points.drive(channel.address, slice_ns)
            # A last look, unless a signal's handler has ended the group: data that came before the
            # failure complete the program.
            if answer in (at.BLOCKED, at.ABORTED) and channel.held():
                answer = entry_points.drive(channel.address, 1)
            if answer == at.DONE:
                return
            # First release this channel's lock: `health` stops all channels, and takes their locks.
            channel.give_up()
            if answer not in (at.BLOCKED, at.ABORTED):
                self.health.engine_failed(channel, answer)
            failure = self.health.check_stopped(ops, channel, deadline)
        finally:
            # Not before the cause is known: a cycle's report may come after a data connection's
            # end, and counts for a rank with a notice alone.
            self._detector.clear()
        assert failure is not None, f"the engine answered {answer}, but the group has not failed"
        # The stored error was never raised and has no traceback.
        raise copy_to_raise(failure) from None

    def _check_deadlock(
        self, channel: Channel, timeout: float, submission: Submission | None = None
    ) -> bool:
        """Publish this thread's wait; report and return whether it is part of a deadlock."""
        cycle = self._detector.find_deadlock(self.group, channel, timeout, submission)
        if cycle is not None:
            self.health.report_deadlock(channel, cycle)
        return cycle is not None

    def go_on_together(
        self, flights: Sequence[Flight], ops: Sequence[Op], deadline: Deadline, answer: int
    ) -> None:
        """Go on with a send and a receive after the engine's `answer`; blocks, raises the failure.

        This thread advances both as long as either makes progress, then the worker does.
        """
        addresses = [
            address for channel, sub in flights for address in (channel.address, sub.address)
        ]
        before: list[int] = []
        ticks = [channel.get(at.C_TICKS) for channel, _ in flights]
        while answer == at.UNMATCHED or (answer == 0 and ticks != before):
            if answer == at.UNMATCHED:
                receive_unexpected(self.group.links, flights[1][0])
            before, answer = ticks, prepared_exchange.wait_both(*addresses, SLICE_NS // 2)
            ticks = [channel.get(at.C_TICKS) for channel, _ in flights]
        if answer == at.FINISHED:
            return
        if answer < 0 and answer != at.ABORTED:
            failing = (c for c, _ in flights if c.get(at.C_BROKEN) == at.FAILING)
            self.health.engine_failed(next(failing, flights[0][0]), answer)
        self.need_worker()
        self._context.ring(0)
        for op, flight in zip(ops, flights, strict=True):
            self.wait_work(CpuWork(self, (op,), *flight, deadline))

    def wait_work(self, work: Work) -> None:
        """Wait for a synchronous call; an interrupt fails the call on all ranks. Blocks."""
        try:
            work.wait()
        except BaseException:
            if not work.is_completed():
                self.interrupted(work.ops)
            raise

    def interrupted(self, ops: Sequence[Op]) -> None:
        """Fail the group after an interrupt in the middle of this thread's call."""
        rank, memory = self.group.rank, self.group.memory
        name, (seq, _) = describe(ops), memory.last_record(memory.rank)
        message = f"rank {rank} was interrupted in {name} #{seq}"
        self.health.abort_for_caller(Aborted(message, rank=rank, op=name, seq=seq))

    def abandon(self, channel: Channel, ops: Sequence[Op]) -> None:
        """Leave this thread's call after an exception such as Ctrl-C."""
        # If the program was under way, the group fails: peers have seen a part of the call.
        channel.give_up()
        if channel.given_up and self.health.failure() is None:
            self.interrupted(ops)

    # -- for Works -------------------------------------------------------------------------------

    def clear_way(self, channel: Channel) -> None:
        """Receive an unexpected message that blocks receives which are only polled."""
        if channel.spec.kind == at.RECEIVER and channel.get(at.C_UNMATCHED):
            receive_unexpected(self.group.links, channel)

    def watch(self, work: Work) -> None:
        """Let the notifier finish a Work that nobody waits for."""
        self._watched.add(work)
        self._context.need_notifier()
        if self.health.closed or not self._context.poke_notifier():
            self.notify()

    def poke(self) -> None:
        """Make the notifier look at all watched Works."""
        self._context.poke_notifier()

    def notify(self) -> bool:
        """Finish watched Works that have ended; return True if any can only be polled."""
        for work in list(self._watched):
            try:
                work._poll()
            except Exception as error:  # noqa: BLE001  (this Work's own; the others go on)
                work._finish(error)
            if work._state != 0:
                # A waiting thread that has found the end leaves the callbacks to this `_finish`.
                work._finish()
                self._watched.discard(work)
        return any(isinstance(work, QueuedReceive) for work in list(self._watched))

    def pending(self) -> bool:
        """Return whether a watched Work is in flight, or its callbacks run."""
        return bool(self._watched)

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        # Watched Works refer to their waiter: a collection finds both. They end as by `close`.
        if ending() or not getattr(self, "_watched", None):
            return
        if os.getpid() == self._context.pid:
            first = self.health.close()  # the collection may have finalized the group before
            self.notify()
            if first:
                self.group.leave()

    def disown(self) -> None:
        """Become usable for reading states only, in a forked child."""
        self.ending = threading.RLock()
