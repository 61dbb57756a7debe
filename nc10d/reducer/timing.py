"""Time the parts of a pass: on the host's clock, and on a device's if the gradients are there.

Contract: only `Stopwatch.durations` may block, until a device has finished the pass. Host moments
are those of time.perf_counter_ns. An unknown moment is 0, and so is a duration that needs it. Names
and meanings are those of c10d's timers.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Protocol


class Moment(enum.Enum):
    """The moments of a pass, by c10d's names."""

    FORWARD_START = "forward_compute_time_start"
    BACKWARD_START = "backward_compute_time_start"
    BACKWARD_END = "backward_compute_time_end"
    COMM_START = "backward_comm_time_start"
    COMM_END = "backward_comm_time_end"


PARTS = {
    "forward_compute_time": (Moment.FORWARD_START, Moment.BACKWARD_START),
    "backward_compute_time": (Moment.BACKWARD_START, Moment.BACKWARD_END),
    "backward_comm_time": (Moment.COMM_START, Moment.COMM_END),
    "backward_compute_comm_overlap_time": (Moment.COMM_START, Moment.BACKWARD_END),
}
"""The start and the end of each part."""


@dataclass(frozen=True, slots=True)
class PassTimes:
    """The moments of a pass in ns; `ready` has each gradient's arrival, relative to the start."""

    forward_start: int
    backward_start: int
    ready: Sequence[int]
    comm_start: int
    comm_end: int

    def moments(self) -> dict[Moment, int]:
        """Return all moments; a pass ends with the arrival of its last gradient."""
        return {
            Moment.FORWARD_START: self.forward_start,
            Moment.BACKWARD_START: self.backward_start,
            Moment.BACKWARD_END: self.backward_start + max(self.ready, default=0),
            Moment.COMM_START: self.comm_start,
            Moment.COMM_END: self.comm_end,
        }

    def durations(self) -> dict[str, int]:
        """Return the duration of each part in ns, by c10d's names."""
        at = self.moments()
        return {name: _between(at[start], at[end]) for name, (start, end) in PARTS.items()}


def _between(start: int, end: int) -> int:
    return max(0, end - start) if start and end else 0


class TimingRecorder(Protocol):
    """A second clock that records moments, such as a device's."""

    def record(self, moment: Moment) -> None:
        """Record that the work queued so far reaches this moment; never blocks."""

    def durations(self) -> dict[str, int]:
        """Return the duration of each part in ns; may block until the device gets there."""


class Stopwatch:
    """Times each pass in turn; `last` has the times of the last finished pass."""

    def __init__(self, count: int, device: TimingRecorder | None = None) -> None:
        self.last = PassTimes(0, 0, [0] * count, 0, 0)
        self._device = device
        self._forward = 0

    def record(self, moment: Moment) -> None:
        """Record that the pass reaches this moment now."""
        if moment is Moment.FORWARD_START:
            self._forward = perf_counter_ns()
        if self._device is not None:
            self._device.record(moment)

    def ended(self, began: int, ready: Sequence[int], first_launch: int) -> None:
        """Record the end of a pass; see PassTimes."""
        self.last = PassTimes(self._forward, began, ready, first_launch, perf_counter_ns())
        self._forward = 0

    def durations(self) -> dict[str, int]:
        """Return the duration of each part of the last pass in ns, by the device's clock if any.

        With a device, call it before the next pass begins; it blocks until the device has finished.
        """
        return self.last.durations() if self._device is None else self._device.durations()
