"""The Work of a staged launch: it ends when the written arrays are on the device again."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from nc10d.backend.device_work import DeviceWork
from nc10d.base.deadline import Deadline
from nc10d.cuda.driver import call
from nc10d.ops import Op


class StagedWork(DeviceWork):
    """One launch. `queued` is set when `event` follows its copies to the device, or on failure."""

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
        """Record that the copies to the device are queued, and followed by `event`."""
        with self._lock:
            self.event = event
        self.queued.set()

    def block_stream(self, stream: int) -> None:
        """Make a stream wait for the copies to the device, unless they have ended."""
        with self._lock:
            if self.event:
                call("cuStreamWaitEvent", stream, self.event, 0)

    def take_event(self) -> int:
        """Return the event; no stream will wait for it any more."""
        with self._lock:
            event, self.event = self.event, 0
        return event

    def end(self, error: BaseException | None, result: Any) -> None:
        """Finish the work; after an `error` its arrays have their old values."""
        self._finish(error, result)
        self.queued.set()
