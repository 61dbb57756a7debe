"""Measure exact sums on one rank, beside NumPy's rounded ones.

The calls take turns in each round. Figures are medians in GB/s, and the ratio of NumPy's speed to
that of nc10d.exact. The elements of a wide sum are spread over 200 powers of two.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

import numpy as np

import nc10d as dist
from benchmarks.background_load import BackgroundLoad
from benchmarks.estimates import estimate
from nc10d import exact

MEBIBYTES = 1, 64
Call = Callable[[], object]


def calls(dtype: str, nbytes: int) -> dict[str, tuple[Call, Call, int]]:
    """Return NumPy's call, the exact call and the bytes that each reads, by name."""
    random = np.random.default_rng(1)
    count = nbytes // np.dtype(dtype).itemsize
    x, y = (random.standard_normal(count).astype(dtype) for _ in range(2))
    wide = (x * 2.0 ** random.integers(-100, 100, count)).astype(dtype)
    return {
        "sum": (lambda: x.sum(), lambda: exact.sum(x), nbytes),
        "wide sum": (lambda: wide.sum(), lambda: exact.sum(wide), nbytes),
        "dot": (lambda: np.dot(x, y), lambda: exact.dot(x, y), 2 * nbytes),
        "norm": (lambda: np.linalg.norm(x), lambda: exact.norm(x), nbytes),
    }


def _seconds(call: Call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print. Blocks for all rounds."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks exact", description=__doc__)
    parser.add_argument("--rounds", type=int, default=25)
    rounds = parser.parse_args(arguments).rounds
    dist.init_process_group(rank=0, world_size=1, store=dist.HashStore())
    for size, dtype in [(size, dtype) for size in MEBIBYTES for dtype in ("float32", "float64")]:
        with BackgroundLoad() as others:
            for name, (plain, precise, read) in calls(dtype, size << 20).items():
                precise()
                pairs = [(_seconds(plain), _seconds(precise)) for _ in range(rounds)]
                a, b = (read / estimate(times).median / 1e9 for times in zip(*pairs, strict=True))
                what = f"{size} MiB {dtype} {name}"
                print(f"{what:<24}{a:>8.1f}{b:>8.1f}{a / b:>8.2f}", flush=True)
        print(f"# others: {others.cores:.2f} cores", flush=True)
    dist.destroy_process_group()
    return 0
