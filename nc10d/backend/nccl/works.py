"""Works for launches on a device, pending in launch order until their events end.

A Work keeps its arrays until the device has finished with them: a launch looks at earlier Works on
its streams, the watchdog at all. An array's library may free it earlier, once the stream in whose
order that happens waits for the launch, as behind a kernel on that stream. So a synchronous launch
keeps no array whose own current stream waits (`streams.freed_in_stream_order`): CuPy's and torch's
allocators reuse memory in the order of that stream, and nc10d frees on the legacy stream. On a
stream that the user has chosen by `with cuda.stream`, arrays are kept.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TypeAlias

from nc10d.backend.device_work import DeviceWork
from nc10d.backend.nccl.comm.comm_streams import CommStream
from nc10d.backend.nccl.comm.communicator import UNTIL_ABORT_ANYWAY
from nc10d.backend.nccl.launch.launch_cache import CachedLaunch
from nc10d.backend.nccl.watchdog import FAST, SLOW, watchdog
from nc10d.base.deadline import Deadline, monotonic
from nc10d.base.promise import PENDING, NoCallbacks
from nc10d.base.signal_errors import Event, Thread
from nc10d.cuda.driver import EventPool, call, event_done, on_device
from nc10d.cuda.streams import relax_capture_mode
from nc10d.errors import CudaError, DistError
from nc10d.ops import Op, Recv

FEW, MANY = 4, 128
"""With as many pending Works, with arrays and without, a launch finishes the ended ones itself."""
_SPINS = 50  # polls at full speed, before pauses that grow
_FIRST_PAUSE, _LONGEST_PAUSE = 0.00002, 0.001


Queues: TypeAlias = "dict[tuple[CommStream, ...], dict[NcclWork, None]]"
"""Pending Works in launch order, by the streams on which their events end in order."""


class NcclWork(DeviceWork):
    """One launch on a device."""

    # `ops` is empty once the arrays are let go. `event` is 0 before the launch is submitted, after
    # the end, and for a launch in a CUDA graph, which never ends by itself. `due` is the
    # monotonic() by which the launch must have ended.

    __slots__ = (
        *("_owner", "_seconds", "begun", "blocks", "due"),
        *("event", "cached", "numbers", "stamp", "submitted"),
    )

    def __init__(
        self, ops: Sequence[Op], owner: PendingWorks, timeout: float, cached: CachedLaunch
    ) -> None:
        """Make the Work for a cached launch; the timeout, in seconds, runs from now."""
        # Written out in place of super().__init__(ops), because every launch makes a Work.
        self._state = PENDING
        self._exception = None
        self._result = _senders(ops) if cached.receives else None
        self._callbacks = None
        self._finished = None
        self._ended = 0.0
        self.ops = ops
        self._started = now = monotonic()
        self._owner = owner
        self._seconds: float | None = None
        self.due = now + timeout
        self.blocks = cached.blocks
        self.cached = cached  # keeps the memory that the calls use
        self.event = 0
        self.begun = 0
        self.numbers: tuple[int, ...] = ()  # of the last call on each communicator
        self.stamp = 0  # the log entry's
        self.submitted: Event | None = None

    @property
    def deadline(self) -> Deadline:
        """The launch's deadline."""
        return Deadline(self.due)

    def _await_queued(self) -> None:
        if self.submitted is not None:
            self.submitted.wait()

    def block_stream(self, stream: int) -> None:
        """Make a stream wait for the operation, unless it has ended."""
        with self._owner.lock:
            if self.event:
                with on_device(self._owner.device):  # `stream` may be a default stream
                    call("cuStreamWaitEvent", stream, self.event, 0)

    @property
    def duration(self) -> float | None:
        """The seconds that it took: on the device with `timing`, else as the host saw it end."""
        return super().duration if self._seconds is None else self._seconds

    def _describe(self) -> str:
        return self.cached.label

    def _poll(self) -> None:
        event = self.event
        if not event:
            return
        try:
            over = event_done(event)
        except CudaError as error:
            self._owner.fail(error)
            return
        if over:
            self._owner.retire([self])

    def _block(self, deadline: Deadline) -> None:
        looks, pause = 0, _FIRST_PAUSE
        while self._state == PENDING and not deadline.expired():
            self._poll()
            looks += 1
            if looks > _SPINS:  # CUDA can't wake a thread; a failure does
                super()._block(Deadline.after(deadline.slice(pause)))
                pause = min(2 * pause, _LONGEST_PAUSE)

    def _watch(self) -> None:
        self._owner.hurry(self)


