"""Events: points in streams, kept in a pool for each device because creating them is slow."""

from __future__ import annotations

import functools

from nc10d.cuda.driver import NOT_READY, SUCCESS, call, describe, driver, on_device
from nc10d.errors import CudaError


class EventPool:
    """The free events of a device, by handle; events with timing are kept separately.

    The caller that takes an event gives it back once nothing waits for it any more, and never while
    it belongs to a captured graph. Thread-safe, because a list's `pop` and `append` are atomic.
    """

    def __init__(self, device: int) -> None:
        self.device = device
        self._free: dict[bool, list[int]] = {False: [], True: []}

    def take(self, timing: bool = False) -> int:
        """Return the handle of an unused event."""
        try:
            return self._free[timing].pop()
        except IndexError:
            return self._make(timing)

    def give(self, event: int, timing: bool = False) -> None:
        """Take an event back."""
        self._free[timing].append(event)

    def _make(self, timing: bool) -> int:
        flags = driver().CUevent_flags
        flag = flags.CU_EVENT_DEFAULT if timing else flags.CU_EVENT_DISABLE_TIMING
        with on_device(self.device):
            return int(call("cuEventCreate", flag))


@functools.cache
def event_pool(device: int) -> EventPool:
    """Return the pool of a device."""
    return EventPool(device)


def event_done(event: int) -> bool:
    """Return whether the stream has passed an event; CudaError if the device has failed."""
    (code,) = driver().cuEventQuery(event)
    if code == SUCCESS:
        return True
    if code == NOT_READY:
        return False
    raise CudaError(f"cuEventQuery: {describe(int(code))}", code=int(code))


def seconds_between(start: int, end: int) -> float:
    """Return the seconds between two timing events; both must be done."""
    return float(call("cuEventElapsedTime", start, end)) / 1000.0
