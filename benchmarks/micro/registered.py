"""Measure all_reduce of registered arrays beside the speed of memory.

Two ranks on two cores must at least read and write every byte of both arrays. The lower bound is
both ranks doing just that at once, in place, by NumPy. It takes turns with the collectives in each
round; a time is the slower rank's, a figure the median of rounds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

import numpy as np

import nc10d as dist
from benchmarks.background_load import BackgroundLoad
from benchmarks.estimates import Times, estimate, slower
from nc10d.base.text import byte_size
from nc10d.group.process_group import ProcessGroup
from nc10d.testing.ranks import Ranks

CALLS = 16
FLOOR = "read and write, in place"


def measure(group: ProcessGroup, nbytes: int, rounds: int) -> Times:
    """Return this rank's mean seconds by name and round; blocks for all rounds."""
    count = nbytes // 4
    plain, copy = np.ones(count, np.float32), np.ones(count, np.float32)
    ours = dist.zeros(count, np.float32)
    cases: dict[str, Callable[[], object]] = {
        FLOOR: lambda: np.add(plain, 1, out=plain),
        "copy to another array": lambda: np.copyto(copy, plain),
        "all_reduce, registered": lambda: dist.all_reduce(ours),
        "all_reduce, plain": lambda: dist.all_reduce(plain),
    }
    times: Times = {name: [] for name in cases}
    for _ in range(rounds):
        for name, call in cases.items():
            times[name].append(_mean(group, call))
        plain.fill(1)
    return times


def _mean(group: ProcessGroup, call: Callable[[], object]) -> float:
    call()
    group.barrier()
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - start) / CALLS


def check(group: ProcessGroup) -> bool:
    """Return whether the all_reduce of a registered array is right."""
    x = dist.from_numpy(np.arange(1 << 16, dtype=np.float32) + group.rank)
    dist.all_reduce(x)
    ranks = sum(range(group.size))
    return bool((x == group.size * np.arange(1 << 16, dtype=np.float32) + ranks).all())


def report(times_by_rank: Sequence[Times]) -> list[str]:
    """Return a line for each name: the slower rank's time, and its ratio to the lower bound."""
    found = {name: estimate(times) for name, times in slower(times_by_rank).items()}
    floor = found[FLOOR].median
    return [
        f"{name:<26}{time_!s:>26} µs{time_.median / floor:>8.2f}" for name, time_ in found.items()
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure on two ranks and print; return 1 if a result was wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks registered", description=__doc__)
    parser.add_argument("--bytes", type=byte_size, default=16 << 20)
    parser.add_argument("--rounds", type=int, default=25)
    options = parser.parse_args(arguments)
    with BackgroundLoad() as others, Ranks(2, "processes", timeout=60.0) as ranks:
        right = all(ranks.run(check))
        found = ranks.run(measure, [options.bytes] * 2, [options.rounds] * 2)
    print(f"# 2 ranks, {options.bytes} bytes, {options.rounds} rounds; others used", end=" ")
    print(f"{others.cores:.2f} cores; last column: ratio to the first line")
    print(*report(found), sep="\n")
    return 0 if right else 1
