"""Measure the CPU time of NCCL launches in nc10d itself, without the libraries' time.

    make nccl-cost                 # or: .venv-gpu/bin/python tools/nccl_cost.py

A single rank reduces arrays of 64 bytes. The group is made with the emulators of CUDA and NCCL.
Then an empty function replaces every C function that a launch calls, so only nc10d's own time
remains, Python included. Each figure is the minimum of many rounds' medians, since other programs
can only make it larger.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "emulators")]

COUNT = 64  # arrays of a block
AIMS = {
    "one all_reduce, from call to return": 12,
    f"a plan of {COUNT} all_reduces": 3,
    f"a block of {COUNT} arrays again": 25,
    "the same by the group's own all_reduce": 25,
    f"a block of {COUNT} arrays not seen before": 100,
}
Step = Callable[[], object]


def median_us(step: Step, times: int, between: Step) -> float:
    """Return the median time of `step` in microseconds; calls of `between` are not timed."""
    found = []
    for _ in range(times):
        between()
        begin = perf_counter_ns()
        step()
        found.append(perf_counter_ns() - begin)
    return statistics.median(found) / 1000


class Costs:
    """A group of a single rank on an emulated device, and the ways to reduce its arrays."""

    def __init__(self) -> None:
        import nc10d as dist
        from nc10d import cuda

        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
        self._dist, self._group = dist, dist.group.WORLD
        self._arrays: list[Any] = [cuda.to_device(np.ones(16, np.float32)) for _ in range(COUNT)]
        self._fresh: list[Any] = []
        dist.all_reduce(self._arrays[0])
        cuda.synchronize()
        self._device_group: Any = self._group.backend("cuda").device_group
        self._silence()
        with dist.coalescing_manager() as block:
            self._by_functions(self._arrays)
        self._plan = block.plan()

    def _silence(self) -> None:
        """Make all later launch tables call an empty function."""
        from numba import cfunc

        from nc10d.backend.nccl.launch import launch_table

        self._nothing = cfunc("int32()")(lambda: 0)
        where = self._nothing.address
        vars(launch_table)["address"] = lambda _: where
        planner = self._device_group._planner
        planner._library.address = lambda _: where
        planner._cache._known.clear()

    def sweep(self) -> None:
        """Complete the pending launches."""
        self._device_group.pending.sweep()

    def renew(self) -> None:
        """Complete the pending launches, and make new array objects in the same memory."""
        self.sweep()
        made = type(self._arrays[0])
        self._fresh = [made(x.address, x.shape, x.dtype, x.device, x.owner) for x in self._arrays]

    def _by_functions(self, arrays: Sequence[Any]) -> None:
        for x in arrays:
            self._dist.all_reduce(x)

    def _block(self, arrays: Sequence[Any]) -> None:
        with self._dist.coalescing_manager():
            self._by_functions(arrays)

    def _block_of_methods(self) -> None:
        reduce = self._group.all_reduce
        with self._group.coalescing_manager():
            for x in self._arrays:
                reduce(x)

    def rounds(self, count: int, times: int) -> dict[str, float]:
        """Return the cost of each kind of launch in microseconds."""
        x = self._arrays[0]
        ways: Sequence[tuple[Step, Step]] = (
            (lambda: self._dist.all_reduce(x), self.sweep),
            (self._plan.launch, self.sweep),
            (lambda: self._block(self._arrays), self.sweep),
            (self._block_of_methods, self.sweep),
            (lambda: self._block(self._fresh), self.renew),
        )
        found: dict[str, list[float]] = {name: [] for name in AIMS}
        for _ in range(count):
            for name, (way, between) in zip(AIMS, ways, strict=True):
                found[name].append(median_us(way, times, between))
        return {name: min(costs) for name, costs in found.items()}


def main() -> None:
    """Print the table."""
    build = importlib.import_module("build").build
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--times", type=int, default=50, help="launches a round")
    chosen = parser.parse_args()
    libraries = build()
    if libraries is None:
        sys.exit("nccl_cost: no gcc, or no headers of CUDA and NCCL: `make nccl-cost` has them")
    libraries.preload()
    found = Costs().rounds(chosen.rounds, chosen.times)
    print("| | µs | aim |\n|---|---|---|")
    for name, cost in found.items():
        print(f"| {name} | {cost:.1f} | {AIMS[name]} |")


if __name__ == "__main__":
    main()
