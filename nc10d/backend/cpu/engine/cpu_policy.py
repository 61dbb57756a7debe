"""The cores that are really there, by affinity and quota; how to wait, and whether boards pay."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nc10d.backend.cpu.algorithms.tuning import Boards
from nc10d.errors import RendezvousError
from nc10d.kernels.copy import cpu_name

if TYPE_CHECKING:
    from nc10d.backend.cpu.bootstrap.rank_info import RankInfo


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


def roomy(mates: Sequence[RankInfo]) -> bool:
    """Say whether ranks of a host have a core each: cores that they may use together, one quota.

    A launcher may have bound each to a core of its own. All look at the same cards, so all agree.
    """
    together = {core for card in mates for core in card.cores}
    return len(mates) <= min(float(len(together)), *(card.quota for card in mates))


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


def boards(mates: Sequence[RankInfo]) -> Boards:
    """Say how quick boards are on a host; all look at the same cards, so all agree."""
    return Boards(min(card.boards for card in mates))


def waiting_policy(has_room: bool) -> WaitPolicy:
    """Spin where every rank has a core of its own; else yield at once. Both sleep in the end.

    The spin is short (some 6 µs): when another program takes a core, two ranks share the other,
    and then each spins in vain until the next yield lets its partner run.
    """
    return WaitPolicy(spin=200 if has_room else 0, yields=400)
