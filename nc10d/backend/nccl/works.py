"""The Work of a launch on a device: what an event says, and how streams wait for it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

from nc10d.backend.device_work import DeviceWork
from nc10d.base.deadline import Deadline
from nc10d.base.outcome import PENDING
from nc10d.cuda.events import is_over, seconds_between
from nc10d.errors import CudaError
from nc10d.ops import Op, Recv

if TYPE_CHECKING:
    from nc10d.backend.nccl.comm.comm_streams import CommStream
    from nc10d.backend.nccl.launch.launch_cache import CachedLaunch

_SPINS = 50  # looks at full speed, then looks that grow apart
_FIRST_PAUSE, _LONGEST_PAUSE = 0.00002, 0.001


class WorkOwner:
    """What a Work needs of the backend that launched it."""

    lock: threading.RLock

    def retire(self, work: NcclWork) -> None:
        """Take the events of a Work back, and finish it."""

    def hurry(self, work: NcclWork) -> None:
        """See to it soon that a Work is finished: somebody has attached a callback."""

    def let_wait(self, stream: int, event: int) -> None:
        """Let a stream wait for an event."""

    def fail(self, error: CudaError) -> None:
        """End the group: the device has failed."""


class NcclWork(DeviceWork):
    """One launch on a device.

    It keeps its arrays until the device is past them. `event` is 0 before it is submitted, after it
    is over, and for a launch that is part of a CUDA graph, which never ends by itself. `due` is the
    time.monotonic() by which it must have ended.
    """

    __slots__ = (
        *("_owner", "_seconds", "begun", "blocks", "due"),
        *("event", "comm_streams", "cached", "seq", "submitted"),
    )

    def __init__(
        self, ops: Sequence[Op], owner: WorkOwner, timeout: float, cached: CachedLaunch
    ) -> None:
        """Describe a launch as its recipe has it; the timeout, in seconds, runs from now."""
        # Written out instead of super().__init__(ops): one of these is made per launch.
        self._state = PENDING
        self._exception = None
        self._result = None
        self._callbacks = None
        self._gate = None
        self._ended = 0.0
        self.ops = ops
        # This clock is time.monotonic() on Linux: one call serves both.
        self._started = now = perf_counter()
        self._owner = owner
        self._seconds: float | None = None
        self.due = now + timeout
        self.blocks = cached.blocks
        self.cached = cached  # with what its calls use, as long as they are under way
        self.event = 0
        self.begun = 0
        self.seq = 0
        self.comm_streams: tuple[CommStream, ...] = ()
        self.submitted: threading.Event | None = None

    @property
    def deadline(self) -> Deadline:
        """By when it must have ended."""
        return Deadline(self.due)

    def _await_queued(self) -> None:
        if self.submitted is not None:
            self.submitted.wait()

    def block_stream(self, stream: int) -> None:
        """Let a stream wait for the operation, if it is under way."""
        with self._owner.lock:
            if self.event:
                self._owner.let_wait(stream, self.event)

    def result(self) -> Any:
        """Wait as `wait()` does, then return the sender's rank, or the list of outputs."""
        self.wait()
        return self._value()

    @property
    def duration(self) -> float | None:
        """The seconds that it took: of the device with `timing`, else as the host saw it end."""
        return super().duration if self._seconds is None else self._seconds

    def measure(self) -> None:
        """Note how long the device took; both events are over."""
        self._seconds = seconds_between(self.begun, self.event)

    def outcome(self) -> Any:
        """Return what `result()` answers with: the sender, a list of them, or None."""
        if not self.cached.receives:
            return None
        senders = [op.peer if isinstance(op, Recv) else None for op in self.ops]
        return senders if len(senders) > 1 else senders[0]

    def _poll(self) -> None:
        event = self.event
        if not event:
            return
        try:
            over = is_over(event)
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
            if looks > _SPINS:  # CUDA wakes nobody; a failure does
                super()._block(Deadline.after(deadline.slice(pause)))
                pause = min(2 * pause, _LONGEST_PAUSE)

    def _watch(self) -> None:
        self._owner.hurry(self)
