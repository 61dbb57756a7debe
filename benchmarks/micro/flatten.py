"""Measure packing and unpacking a bucket of 25 MiB, beside torch and memcpy.

160 float32 tensors of a network's sizes are copied into a flat array, divided by the number of
ranks, each by a call of its own, and back, as DistributedDataParallel does; by torch._foreach_copy_
on the same memory; and as many bytes by a memcpy. All take turns in each round, in random order,
each with a single thread.
"""

from __future__ import annotations

import argparse
import ctypes
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.background_load import BackgroundLoad
from benchmarks.estimates import Estimate, Times, estimate
from nc10d.arrays.buffer import as_buffer
from nc10d.reducer.packing import DividedCopy, copy_all

NBYTES = 25 << 20
TENSORS = 160
MEMCPY = "memcpy"
Call = Callable[[], object]
Array = np.ndarray[Any, np.dtype[np.float32]]


def counts(tensors: int = TENSORS, total: int = NBYTES // 4) -> list[int]:
    """Return the tensors' numbers of elements: large, medium and two small, in turn."""
    small = [64 + 16 * (i % 7) for i in range(tensors)]
    weights = [(16, 4, 0, 0)[i % 4] for i in range(tensors)]
    rest = total - sum(small)
    shared = [rest * weight // sum(weights) for weight in weights]
    shared[0] += rest - sum(shared)
    return [a + b for a, b in zip(small, shared, strict=True)]


def calls(arrays: Sequence[Array], flat: Array, ranks: int) -> dict[str, Call]:
    """Return the timed calls by name; torch's where torch is installed. Keep the arrays alive."""
    other, sizes = np.ones_like(flat), [x.size for x in arrays]
    slots = np.split(flat, np.cumsum(sizes[:-1]))
    copies = [
        (DividedCopy(as_buffer(y), True), x.ctypes.data) for x, y in zip(arrays, slots, strict=True)
    ]
    rows = [(x.ctypes.data, y.ctypes.data, x.nbytes) for x, y in zip(arrays, slots, strict=True)]

    def divide() -> None:
        for copy, address in copies:
            copy.write(address, ranks)

    found: dict[str, Call] = {
        MEMCPY: lambda: ctypes.memmove(flat.ctypes.data, other.ctypes.data, flat.nbytes),
        "memcpy back": lambda: ctypes.memmove(other.ctypes.data, flat.ctypes.data, flat.nbytes),
        "divide into": divide,
        "copy back": lambda: copy_all(rows),
    }
    return found | torch_calls(arrays, flat, sizes)


def torch_calls(arrays: Sequence[Array], flat: Array, sizes: Sequence[int]) -> dict[str, Call]:
    """Return torch's calls on the same memory; empty where it is not installed."""
    try:
        import torch
    except ImportError:
        return {}
    torch.set_num_threads(1)
    tensors = [torch.from_numpy(x) for x in arrays]
    views = list(torch.from_numpy(flat).split(list(sizes)))
    return {
        "torch._foreach_copy_ into": lambda: torch._foreach_copy_(views, tensors),
        "torch._foreach_copy_ back": lambda: torch._foreach_copy_(tensors, views),
    }


def measure(calls_by_name: Mapping[str, Call], rounds: int, repeats: int) -> Times:
    """Return the seconds of each call in each round, without the first round.

    Each round has a random order, because a call depends on its predecessor's use of the caches.
    """
    chance = random.Random(TENSORS)
    found: Times = {name: [] for name in calls_by_name}
    for number in range(rounds + 1):
        for name in chance.sample([*calls_by_name], len(calls_by_name)):
            start = time.perf_counter()
            for _ in range(repeats):
                calls_by_name[name]()
            if number:
                found[name].append((time.perf_counter() - start) / repeats)
    return found


def report(found: Mapping[str, Estimate], nbytes: int) -> list[str]:
    """Return lines: µs, GB/s read and written, and the ratio to memcpy's speed."""
    whole = found[MEMCPY].median
    lines = [f"{'':<28}{'µs (interval)':>26}{'GB/s':>8}{'of memcpy':>11}"]
    for name, time_ in found.items():
        speed = 2 * nbytes / time_.median / 1e9
        lines.append(f"{name:<28}{time_!s:>26}{speed:>8.2f}{whole / time_.median:>11.2f}")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print. Blocks for all rounds."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks flatten", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="divisor of gradients")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--repeats", type=int, default=3, help="in each round")
    options = parser.parse_args(arguments)
    sizes = counts()
    arrays = [np.full(count, index % 7 + 1, np.float32) for index, count in enumerate(sizes)]
    timed = calls(arrays, np.zeros(sum(sizes), np.float32), options.ranks)
    with BackgroundLoad() as others:
        found = measure(timed, options.rounds, options.repeats)
    print(f"# {len(sizes)} tensors, {4 * sum(sizes)} bytes; others used {others.cores:.2f} cores")
    estimates = {name: estimate(times) for name, times in found.items()}
    print(*report(estimates, 4 * sum(sizes)), sep="\n")
    return 0
