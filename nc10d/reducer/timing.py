"""The moments of a pass and the durations of its parts, by the names of c10d's timers.

Contract: pure. Moments are those of time.perf_counter_ns. An unknown moment is 0, and so is a
duration that needs it.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass


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
