"""The cores that are really there, by affinity and the cgroup's quota; and how to wait on them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

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


def waiting_policy(has_room: bool) -> Waiting:
    """Spin where every rank has a core of its own; else yield at once. Both sleep in the end.

    The spin is short (some 6 µs): when another program takes a core, two ranks share the other,
    and then each spins in vain until the next yield lets its partner run.
    """
    return Waiting(spin=200 if has_room else 0, yields=400)
