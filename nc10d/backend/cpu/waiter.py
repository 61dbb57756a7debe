"""Waiting for a group's submissions, and what a wait does besides: it helps, and it looks.

Every wait goes in slices of 50 ms at most, most of 25. Between two of them it takes messages aside
that nobody has asked for, and looks whether the group still works and whether time is over.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from nc10d.backend.cpu.context import Context
from nc10d.backend.cpu.engine.channel import Channel, Submission
from nc10d.backend.cpu.failure.error_text import describe
from nc10d.backend.cpu.failure.health import Health
from nc10d.backend.cpu.memory.group_memory import GroupMemory
from nc10d.backend.cpu.native import entry_points
from nc10d.backend.cpu.native import offsets as at
from nc10d.backend.cpu.p2p.mailbox import Mailbox
from nc10d.backend.cpu.transport.links import Links
from nc10d.backend.cpu.works import AnySourceReceive, Part
from nc10d.base.deadline import Deadline
from nc10d.errors import Aborted, DistError
from nc10d.ops import Op
from nc10d.work import Work

SLICE_NS = entry_points.SLICE_NS
SLICE = SLICE_NS / 1e9
LOOK = SLICE / 2
A_MOMENT = 0.001
"""Seconds between two looks of a thread that waits, after the first slice."""


class Waiter:
    """The part of a group's backend that waits. Methods that block say so."""

    host: Context
    areas: GroupMemory
    links: Links
    group_name: str
    rank: int
    members: list[int]
    health: Health
    post: Mailbox
    ending: threading.RLock
    """Held while a work's last steps are done."""
    _watched: set[Work]

    def enqueue(self, channel: Channel, submission: Submission) -> Part:
        """Append a submission to a channel."""
        channel.submit(submission)
        return channel, submission

    def wait_part(
        self,
        channel: Channel,
        submission: Submission,
        until: Deadline,
        limit: Deadline,
        ops: Sequence[Op],
    ) -> DistError | None:
        """Block until a submission has ended, or `until`; return the group's failure, if any.

        `limit` is the operation's own deadline: when it passes, the group fails.
        """
        try:
            while True:
                slice_ns = max(1, int(until.slice(LOOK) * 1e9))
                answer = entry_points.wait(channel.address, submission.address, slice_ns)
                if answer == at.FINISHED:
                    return None
                if answer == at.UNMATCHED:
                    self.post.absorb(channel)
                elif answer < 0 and answer != at.ABORTED:
                    self.health.engine_failed(channel, answer)
                elif answer == 0 and until.at >= limit.at:
                    self.is_stuck(channel, submission)
                failure = self.health.look(ops, channel, limit)
                if failure is not None or until.expired():
                    return failure
                if answer == at.ABORTED:  # another thread is about to say why: let it
                    time.sleep(A_MOMENT)
        finally:
            self.host.deadlocks.over()

    def is_stuck(self, channel: Channel, submission: Submission | None = None) -> bool:
        """Say whether what this thread waits for in a channel never comes: see detector.py."""
        verdict = self.host.deadlocks.stuck(self, channel, submission)
        if verdict is not None:
            self.health.stuck(channel, verdict)
        return verdict is not None

    def wait_work(self, work: Work) -> None:
        """Wait for a synchronous call; an interrupt ends it for the whole group."""
        try:
            work.wait()
        except BaseException:
            if not work.is_completed():
                self.interrupted(work.ops)
            raise

    def interrupted(self, ops: Sequence[Op]) -> None:
        """This thread's call was interrupted: fail the group."""
        name, (seq, _) = describe(ops), self.areas.last_record(self.areas.rank)
        message = f"rank {self.rank} was interrupted in {name} #{seq}"
        self.health.abort(Aborted(message, rank=self.rank, op=name, seq=seq))

    def clear_way(self, parts: Sequence[Part]) -> None:
        """Take messages nobody asked for out of the way of receives that are only polled."""
        for channel, _ in parts:
            if channel.shared.kind == at.RECEIVER and channel.get(at.C_UNMATCHED):
                self.post.absorb(channel)

    def watch(self, work: Work) -> None:
        """Have the notifier finish a work that nobody waits for."""
        self._watched.add(work)
        self.host.need_notifier()
        if self.health.closed or not self.host.poke_notifier():
            self.notify()

    def notify(self) -> bool:
        """Finish what has ended; called by the notifier. True: look again, nobody will tell."""
        for work in list(self._watched):
            try:
                work._poll()
            except Exception as error:  # noqa: BLE001  (this work's own; the others go on)
                work._finish(error)
            if work._state != 0:
                self._watched.discard(work)
                work._finish()
        return any(isinstance(work, AnySourceReceive) for work in list(self._watched))
