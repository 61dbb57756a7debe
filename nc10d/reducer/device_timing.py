"""The parts of a pass as a device goes through them: events on the current stream.

Contract: a `timing.Recorder`. A pass's computations are queued long before they run, so the host's
clock says nothing of how long they take. `record` queues an event on the recording thread's current
stream and does not block; `durations` blocks until the device has come to the last of them.
"""

from __future__ import annotations

import weakref
from typing import Any

from nc10d.cuda.driver import call, on_device
from nc10d.cuda.events import event_pool, seconds_between
from nc10d.cuda.memory import device_of
from nc10d.cuda.streams import stream_of
from nc10d.reducer.timing import PARTS, Moment


class DeviceTimer:
    """The moments of a pass on the device of `x`, an array of the framework that computes."""

    def __init__(self, x: Any) -> None:
        self._x = x
        self._device = device_of(x)
        self._recorded: set[Moment] = set()
        pool = event_pool(self._device)
        self._events = {moment: pool.take(timing=True) for moment in Moment}
        for event in self._events.values():
            weakref.finalize(self, pool.give, event, timing=True)

    def record(self, moment: Moment) -> None:
        """Queue a moment; the first one behind COMM_END begins another pass."""
        if Moment.COMM_END in self._recorded:
            self._recorded.clear()
        with on_device(self._device):
            call("cuEventRecord", self._events[moment], stream_of(self._x))
        self._recorded.add(moment)

    def durations(self) -> dict[str, int]:
        """Return how long the parts of the pass took, in ns; 0 without one of its moments."""
        for moment in self._recorded:
            call("cuEventSynchronize", self._events[moment])
        return {name: self._between(*part) for name, part in PARTS.items()}

    def _between(self, start: Moment, end: Moment) -> int:
        if not {start, end} <= self._recorded:
            return 0
        seconds = seconds_between(self._events[start], self._events[end])
        return max(0, round(1e9 * seconds))
