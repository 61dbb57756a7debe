"""A group's copies on one device, and a launch's Work, which ends with the last copy.

Each direction has a stream, because copies to the host wait for the caller's work, and copies to
the device must not.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from nc10d.backend.device_work import DeviceWork
from nc10d.backend.staged.pinned import pinned_pool
from nc10d.backend.staged.staging import Staging
from nc10d.base.deadline import NEVER, Deadline
from nc10d.base.signal_errors import Event
from nc10d.cuda.driver import call, event_done, event_pool, on_device
from nc10d.cuda.streams import Stream, is_captured
from nc10d.errors import UnsupportedPlatform
from nc10d.ops import Op

_SPINS = 50  # polls at full speed, before pauses that grow
_FIRST_PAUSE, _LONGEST_PAUSE = 0.00002, 0.001


class StagedWork(DeviceWork):
    """One launch. `queued` is set when `event` follows the copies to the device, or on failure."""

    __slots__ = ("_device", "_lock", "deadline", "event", "queued")

    blocks = False

    def __init__(self, ops: Sequence[Op], deadline: Deadline) -> None:
        super().__init__(ops)
        self.deadline = deadline
        self.event, self._device = 0, 0
        self.queued = Event()
        self._lock = threading.Lock()

    def _await_queued(self) -> None:
        self.queued.wait()

    def result(self) -> object:
        """Wait for the copies, then return the sender's rank, or the list of outputs."""
        self.wait_blocking()
        return self._value()

    def set_queued(self, event: int, device: int) -> None:
        """Record that the copies to the device are queued, and followed by `event`."""
        with self._lock:
            self.event, self._device = event, device
        self.queued.set()

    def block_stream(self, stream: int) -> None:
        """Make a stream wait for the copies to the device, unless they have ended."""
        with self._lock:
            if self.event:
                with on_device(self._device):  # `stream` may be a default stream
                    call("cuStreamWaitEvent", stream, self.event, 0)

    def take_event(self) -> int:
        """Return the event; no stream will wait for it any more."""
        with self._lock:
            event, self.event = self.event, 0
        return event

    def end(self, error: BaseException | None, result: object) -> None:
        """Finish the work; after an `error` the arrays have their old values."""
        self._finish(error, result)
        self.queued.set()


class Copies:
    """Queues copies and waits for them; waits for a caller's work end when `closing` is set."""

    def __init__(self, device: int, closing: Event) -> None:
        self.device = device
        self._down_stream, self._up_stream = Stream(device), Stream(device)
        self._pool = pinned_pool(device)
        self._closing = closing
        self._events = event_pool(device)

    def record_event(self, stream: int) -> int:
        """Return an event recorded after the work that is queued on the caller's stream now."""
        if is_captured(stream, self.device):
            raise UnsupportedPlatform(
                "the staged backend can't be captured into a CUDA graph, because the host "
                "has a part in every operation: use nccl"
            )
        with on_device(self.device):
            event = self._events.take()
            call("cuEventRecord", event, stream)
        return event

    def wait_for_copies_of(self, work: StagedWork) -> None:
        """Make copies to the host wait for an earlier launch's copies to the device."""
        work.block_stream(self._down_stream.handle)

    def copy_down(self, staging: Staging, event: int, deadline: Deadline) -> bool:
        """Copy the arrays that are read to the host, after `event`; return False if it is late."""
        with on_device(self.device):
            call("cuStreamWaitEvent", self._down_stream.handle, event, 0)
            staging.copy_down(self._pool, self._down_stream.handle)
            call("cuEventRecord", event, self._down_stream.handle)
            reached = _wait_for_event(event, deadline, self._closing)
        if reached:
            self._events.give(event)
        return reached

    def copy_up(self, staging: Staging, work: StagedWork) -> None:
        """Queue the copies of written arrays to the device, and mark `work` as queued."""
        with on_device(self.device):
            event = self._events.take()
            staging.copy_up(self._up_stream.handle)
            call("cuEventRecord", event, self._up_stream.handle)
        work.set_queued(event, self.device)

    def wait_until_copied(self, work: StagedWork) -> None:
        """Wait until the copies of a queued work end, and recycle the event."""
        with on_device(self.device):
            _wait_for_event(work.event, NEVER, Event())
        self._events.give(work.take_event())


def _wait_for_event(event: int, deadline: Deadline, stop: Event) -> bool:
    """Wait until a stream has passed an event; False at the deadline, or when `stop` is set."""
    polls, pause = 0, _FIRST_PAUSE
    while not event_done(event):
        if deadline.expired() or stop.is_set():
            return False
        polls += 1
        if polls > _SPINS:  # CUDA can't wake a thread
            stop.wait(deadline.slice(pause))
            pause = min(2 * pause, _LONGEST_PAUSE)
    return True
