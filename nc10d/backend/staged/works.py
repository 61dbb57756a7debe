"""The Work of a staged launch: over when what it wrote is on the device again."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from nc10d.backend.device_work import DeviceWork
from nc10d.base.deadline import Deadline
from nc10d.cuda.driver import call
from nc10d.ops import Op


class StagedWork(DeviceWork):
    """One launch. `placed` is set when its way back is queued behind `event`, or when it failed."""

    __slots__ = ("_lock", "deadline", "event", "queued")

    blocks = False

    def __init__(self, ops: Sequence[Op], deadline: Deadline) -> None:
        super().__init__(ops)
        self.deadline = deadline
        self.event = 0
        self.queued = threading.Event()
        self._lock = threading.Lock()

    def _await_queued(self) -> None:
        self.queued.wait()

    def result(self) -> Any:
        """Wait for the copies, then return the sender's rank, or the list of outputs."""
        self.wait_blocking()
        return self._value()

    def set_queued(self, event: int) -> None:
        """The way back is queued, and ends with `event`."""
        with self._lock:
            self.event = event
        self.queued.set()

    def block_stream(self, stream: int) -> None:
        """Let a stream wait for the copies back, if they are not over yet."""
        with self._lock:
            if self.event:
                call("cuStreamWaitEvent", stream, self.event, 0)

    def take_event(self) -> int:
        """Return the event, which no stream will be told to wait for any more."""
        with self._lock:
            event, self.event = self.event, 0
        return event

    def end(self, error: BaseException | None, result: Any) -> None:
        """Be over; with an `error`, what it was to write is as it was."""
        self._finish(error, result)
        self.queued.set()
