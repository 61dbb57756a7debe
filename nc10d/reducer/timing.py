"""A pass's moments and the durations of its parts, by c10d's timer names.

On the host, monotonic_ns gives the moments. A host enqueues a device's computations long before
they run, so there a DeviceTimer measures by events. A duration is 0 if a moment is unknown.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

from nc10d.cuda.driver import call, event_pool, on_device
from nc10d.cuda.memory import device_of
from nc10d.cuda.streams import stream_of
from nc10d.ops import Array


class Moment(enum.Enum):
    """A pass's moments, by c10d's names."""

    FORWARD_START = "forward_compute_time_start"
    BACKWARD_START = "backward_compute_time_start"
    BACKWARD_END = "backward_compute_time_end"
    COMM_START = "backward_comm_time_start"
    COMM_END = "backward_comm_time_end"

    __hash__ = object.__hash__  # Enum's own is Python code, and members are keys in every pass


PARTS = {
    "forward_compute_time": (Moment.FORWARD_START, Moment.BACKWARD_START),
    "backward_compute_time": (Moment.BACKWARD_START, Moment.BACKWARD_END),
    "backward_comm_time": (Moment.COMM_START, Moment.COMM_END),
    "backward_compute_comm_overlap_time": (Moment.COMM_START, Moment.BACKWARD_END),
}
"""Each part's start and end."""


@dataclass(frozen=True, slots=True)
class PassTimes:
    """A pass's moments in ns; `ready` has each gradient's arrival, relative to the start."""

    forward_start: int
    backward_start: int
    ready: Sequence[int]
    comm_start: int
    comm_end: int

    def moments(self) -> dict[Moment, int]:
        """Return all moments; a pass ends when the last gradient arrives."""
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


class DeviceTimer:
    """Records a pass's moments on the device of `x`, an array of the user's framework."""

    def __init__(self, x: Array) -> None:
        self._x = x
        self._device = device_of(x)
        self._recorded: set[Moment] = set()
        self._pool = pool = event_pool(self._device)
        self._events = {moment: pool.take(timing=True) for moment in Moment}
        for event in self._events.values():
            weakref.finalize(self, pool.give, event, timing=True)

    def record(self, moment: Moment) -> None:
        """Enqueue an event on the current stream; the first after COMM_END begins a new pass."""
        if Moment.COMM_END in self._recorded:
            self._recorded.clear()
        with on_device(self._device):
            call("cuEventRecord", self._events[moment], stream_of(self._x))
        self._recorded.add(moment)

    def durations(self) -> dict[str, int]:
        """Return the duration of each part in ns; blocks until the device has passed the events."""
        for moment in self._recorded:
            self._pool.synchronize(self._events[moment])
        return {name: self._between(*part) for name, part in PARTS.items()}

    def _between(self, start: Moment, end: Moment) -> int:
        if not {start, end} <= self._recorded:
            return 0
        seconds = self._pool.seconds_between(self._events[start], self._events[end])
        return max(0, round(1e9 * seconds))
