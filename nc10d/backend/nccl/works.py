"""The Work of a launch on a device: it ends with an event, for which streams can wait."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

from nc10d.backend.device_work import DeviceWork
from nc10d.base.deadline import Deadline
from nc10d.base.promise import PENDING
from nc10d.cuda.events import event_done, seconds_between
from nc10d.errors import CudaError
from nc10d.ops import Op, Recv

if TYPE_CHECKING:
    from nc10d.backend.nccl.comm.comm_streams import CommStream
    from nc10d.backend.nccl.launch.launch_cache import CachedLaunch

_SPINS = 50  # polls at full speed, before pauses that grow
_FIRST_PAUSE, _LONGEST_PAUSE = 0.00002, 0.001


class WorkOwner:
    """The backend that launched a Work, as the Work uses it."""

    lock: threading.RLock

    def retire(self, work: NcclWork) -> None:
        """Recycle the events of a Work, and finish it."""

    def hurry(self, work: NcclWork) -> None:
        """Finish a Work soon after it ends, because it has a callback."""

    def let_wait(self, stream: int, event: int) -> None:
        """Make a stream wait for an event."""

    def fail(self, error: CudaError) -> None:
        """Fail the group: the device has failed."""


class NcclWork(DeviceWork):
    """One launch on a device.

    It keeps its arrays until the device has finished with them. `event` is 0 before the launch is
    submitted, after it has ended, and for a launch in a CUDA graph, which never ends by itself.
    `due` is the time.monotonic() by which it must have ended.
    """

    __slots__ = (
        *("_owner", "_seconds", "begun", "blocks", "due"),
        *("event", "comm_streams", "cached", "seq", "submitted"),
    )

    def __init__(
        self, ops: Sequence[Op], owner: WorkOwner, timeout: float, cached: CachedLaunch
    ) -> None:
        """Make the Work of a cached launch; the timeout, in seconds, runs from now."""
        # Written out instead of super().__init__(ops), because every launch makes a Work.
        self._state = PENDING
        self._exception = None
        self._result = None
        self._callbacks = None
        self._finished = None
        self._ended = 0.0
        self.ops = ops
        # This clock is time.monotonic() on Linux: a single call serves both.
        self._started = now = perf_counter()
        self._owner = owner
        self._seconds: float | None = None
        self.due = now + timeout
        self.blocks = cached.blocks
        self.cached = cached  # keeps the memory that its calls use
        self.event = 0
        self.begun = 0
        self.seq = 0
        self.comm_streams: tuple[CommStream, ...] = ()
        self.submitted: threading.Event | None = None

    @property
    def deadline(self) -> Deadline:
        """The deadline of the launch."""
        return Deadline(self.due)

    def _await_queued(self) -> None:
        if self.submitted is not None:
            self.submitted.wait()

    def block_stream(self, stream: int) -> None:
        """Make a stream wait for the operation, unless it has ended."""
        with self._owner.lock:
            if self.event:
                self._owner.let_wait(stream, self.event)

    def result(self) -> Any:
        """Wait as `wait()` does, then return the sender's rank, or the list of outputs."""
        self.wait()
        return self._value()

    @property
    def duration(self) -> float | None:
        """The seconds that it took: on the device with `timing`, else as the host saw it end."""
        return super().duration if self._seconds is None else self._seconds

    def measure(self) -> None:
        """Record the device's time between both events, which have ended."""
        self._seconds = seconds_between(self.begun, self.event)

    def outcome(self) -> Any:
        """Return the value of `result()`: the sender, a list of senders, or None."""
        if not self.cached.receives:
            return None
        senders = [op.peer if isinstance(op, Recv) else None for op in self.ops]
        return senders if len(senders) > 1 else senders[0]

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
            self._owner.retire(self)

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
