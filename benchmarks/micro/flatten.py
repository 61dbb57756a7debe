"""`python -m nc10d.bench --flatten`: packing a bucket of 25 MiB, beside torch and memcpy.

160 float32 tensors of a network's sizes are copied into one flat array and back: by nc10d, with the
division by the number of ranks and without, by torch._foreach_copy_ on the same memory, and one
memcpy of as many bytes. All take turns in each round, in any order. One thread each.
"""

from __future__ import annotations

import argparse
import ctypes
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.compare.foreign import Foreign
from benchmarks.compare.verdicts import Estimate, Times, estimate
from nc10d.reducer.packing import Packer

NBYTES = 25 << 20
TENSORS = 160
MEMCPY = "memcpy"
Call = Callable[[], object]
Array = np.ndarray[Any, np.dtype[np.float32]]


def counts(tensors: int = TENSORS, total: int = NBYTES // 4) -> list[int]:
    """Return the tensors' elements: a large one, a middling one and two small ones, in turn."""
    small = [64 + 16 * (i % 7) for i in range(tensors)]
    weights = [(16, 4, 0, 0)[i % 4] for i in range(tensors)]
    rest = total - sum(small)
    shared = [rest * weight // sum(weights) for weight in weights]
    shared[0] += rest - sum(shared)
    return [a + b for a, b in zip(small, shared, strict=True)]


def calls(sizes: Sequence[int], ranks: int) -> dict[str, Call]:
    """Return what is timed, by name; torch's where torch is installed."""
    arrays = [np.full(count, index % 7 + 1, np.float32) for index, count in enumerate(sizes)]
    offsets = np.cumsum([0, *sizes[:-1]]).tolist()
    flat, other = np.zeros(sum(sizes), np.float32), np.ones(sum(sizes), np.float32)
    packer, scale = Packer(arrays, flat, offsets), 1 / ranks
    found: dict[str, Call] = {
        MEMCPY: lambda: ctypes.memmove(flat.ctypes.data, other.ctypes.data, flat.nbytes),
        "memcpy back": lambda: ctypes.memmove(other.ctypes.data, flat.ctypes.data, flat.nbytes),
        "pack": packer.pack,
        "pack, scaled": lambda: packer.pack(scale),
        "unpack": packer.unpack,
        "unpack, scaled": lambda: packer.unpack(scale),
    }
    return found | torchs(arrays, flat, sizes)


def torchs(arrays: Sequence[Array], flat: Array, sizes: Sequence[int]) -> dict[str, Call]:
    """Return torch's ways on the same memory; none where it is not installed."""
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


def times(of: Mapping[str, Call], rounds: int, repeats: int) -> Times:
    """Return the seconds of each call in each round, the first round not counted.

    Each round has an order of its own: what a call finds in a cache the one before has left there.
    """
    chance = random.Random(TENSORS)
    found: Times = {name: [] for name in of}
    for number in range(rounds + 1):
        for name in chance.sample([*of], len(of)):
            start = time.perf_counter()
            for _ in range(repeats):
                of[name]()
            if number:
                found[name].append((time.perf_counter() - start) / repeats)
    return found


def report(found: Mapping[str, Estimate], nbytes: int) -> list[str]:
    """Return lines: µs, GB/s moved (read and written), and how fast that is by memcpy's speed."""
    whole = found[MEMCPY].median
    lines = [f"{'':<28}{'µs (interval)':>26}{'GB/s':>8}{'of memcpy':>11}"]
    for name, one in found.items():
        speed = 2 * nbytes / one.median / 1e9
        lines.append(f"{name:<28}{one!s:>26}{speed:>8.2f}{whole / one.median:>11.2f}")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print. Blocks for all rounds."""
    parser = argparse.ArgumentParser(prog="python -m nc10d.bench", description=__doc__)
    parser.add_argument("--flatten", action="store_true", help="this table")
    parser.add_argument("--ranks", type=int, default=2, help="what gradients are divided by")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--repeats", type=int, default=3, help="in each round")
    options = parser.parse_args(arguments)
    sizes = counts()
    with Foreign() as foreign:
        found = times(calls(sizes, options.ranks), options.rounds, options.repeats)
    print(f"# {len(sizes)} tensors, {4 * sum(sizes)} bytes; others used {foreign.cores:.2f} cores")
    print(*report({name: estimate(one) for name, one in found.items()}, 4 * sum(sizes)), sep="\n")
    return 0
