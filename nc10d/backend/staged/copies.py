"""A group's copies on one device: a stream for each direction, and waiting for what is queued.

Two streams, because what goes down waits for the caller's work, and what comes up must not.
"""

from __future__ import annotations

import threading

from nc10d.backend.staged.pinned import pinned_pool
from nc10d.backend.staged.staging import Staging
from nc10d.backend.staged.works import StagedWork
from nc10d.base.deadline import NEVER, Deadline
from nc10d.cuda.driver import call, on_device
from nc10d.cuda.events import event_pool, is_over
from nc10d.cuda.streams import Stream
from nc10d.errors import UnsupportedPlatform

_SPINS = 50  # looks at full speed, then looks that grow apart
_FIRST_PAUSE, _LONGEST_PAUSE = 0.00002, 0.001


class Copies:
    """Queues copies and waits for them; waits for a caller's work end when `closing` is set."""

    def __init__(self, device: int, closing: threading.Event) -> None:
        self.device = device
        self._down_stream, self._up_stream = Stream(device), Stream(device)
        self._pool = pinned_pool(device)
        self._closing = closing
        self._events = event_pool(device)

    def record_event(self, stream: int) -> int:
        """Return an event behind what is queued on the caller's stream now."""
        with on_device(self.device):
            if call("cuStreamIsCapturing", stream):
                raise UnsupportedPlatform(
                    "the staged backend can't be captured into a CUDA graph, because the host "
                    "has a part in every operation: use nccl"
                )
            event = self._events.take()
            call("cuEventRecord", event, stream)
        return event

    def wait_for_copies_of(self, work: StagedWork) -> None:
        """Let the copies down wait for what an earlier launch puts back."""
        work.block_stream(self._down_stream.handle)

    def copy_down(self, staging: Staging, event: int, deadline: Deadline) -> bool:
        """Copy what is read to the host, behind the event; False if that is not there in time."""
        with on_device(self.device):
            call("cuStreamWaitEvent", self._down_stream.handle, event, 0)
            staging.copy_down(self._pool, self._down_stream.handle)
            call("cuEventRecord", event, self._down_stream.handle)
            reached = _wait_for_event(event, deadline, self._closing)
        if reached:
            self._events.give(event)
        return reached

    def copy_up(self, staging: Staging, work: StagedWork) -> None:
        """Queue the copies of what was written to the device; `work` is placed then."""
        with on_device(self.device):
            event = self._events.take()
            staging.copy_up(self._up_stream.handle)
            call("cuEventRecord", event, self._up_stream.handle)
        work.set_queued(event)

    def wait_until_copied(self, work: StagedWork) -> None:
        """Wait until what was queued for a placed work is over, and take its event back."""
        with on_device(self.device):
            _wait_for_event(work.event, NEVER, threading.Event())
        self._events.give(work.take_event())


def _wait_for_event(event: int, deadline: Deadline, stop: threading.Event) -> bool:
    """Wait until a stream is past an event; False at the deadline, or when `ending` is set."""
    polls, pause = 0, _FIRST_PAUSE
    while not is_over(event):
        if deadline.expired() or stop.is_set():
            return False
        polls += 1
        if polls > _SPINS:  # CUDA wakes nobody
            stop.wait(deadline.slice(pause))
            pause = min(2 * pause, _LONGEST_PAUSE)
    return True