class PendingWorks:
    """A group's pending Works, which `fail` fails; `lock` guards them and every launch."""

    def __init__(
        self, pool: EventPool, fail: Callable[[DistError], None], ended: Callable[[int], None]
    ) -> None:
        """`fail` fails the group; `ended` is called with each ended Work's stamp."""
        self.lock = threading.RLock()
        self._pool = pool
        self.device = pool.device
        self.fail = fail
        self._ended = ended
        self._keeping: Queues = {}
        self._light: Queues = {}
        self._hurried: set[NcclWork] = set()
        self._frozen = False
        self._aborted: Event | None = None
        with _groups_lock:
            _groups.add(self)

    def add(self, work: NcclWork, light: bool) -> None:
        """Add a Work, which is finished when the event has ended; a `light` one keeps no arrays."""
        queues, most = (self._light, MANY) if light else (self._keeping, FEW)
        queue = queues.get(work.cached.comm_streams)
        if queue is None:
            queue = queues[work.cached.comm_streams] = {}
        elif len(queue) >= most:
            self._retire_some(list(queue))
        queue[work] = None
        if watchdog.idle:
            watchdog.wake()

    def _retire_some(self, works: list[NcclWork]) -> None:
        """Finish ended Works of a queue, if there are enough to pay for it; run no callbacks."""
        if _has_ended(works[FEW // 2]):
            with NoCallbacks():  # a callback may launch, and the caller has the lock
                self.retire(list(itertools.takewhile(_has_ended, works)))

    def hurry(self, work: NcclWork) -> None:
        """Have the watchdog poll often until a Work ends."""
        with self.lock:
            self._hurried.add(work)
        watchdog.wake()

    def retire(self, works: list[NcclWork], wait: bool = True) -> None:
        """Finish Works whose events have ended; callbacks run without the lock."""
        # A failed NCCL kernel ends as any other: only the communicator has the error.
        if not self.lock.acquire(blocking=wait):
            return
        try:
            if self._frozen or not self._check_communicators(works):
                return
            for work in works:
                for queues in self._keeping, self._light:
                    queues.get(work.cached.comm_streams, {}).pop(work, None)
                self._recycle_events(work)
                self._ended(work.stamp)
        finally:
            self.lock.release()
        for work in works:
            work._finish(None, work._result)

    def _check_communicators(self, works: list[NcclWork]) -> bool:
        try:
            for comm_stream in {each for work in works for each in work.cached.comm_streams}:
                comm_stream.check()
        except DistError as error:
            self._frozen = True
            self.fail(error)
        return not self._frozen

    def freeze(self) -> None:
        """Finish no Work any more: from now on they end by an abort."""
        # Waits at most a second for a thread that launches. Such a thread may be stuck in NCCL, and
        # only the abort frees it.
        self._frozen = True
        if self.lock.acquire(timeout=UNTIL_ABORT_ANYWAY):
            self.lock.release()

    def _recycle_events(self, work: NcclWork) -> None:
        event, begun = work.event, work.begun
        if begun and event:
            work._seconds = self._pool.seconds_between(begun, event)
            self._pool.give(begun, timing=True)
        if event:
            self._pool.give(event, timing=bool(begun))
        work.event = work.begun = 0

    def sweep(self, wait: bool = True) -> None:
        """Finish ended Works; without `wait` return at once while a thread launches."""
        if not self.lock.acquire(blocking=wait):
            return
        try:
            over = self._over()
        finally:
            self.lock.release()
        if over:
            self.retire(over, wait)
        # Other threads may have ended these; this thread runs their callbacks.
        for work in [work for work in self._hurried if work._state != PENDING]:
            self._hurried.discard(work)
            work._finish()

    def _over(self) -> list[NcclWork]:
        """Return the Works whose events have ended; on a stream they end in order."""
        # Usually the latest Work has ended too, so a single query per stream is enough.
        over: list[NcclWork] = []
        for works in filter(None, map(list, self._queues())):
            done = works if _has_ended(works[-1]) else itertools.takewhile(_has_ended, works)
            over += done
        return over

    def _queues(self) -> list[dict[NcclWork, None]]:
        return [*self._keeping.values(), *self._light.values()]

    def _all(self) -> list[NcclWork]:
        """Return all pending Works; any thread may call without the lock."""
        return [work for queue in self._queues() for work in list(queue)]

    def oldest(self) -> list[NcclWork]:
        """Return the oldest pending Work of each queue; any thread may call."""
        return [works[0] for works in map(list, self._queues()) if works]

    def first_calls(self) -> dict[CommStream, int]:
        """Return the number of the first pending call on each communicator; any thread may call."""
        found: dict[CommStream, int] = {}
        for work in self.oldest():
            cached = work.cached
            calls = zip(cached.comm_streams, cached.counts, work.numbers, strict=False)
            for comm_stream, count, last in calls:  # none of a launch that is deferred
                found[comm_stream] = min(last - count + 1, found.get(comm_stream, last))
        return found

    def drain(self, deadline: Deadline) -> None:
        """Block until all pending Works have ended; raises their failure, or CollectiveTimeout."""
        for work in self._all():
            work.wait_blocking(deadline.remaining())

    def late(self) -> NcclWork | None:
        """Return a Work whose deadline has passed."""
        now = monotonic()  # no lock: the late thread may hold the lock
        return next((work for work in self._all() if work.due <= now), None)

    def pause(self) -> float | None:
        """Return the seconds until the next poll, None if no Work is pending."""
        if self._hurried:
            return FAST
        return SLOW if self.busy else None

    @property
    def busy(self) -> bool:
        """Whether any Work is pending."""
        return any(self._queues())

    def end(self, error: DistError, abort: Callable[[], None], deadline: Deadline) -> Event:
        """Fail all pending Works, after `abort` or once nothing touches their arrays any more.

        At the deadline they fail all the same, and the thread that aborts keeps the arrays. Returns
        the event that is set once `abort` has returned.
        """
        relax_capture_mode()  # the thread is one of the group's end
        works, aborted = self._all(), Event()
        self._aborted = aborted
        name = "nc10d-nccl-abort"
        Thread(target=_abort, args=(abort, aborted, works), name=name, daemon=True).start()
        # NCCL's abort stops kernels first, and then may wait long, for example for CUDA graphs.
        while not (aborted.wait(_LONGEST_PAUSE) or deadline.expired() or all(map(_is_over, works))):
            pass
        owned = self.lock.acquire(timeout=UNTIL_ABORT_ANYWAY)  # a thread may be stuck in NCCL
        works, self._keeping, self._light = self._all(), {}, {}
        hurried, self._hurried = self._hurried, set()
        if owned:
            self.lock.release()
        for work in works:
            work.event = work.begun = 0  # not recycled: the device may have failed
            work._finish(error)
            if work.submitted is not None:
                work.submitted.set()
        for work in hurried:  # a launch may have ended them, and left their callbacks
            work._finish()
        return aborted


_groups: weakref.WeakSet[PendingWorks] = weakref.WeakSet()
_groups_lock = threading.Lock()


def ended_later(device: int) -> Callable[[], bool]:
    """Return a function whose result is whether the Works that a device has now have ended."""
    with _groups_lock:
        groups = [group for group in _groups if group.device == device]
    works = [work for group in groups for work in group._all()]
    aborts = [group._aborted for group in groups if group._aborted is not None]
    return lambda: (
        all(work._state != PENDING for work in works) and all(each.is_set() for each in aborts)
    )


def _senders(ops: Sequence[Op]) -> object:
    """Return the value for `result()`: the sender, or a list with each receive's."""
    senders = [op.peer if isinstance(op, Recv) else None for op in ops]
    return senders if len(senders) > 1 else senders[0]


def _abort(abort: Callable[[], None], aborted: Event, kept: list[NcclWork]) -> None:
    """Abort on a thread of its own, which keeps Works' arrays meanwhile."""
    abort()
    aborted.set()


def _is_over(work: NcclWork) -> bool:
    """Return whether no launch of a Work touches arrays any more."""
    try:
        return not work.event or event_done(work.event)
    except CudaError:  # the device has failed
        return True


def _has_ended(work: NcclWork) -> bool:
    return bool(work.event) and event_done(work.event)
