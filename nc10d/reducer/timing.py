"""When the parts of a pass happened: on the host's clock, and on a device's if gradients lie there.

Contract: nothing here blocks but `Stopwatch.durations`, which a device may keep waiting. Host
moments are those of time.perf_counter_ns; one that is not known is 0, and so is a duration that
needs it. Names and meanings are those of c10d's timers.
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
"""From when to when each part lasts."""


@dataclass(frozen=True, slots=True)
class PassTimes:
    """One pass, in ns; `ready` says for each gradient when it came, since the backward began."""

    forward_start: int
    backward_start: int
    ready: Sequence[int]
    comm_start: int
    comm_end: int

    @classmethod
    def of_none(cls, count: int) -> PassTimes:
        """Return the times of no pass, for `count` gradients."""
        return cls(0, 0, [0] * count, 0, 0)

    @property
    def backward_end(self) -> int:
        """When the last gradient came."""
        return self.backward_start + max(self.ready, default=0)

    def at(self, moment: Moment) -> int:
        """Return a moment, 0 if it is not known."""
        return {
            Moment.FORWARD_START: self.forward_start,
            Moment.BACKWARD_START: self.backward_start,
            Moment.BACKWARD_END: self.backward_end,
            Moment.COMM_START: self.comm_start,
            Moment.COMM_END: self.comm_end,
        }[moment]

    def durations(self) -> dict[str, int]:
        """Return how long the parts took, by c10d's names, in ns."""
        return {name: _between(self.at(a), self.at(b)) for name, (a, b) in PARTS.items()}

    def moments(self) -> dict[str, int]:
        """Return when the parts began and ended, by c10d's names."""
        return {moment.value: self.at(moment) for moment in Moment}


def _between(start: int, end: int) -> int:
    return max(0, end - start) if start and end else 0


class TimingRecorder(Protocol):
    """Another clock that takes note of moments: a device's."""

    def record(self, moment: Moment) -> None:
        """Take note that a moment is now, for what is queued; never blocks."""

    def durations(self) -> dict[str, int]:
        """Return how long the parts took, in ns; may block until the device has come so far."""


class Stopwatch:
    """The times of one pass after another: `last` is the one that has ended."""

    def __init__(self, count: int, device: TimingRecorder | None = None) -> None:
        self.last = PassTimes.of_none(count)
        self._device = device
        self._forward = 0

    def record(self, moment: Moment) -> None:
        """Take note that a moment of the pass is now."""
        if moment is Moment.FORWARD_START:
            self._forward = perf_counter_ns()
        if self._device is not None:
            self._device.record(moment)

    def ended(self, began: int, ready: Sequence[int], left: int) -> None:
        """Take note that a pass has ended; see PassTimes."""
        self.last = PassTimes(self._forward, began, ready, left, perf_counter_ns())
        self._forward = 0

    def durations(self) -> dict[str, int]:
        """Return how long the parts of the last pass took, by the device's clock if there is one.

        That is asked before the next pass begins, and blocks until the device is through.
        """
        return self.last.durations() if self._device is None else self._device.durations()
