"""Events: points in streams, kept in a pool for each device because making one is slow."""

from __future__ import annotations

import functools

from nc10d.cuda.driver import NOT_READY, SUCCESS, call, describe, driver, on_device
from nc10d.errors import CudaError


class EventPool:
    """The free events of one device, by handle; those with timing apart.

    Whoever takes one gives it back when nothing waits for it any more, and never while it belongs
    to a captured graph. A list is enough: its `pop` and `append` are atomic.
    """

    def __init__(self, device: int) -> None:
        self.device = device
        self._free: dict[bool, list[int]] = {False: [], True: []}

    def take(self, timing: bool = False) -> int:
        """Return an event that nobody else uses."""
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


def is_over(event: int) -> bool:
    """Say whether a stream has come past an event; CudaError if the device has failed."""
    (code,) = driver().cuEventQuery(event)
    if code == SUCCESS:
        return True
    if code == NOT_READY:
        return False
    raise CudaError(f"cuEventQuery: {describe(int(code))}", code=int(code))


def seconds_between(start: int, end: int) -> float:
    """Return the seconds from one timing event to another; both are over."""
    return float(call("cuEventElapsedTime", start, end)) / 1000.0
