"""Faults of a simulated run: each at a virtual time, in seconds from the start."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True)
class Kill:
    """Rank `rank` ends at `at`, wherever it waits next."""

    rank: int
    at: float


@dataclass(frozen=True)
class Pause:
    """Rank `rank` does not run from `at` on, for `seconds`."""

    rank: int
    at: float
    seconds: float


@dataclass(frozen=True)
class Partition:
    """From `at` on, messages between `ranks` and the others wait for `seconds`."""

    ranks: Collection[int]
    at: float
    seconds: float

    def blocked_until(self, src: int, dst: int, now: float) -> float:
        """Return when a message that is sent now gets through."""
        apart = (src in self.ranks) != (dst in self.ranks)
        inside = self.at <= now < self.at + self.seconds
        return self.at + self.seconds if apart and inside else now


@dataclass(frozen=True)
class ClockJump:
    """`time.time()` of rank `rank` jumps by `seconds` at `at`; `time.monotonic()` goes on."""

    rank: int
    at: float
    seconds: float


Fault = Kill | Pause | Partition | ClockJump
