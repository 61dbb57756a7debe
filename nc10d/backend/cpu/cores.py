"""The cores that are really there, by affinity and quota; how to wait, and whether boards pay."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nc10d.kernels.copying import ZEN, cpu_name

if TYPE_CHECKING:
    from nc10d.backend.cpu.cards import Card


@dataclass(frozen=True, slots=True)
class Waiting:
    """How long to spin and to yield before sleeping; alike on all ranks of the host."""

    spin: int
    yields: int


def cores() -> float:
    """Return the cores this process may use, fractions of a quota included."""
    return min(float(len(os.sched_getaffinity(0))), quota())


def quota(path: Path = Path("/sys/fs/cgroup/cpu.max")) -> float:
    """Return how many cores' time the cgroup may use, at least 1.0; infinite without a limit."""
    try:
        limit, period = path.read_text().split()[:2]
    except (OSError, ValueError):
        return float("inf")
    return float("inf") if limit == "max" else max(1.0, int(limit) / int(period))


def roomy(mates: Sequence[Card]) -> bool:
    """Say whether ranks of a host have a core each: cores that they may use together, one quota.

    A launcher may have bound each to a core of its own. All look at the same cards, so all agree.
    """
    together = {core for card in mates for core in card.cores}
    return len(mates) <= min(float(len(together)), *(card.quota for card in mates))


def has_quick_boards() -> bool:
    """Say whether boards pay longer on this CPU: lines go quickly from one core's cache to another.

    So it is on AMD's from Zen 3 on, where the kernel's copies between processes are slower.
    NC10D_QUICK_BOARDS knows better.
    """
    asked = os.environ.get("NC10D_QUICK_BOARDS", "")
    return asked != "0" if asked else cpu_name() in ZEN


def quick_boards(mates: Sequence[Card]) -> bool:
    """Say whether boards pay longer on a host; all look at the same cards, so all agree."""
    return all(card.quick for card in mates)


def waiting_policy(has_room: bool) -> Waiting:
    """Spin where every rank has a core of its own; else yield at once. Both sleep in the end.

    The spin is short (some 6 µs): when another program takes a core, two ranks share the other,
    and then each spins in vain until the next yield lets its partner run.
    """
    return Waiting(spin=200 if has_room else 0, yields=400)
