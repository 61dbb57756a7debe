"""Measure how fast a core adds elements of each type.

The bare kernels, dst = dst + b, on arrays that stay in the cache and on arrays that don't; the
types take turns in each round. Figures are elements per second, and their ratio to float32's.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.background_load import BackgroundLoad
from benchmarks.estimates import estimate
from nc10d.arrays.dtypes import DType, allows, dtype_of
from nc10d.kernels.reduce import kernel_address
from nc10d.ops import ReduceOp
from nc10d.ops.reductions import EXAMPLES

COUNTS = {"in cache": 1 << 16, "in memory": 1 << 23}
ELEMENTS = 1 << 23
"""Elements that a timing adds."""
CALL = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)
Array = np.ndarray[Any, np.dtype[Any]]
Speeds = dict[DType, list[float]]


def folding(op: ReduceOp, x: Array, y: Array) -> Callable[[], None]:
    """Return a call of the bare kernel: x = x op y."""
    kernel = CALL(kernel_address(op.pairwise.name, dtype_of(x.dtype)))
    nbytes, into, other = x.nbytes, x.ctypes.data, y.ctypes.data

    def fold(_keep: object = (x, y)) -> None:
        kernel(into, into, other, nbytes)

    return fold


def speeds(dtypes: Sequence[DType], op: ReduceOp, count: int, rounds: int) -> Speeds:
    """Return elements per second of each type in each round."""
    calls = {
        dtype: folding(op, np.ones(count, dtype.numpy), np.ones(count, dtype.numpy))
        for dtype in dtypes
    }
    found: Speeds = {dtype: [] for dtype in dtypes}
    for _ in range(rounds):
        for dtype, call in calls.items():
            found[dtype].append(count / _mean(call, max(1, ELEMENTS // count)))
    return found


def _mean(call: Callable[[], None], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls


def report(found: Speeds) -> list[str]:
    """Return a line for each type: G elements/s, and the ratio to float32."""
    medians = {dtype: estimate(rates).median for dtype, rates in found.items()}
    whole = medians[DType.FLOAT32]
    return [f"{d.label:<16}{m / 1e9:>10.2f}{m / whole:>10.2f}" for d, m in medians.items()]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print. Blocks for all rounds."""
    by_name = {op.name: op for op in EXAMPLES}
    parser = argparse.ArgumentParser(prog="python -m benchmarks kernels", description=__doc__)
    parser.add_argument("--op", default="SUM", choices=by_name, metavar="OP")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args(arguments)
    op = by_name[options.op]
    dtypes = [dtype for dtype in DType if allows(dtype, op)]
    if DType.FLOAT32 not in dtypes:
        parser.error(f"{op.name} is not for float32, which is the measure here")
    for where, count in COUNTS.items():
        with BackgroundLoad() as others:
            found = speeds(dtypes, op, count, options.rounds)
        print(f"# {op.name} {where}: G elements/s, by float32's; others: {others.cores:.2f} cores")
        print(*report(found), sep="\n", flush=True)
    return 0
