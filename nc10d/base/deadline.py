"""The point in time by which a call must end; passed unchanged through every layer.

The public API takes timeouts (seconds or timedelta, relative). Every layer below takes a Deadline
(absolute, on the monotonic clock), so that a call with several waits still ends on time.

The package reads clocks by the functions of this module alone.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from numbers import Real

Timeout = float | int | timedelta | None


# Libraries of test suites stop Python's time.monotonic() and its kin, and peers do not wait.
monotonic = partial(time.clock_gettime, time.CLOCK_MONOTONIC)
"""Return the monotonic clock, in seconds."""
monotonic_ns = partial(time.clock_gettime_ns, time.CLOCK_MONOTONIC)
"""Return the monotonic clock, in ns."""
time_of_day_ns = partial(time.clock_gettime_ns, time.CLOCK_REALTIME)
"""Return the time of day, in ns since 1970 (UTC)."""


def seconds(timeout: Timeout) -> float:
    """Return `timeout` in seconds; None means for ever. ValueError if negative or NaN."""
    if timeout is None:
        return math.inf
    if isinstance(timeout, bool) or not isinstance(timeout, (Real, timedelta)):
        wanted = "a number of seconds, a timedelta or None"
        raise TypeError(f"timeout must be {wanted}, got {timeout!r}")
    value = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    if not value >= 0:
        raise ValueError(f"timeout must be >= 0 seconds, got {timeout!r}")
    return value


@dataclass(slots=True)  # not frozen: each call would pay for that
class Deadline:
    """An absolute time, in seconds of `monotonic`; math.inf means never.

    `limit` is the original timeout, for error texts; math.inf if unknown.
    """

    at: float
    limit: float = math.inf
    _why: BaseException = field(init=False, repr=False, compare=False)

    @classmethod
    def after(cls, timeout: Timeout) -> Deadline:
        """Return the deadline `timeout` from now."""
        limit = timeout if type(timeout) is float and timeout >= 0 else seconds(timeout)
        return cls(monotonic() + limit, limit)

    def excuse(self, seconds: float) -> None:
        """Move the end by `seconds` that do not count, for all waiters."""
        self.at += seconds
        if self.cancelled() is not None:  # perhaps meanwhile, by the main thread
            self.at = -math.inf

    def cancel(self, why: BaseException) -> None:
        """End now all waits until this deadline, for an error of a handler in the main thread."""
        assert self is not NEVER, "it is shared"
        self._why, self.at = why, -math.inf

    def cancelled(self) -> BaseException | None:
        """Return the error of `cancel`, None without one."""
        return getattr(self, "_why", None)

    def remaining(self) -> float:
        """Return the seconds left, never below 0; math.inf when there is no limit."""
        return max(0.0, self.at - monotonic())

    def expired(self) -> bool:
        """Return whether the deadline has passed."""
        return monotonic() >= self.at

    def slice(self, longest: float) -> float:
        """Return the seconds left, at most `longest`: for waits in slices."""
        return min(longest, self.remaining())


NEVER = Deadline(math.inf)
