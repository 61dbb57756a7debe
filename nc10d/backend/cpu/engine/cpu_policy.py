"""The cores that are really there, by affinity and quota; how to wait, and whether boards pay."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nc10d.backend.cpu.algorithms.tuning import Boards
from nc10d.errors import RendezvousError
from nc10d.kernels.copy import cpu_name

BY_CPU = {"znver3": Boards.QUICKEST, "znver4": Boards.QUICKEST, "znver5": Boards.QUICK}
"""How quick boards are, by LLVM's names of CPUs."""


@dataclass(frozen=True, slots=True)
class WaitPolicy:
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


def roomy(cores: Sequence[Sequence[int]], quotas: Sequence[float]) -> bool:
    """Return whether the ranks of a host have a core each.

    `cores` and `quotas` have an entry for each rank: the cores that it may use, and the cores' time
    that its cgroup may use. Every rank passes the same values, so all of them agree.
    """
    together = {core for mine in cores for core in mine}
    return len(cores) <= min(float(len(together)), *quotas)


def own_boards() -> Boards:
    """Say how quick boards are on this CPU; RendezvousError if NC10D_QUICK_BOARDS is wrong.

    Lines go quickly from one core's cache to another on AMD's from Zen 3 on, where those of an L3
    are together. On Zen 3 and 4 the kernel's copies between processes are slow, too; on Zen 5 they
    are not, and better than boards for a large all_reduce of two ranks that share no L3.
    """
    asked = os.environ.get("NC10D_QUICK_BOARDS", "")
    if not asked:
        return BY_CPU.get(cpu_name(), Boards.NORMAL)
    known = {str(int(grade)): grade for grade in Boards}
    if asked not in known:
        raise RendezvousError(f"NC10D_QUICK_BOARDS={asked!r} is not one of {', '.join(known)}")
    return known[asked]


def boards(grades: Sequence[int]) -> Boards:
    """Return how quick staging buffers are on a host, given each rank's grade."""
    return Boards(min(grades))


def waiting_policy(has_room: bool) -> WaitPolicy:
    """Spin where every rank has a core of its own; else yield at once. Both sleep in the end.

    The spin is short (some 6 µs): when another program takes a core, two ranks share the other,
    and then each spins in vain until the next yield lets its partner run.
    """
    return WaitPolicy(spin=200 if has_room else 0, yields=400)
