"""Choices that depend on the CPU: the cores of a host's ranks, how they wait, how arrays travel."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nc10d.backend.cpu.algorithms.group_shape import DEFAULTS, NEVER, Thresholds
from nc10d.errors import RendezvousError
from nc10d.kernels.copy import cpu_name

FAST_STAGING = Thresholds(32 << 20, NEVER)
"""Thresholds for CPUs whose staging buffers win up to larger arrays."""

BY_CPU = {"znver3": FAST_STAGING, "znver4": FAST_STAGING, "znver5": FAST_STAGING}
"""Thresholds by LLVM's name for the CPU, where the defaults do not fit.

From AMD's Zen 3 on, cache lines pass quickly between cores that share an L3 cache.
"""

THRESHOLDS = "NC10D_KERNEL_COPY_FROM"
"""The variable that replaces the CPU's thresholds: READ or READ,WRITE in bytes."""


@dataclass(frozen=True, slots=True)
class WaitPolicy:
    """How often a waiting rank spins, and then yields, before sleeping; alike on a host."""

    spin: int
    yields: int

    @property
    def few_yields(self) -> int:
        """How often the worker yields before sleeping."""
        return self.yields // 20

    @property
    def launch_yields(self) -> int:
        """How often a thread that launches a collective yields; 0 if it spins instead."""
        return 0 if self.spin else self.few_yields


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


def oversubscribed(cores: Sequence[Sequence[int]], quotas: Sequence[float]) -> bool:
    """Return whether a host's ranks have fewer cores together than there are ranks."""
    # `cores` and `quotas` have an entry for each rank: the cores that the rank may use, and the
    # cores' time that its cgroup may use. Every rank passes the same values, so all ranks agree. A
    # launcher may have bound each rank to its own core, so the union of their cores counts.
    together = {core for own in cores for core in own}
    return len(cores) > min(float(len(together)), *quotas)


def own_thresholds() -> Thresholds:
    """Return this CPU's thresholds, or NC10D_KERNEL_COPY_FROM's; RendezvousError if it is wrong."""
    # Measured with arrays that a program writes just before the call. Lower thresholds suit arrays
    # that stay as they are, whose lines the reader has: after a write they took twice as long.
    text = os.environ.get(THRESHOLDS, "")
    if not text:
        return BY_CPU.get(cpu_name(), DEFAULTS)
    numbers = [part.strip() for part in text.split(",")]
    if len(numbers) > 2 or not all(number.isdecimal() for number in numbers):
        raise RendezvousError(f"{THRESHOLDS}={text!r} is not READ or READ,WRITE in bytes")
    return Thresholds(int(numbers[0]), int(numbers[1]) if len(numbers) == 2 else NEVER)


def agreed_thresholds(published: Sequence[Thresholds]) -> Thresholds:
    """Return a host's thresholds: the smallest that its ranks have published."""
    return Thresholds(
        min(limits.read_from for limits in published),
        min(limits.write_from for limits in published),
    )


def waiting_policy(*, oversubscribed: bool) -> WaitPolicy:
    """Return how a host's ranks wait: they spin only if each has its own core."""
    # The spin is short (some 6 µs). When another program takes a core, two ranks share the other,
    # and each spins in vain until the next yield lets the other rank run.
    return WaitPolicy(spin=0 if oversubscribed else 200, yields=400)
