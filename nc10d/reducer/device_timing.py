"""The durations of a pass on a device, measured by events on the current stream.

Contract: the host enqueues computations long before they run, so its clock does not measure their
duration. `record` enqueues an event on the calling thread's current stream and does not block.
`durations` blocks until the device has reached the last event.
"""

from __future__ import annotations

import weakref
from typing import Any

from nc10d.cuda.driver import call, event_pool, on_device, seconds_between
from nc10d.cuda.memory import device_of
from nc10d.cuda.streams import stream_of
from nc10d.reducer.timing import PARTS, Moment


class DeviceTimer:
    """Records the moments of a pass on the device of `x`, an array of the user's framework."""

    def __init__(self, x: Any) -> None:
        self._x = x
        self._device = device_of(x)
        self._recorded: set[Moment] = set()
        pool = event_pool(self._device)
        self._events = {moment: pool.take(timing=True) for moment in Moment}
        for event in self._events.values():
            weakref.finalize(self, pool.give, event, timing=True)

    def record(self, moment: Moment) -> None:
        """Enqueue an event for a moment; the first moment after COMM_END begins a new pass."""
        if Moment.COMM_END in self._recorded:
            self._recorded.clear()
        with on_device(self._device):
            call("cuEventRecord", self._events[moment], stream_of(self._x))
        self._recorded.add(moment)

    def durations(self) -> dict[str, int]:
        """Return the duration of each part in ns; 0 if its start or end was not recorded."""
        for moment in self._recorded:
            call("cuEventSynchronize", self._events[moment])
        return {name: self._between(*part) for name, part in PARTS.items()}

    def _between(self, start: Moment, end: Moment) -> int:
        if not {start, end} <= self._recorded:
            return 0
        seconds = seconds_between(self._events[start], self._events[end])
        return max(0, round(1e9 * seconds))
