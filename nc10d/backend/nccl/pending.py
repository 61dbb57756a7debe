"""What is under way: Works in the order of their launch, and the events by which they end."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from time import monotonic

from nc10d.backend.nccl.comm.communicator import UNTIL_ABORT_ANYWAY
from nc10d.backend.nccl.watchdog import FAST, SLOW, watchdog
from nc10d.backend.nccl.works import NcclWork, WorkOwner
from nc10d.base.outcome import PENDING
from nc10d.cuda.driver import call, on_device
from nc10d.cuda.events import EventPool, is_over
from nc10d.errors import DistError

MANY = 128
"""So many Works under way are looked through by whoever launches the next one."""


class PendingWorks(WorkOwner):
    """The pending Works of one group; `lock` guards them and every launch."""

    def __init__(self, pool: EventPool, fail: Callable[[DistError], None]) -> None:
        self.lock = threading.RLock()
        self._pool = pool
        self._fail = fail
        self._works: dict[NcclWork, None] = {}
        self._hurried: set[NcclWork] = set()
        self._frozen = False

    def add(self, work: NcclWork) -> None:
        """Look after a Work from now on."""
        self._works[work] = None
        if len(self._works) > MANY:
            self.sweep()
        if watchdog.idle:
            watchdog.wake()

    def let_wait(self, stream: int, event: int) -> None:
        """Let a stream, perhaps a default one of this device, wait for an event."""
        with on_device(self._pool.device):
            call("cuStreamWaitEvent", stream, event, 0)

    def fail(self, error: DistError) -> None:
        """End the group."""
        self._fail(error)

    def hurry(self, work: NcclWork) -> None:
        """Look often until a Work is over."""
        with self.lock:
            self._hurried.add(work)
        watchdog.wake()

    def retire(self, work: NcclWork) -> None:
        """Finish a Work whose event is over."""
        self._retire([work])

    def _retire(self, works: list[NcclWork], wait: bool = True) -> None:
        """Finish Works whose events are over; callbacks run without the lock.

        NCCL ends a kernel that has failed as it ends any other: only its communicator tells.
        """
        if not self.lock.acquire(blocking=wait):
            return
        try:
            if self._frozen or not self._check_communicators(works):
                return
            for work in works:
                self._works.pop(work, None)
                self._hurried.discard(work)
                self._recycle_events(work)
        finally:
            self.lock.release()
        for work in works:
            work._finish(None, work.outcome())

    def _check_communicators(self, works: list[NcclWork]) -> bool:
        try:
            for comm_stream in {comm_stream for work in works for comm_stream in work.comm_streams}:
                comm_stream.check()
        except DistError as error:
            self._frozen = True
            self._fail(error)
        return not self._frozen

    def freeze(self) -> None:
        """Let nothing be done any more: what ends from now on has been ended by an abort.

        It waits a second for the thread that launches, and then goes ahead: that one is stuck in
        NCCL, and the abort is what frees it.
        """
        self._frozen = True
        if self.lock.acquire(timeout=UNTIL_ABORT_ANYWAY):
            self.lock.release()

    def _recycle_events(self, work: NcclWork) -> None:
        event, begun = work.event, work.begun
        if begun and event:
            work.measure()
            self._pool.give(begun, timing=True)
        if event:
            self._pool.give(event, timing=bool(begun))
        work.event = work.begun = 0

    def sweep(self, wait: bool = True) -> None:
        """Finish what is over; without `wait` not while a thread launches, or is stuck in that."""
        if not self.lock.acquire(blocking=wait):
            return
        try:
            over = self._over()
        finally:
            self.lock.release()
        if over:
            self._retire(over, wait)
        # Others may have found these over; their callbacks are this thread's to run.
        for work in [work for work in self._hurried if work._state != PENDING]:
            self._hurried.discard(work)
            work._finish()

    def _over(self) -> list[NcclWork]:
        """Return the Works whose events are over: those of a lane end in their order.

        Usually the latest is over, too, and then one look a lane is enough.
        """
        comm_streams: dict[object, list[NcclWork]] = {}
        for work in self._works:
            comm_streams.setdefault(work.comm_streams, []).append(work)
        over: list[NcclWork] = []
        for works in comm_streams.values():
            done = works if _has_ended(works[-1]) else itertools.takewhile(_has_ended, works)
            over += done
        return over

    def late(self) -> NcclWork | None:
        """Return a Work whose deadline has passed."""
        now = monotonic()  # no lock: the thread that has it may be the late one
        return next((work for work in list(self._works) if work.due <= now), None)

    def pause(self) -> float | None:
        """Return in how many seconds to look again; None: nothing is under way."""
        if self._hurried:
            return FAST
        return SLOW if self._works else None

    @property
    def busy(self) -> bool:
        """Say whether anything is under way."""
        return bool(self._works)

    def end(self, error: DistError) -> None:
        """Fail everything that is under way; nothing touches its arrays any more."""
        with self.lock:
            works, self._works = list(self._works), {}
            self._hurried.clear()
        for work in works:
            work.event = work.begun = 0  # the device may have failed: its events are not used again
            work._finish(error)
            if work.submitted is not None:
                work.submitted.set()


def _has_ended(work: NcclWork) -> bool:
    return bool(work.event) and is_over(work.event)
