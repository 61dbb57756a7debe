"""How to wait, from the cores that are really there: affinity and the cgroup's quota."""

from __future__ import annotations

import os
from pathlib import Path

from nc10d.backend.cpu.channel import Waiting


def cores() -> float:
    """Return the cores this process may use, fractions of a quota included."""
    allowed = float(len(os.sched_getaffinity(0)))
    return min(allowed, _quota(Path("/sys/fs/cgroup/cpu.max")))


def _quota(path: Path) -> float:
    try:
        limit, period = path.read_text().split()[:2]
    except (OSError, ValueError):
        return float("inf")
    return float("inf") if limit == "max" else max(1.0, int(limit) / int(period))


def waiting_policy(ranks: int) -> Waiting:
    """Spin where every rank has a core of its own; else yield at once. Both sleep in the end.

    The spin is short (some 6 µs): when another program takes a core, two ranks share the other,
    and then each spins in vain until the next yield lets its partner run.
    """
    if ranks <= cores():
        return Waiting(spin=200, yields=400)
    return Waiting(spin=0, yields=400)
