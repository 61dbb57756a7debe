"""A simulated run's faults: each at a virtual time, in seconds from the start."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
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
FAULTS: tuple[type[Fault], ...] = (Kill, Pause, Partition, ClockJump)
FaultsOfSeed = Callable[[int], Sequence[Fault]]
"""Returns the faults for a seed's run."""


def draw_faults(
    world_size: int, seconds: float, seed: int, kinds: Sequence[type[Fault]] = FAULTS
) -> list[Fault]:
    """Return up to three faults for a seed, within the first `seconds` of a run, by their times.

    Pauses and partitions last up to `seconds`; a clock jumps by up to an hour, forth or back. At
    least one rank is not killed.
    """
    if world_size < 2:
        raise ValueError(f"faults are for two ranks or more, got {world_size}")
    return faults_from(world_size, seconds, kinds, random.Random(seed).randint)


def faults_from(
    world_size: int, seconds: float, kinds: Sequence[type[Fault]], choose: Callable[[int, int], int]
) -> list[Fault]:
    """Return faults by a function that chooses a number from the first to the second."""
    faults: list[Fault] = []
    killed: set[int] = set()
    for _ in range(choose(1, 3)):
        kind, rank = kinds[choose(0, len(kinds) - 1)], choose(0, world_size - 1)
        at, lasts = (seconds * choose(0, 1000) / 1000 for _ in range(2))
        if kind is Kill and len(killed | {rank}) < world_size:
            killed.add(rank)
            faults.append(Kill(rank, at))
        elif kind is Pause:
            faults.append(Pause(rank, at, lasts))
        elif kind is Partition:
            faults.append(Partition((rank,), at, lasts))
        elif kind is ClockJump:
            faults.append(ClockJump(rank, at, 3600.0 * choose(-1000, 1000) / 1000))
    return sorted(faults, key=lambda fault: fault.at)
