"""When the parts of a pass happened, on the clock of time.perf_counter_ns. Pure.

A moment that is not known is 0, and so is a duration that needs it. Names and meanings are those
of c10d's timers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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

    def durations(self) -> dict[str, int]:
        """Return how long the parts took, by c10d's names, in ns."""
        return {
            "forward_compute_time": _between(self.forward_start, self.backward_start),
            "backward_compute_time": _between(self.backward_start, self.backward_end),
            "backward_comm_time": _between(self.comm_start, self.comm_end),
            "backward_compute_comm_overlap_time": _between(self.comm_start, self.backward_end),
        }

    def moments(self) -> dict[str, int]:
        """Return when the parts began and ended, by c10d's names."""
        return {
            "forward_compute_time_start": self.forward_start,
            "backward_compute_time_start": self.backward_start,
            "backward_compute_time_end": self.backward_end,
            "backward_comm_time_start": self.comm_start,
            "backward_comm_time_end": self.comm_end,
        }


def _between(start: int, end: int) -> int:
    return max(0, end - start) if start and end else 0
