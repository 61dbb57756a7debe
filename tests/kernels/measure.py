"""Measure the kernels: `python -m tests.kernels.measure` prints 10^9 elements a second.

32 KiB arrays (L1 or L2 cache), a single core, best of seven; in place / into a third array.
"""

from __future__ import annotations

import time

import numpy as np

from nc10d.arrays.dtypes import DType
from nc10d.kernels import reduce
from nc10d.ops import RedOp

from .calling import KERNEL, allowed

NBYTES, REPEATS = 32768, 200
KINDS = [RedOp.SUM, RedOp.PRODUCT, RedOp.MAX, RedOp.BOR]


def best(address: int, *arguments: int) -> float:
    """Return the least seconds of a call."""
    kernel, times = KERNEL(address), []
    for _ in range(7):
        start = time.perf_counter()
        for _ in range(REPEATS):
            kernel(*arguments)
        times.append((time.perf_counter() - start) / REPEATS)
    return min(times)


def main() -> None:
    """Print a table: a line for each element type, a column for each kernel."""
    room = np.zeros(4 * NBYTES + 4096, np.uint8)
    x = room.ctypes.data + -room.ctypes.data % 4096
    y, z, factor = x + NBYTES, x + 2 * NBYTES, np.array([1.0])
    empty = best(reduce.kernel_address(RedOp.SUM, DType.FLOAT32), x, x, x, 0)

    def rate(dtype: DType, *call: int) -> float:
        return NBYTES / dtype.itemsize / (best(*call) - empty) / 1e9

    print(f"{'':14}" + "".join(f"{k.name:>14}" for k in KINDS) + f"{'divide':>9}{'scale':>9}")
    for dtype in DType:
        line = f"{dtype.label:14}"
        for kind in KINDS:
            if not allowed(kind, dtype):
                line += f"{'-':>14}"
                continue
            kernel = reduce.kernel_address(kind, dtype)
            in_place = rate(dtype, kernel, x, x, y, NBYTES)
            line += f"{in_place:7.1f}/{rate(dtype, kernel, z, x, y, NBYTES):6.1f}"
        if allowed(RedOp.AVG, dtype):
            line += f"{rate(dtype, reduce.divide_address(dtype), x, x, 3, NBYTES):9.1f}"
            scale = reduce.scale_address(dtype)
            line += f"{rate(dtype, scale, x, x, factor.ctypes.data, NBYTES):9.1f}"
        print(line, flush=True)


if __name__ == "__main__":
    main()
