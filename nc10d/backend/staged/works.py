"""The Work of a staged launch: over when what it wrote is on the device again."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from nc10d.backend.staged.access import arrays_of
from nc10d.cuda.driver import call
from nc10d.cuda.streams import stream_of
from nc10d.deadline import Deadline, Timeout
from nc10d.ops import Op
from nc10d.outcome import FAILED, fresh
from nc10d.work import Work


class StagedWork(Work):
    """One launch. `placed` is set when its way back is queued behind `event`, or when it failed."""

    __slots__ = ("_lock", "deadline", "event", "placed")

    def __init__(self, ops: Sequence[Op], deadline: Deadline) -> None:
        super().__init__(ops)
        self.deadline = deadline
        self.event = 0
        self.placed = threading.Event()
        self._lock = threading.Lock()

    def wait(self, timeout: Timeout = None) -> bool:
        """Block until the other ranks' part is there, and put the copy back in front of what is
        queued next on the current stream; return True.

        With `timeout` (seconds or timedelta) the host waits for the copy, too, as `wait_blocking`
        does. Raises what made the operation fail.
        """
        if timeout is not None:
            return self.wait_blocking(timeout)
        self.join(stream_of(first_array(self.ops)))
        return True

    def wait_blocking(self, timeout: Timeout = None) -> bool:
        """Block the host until the operation is over; see Work.wait."""
        return super().wait(timeout)

    def synchronize(self) -> None:
        """Do as `wait()`."""
        self.wait()

    def block_current_stream(self) -> None:
        """Do as `wait()`: the host has a part in the operation, so it has to wait for that."""
        self.wait()

    def join(self, stream: int) -> None:
        """Block until the way back is queued, and let a stream wait for it."""
        self.placed.wait()
        if self._state == FAILED:
            assert self._exception is not None
            raise fresh(self._exception)
        self.order(stream)

    def result(self) -> Any:
        """Wait for the copies, then return the sender's rank, or the list of outputs."""
        self.wait_blocking()
        return self._value()

    def place(self, event: int) -> None:
        """The way back is queued, and ends with `event`."""
        with self._lock:
            self.event = event
        self.placed.set()

    def order(self, stream: int) -> None:
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
        self.placed.set()


def first_array(ops: Sequence[Op]) -> Any:
    """Return an array of a launch, which tells whose stream counts; None if there is none."""
    return next((x for op in ops for x in arrays_of(op)), None)
