"""Run what is claimed about GPUs on this machine's: see tools/gpu_check.sh.

A row is a name, what came out ("ok", a figure, or what went wrong), and whether that is a failure.
A row that this machine can't have (one card, no torch) says why; it is no failure. `--quick` is for
seeing that all of it runs: few types and sizes.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from pathlib import Path

import gpu_laws as laws
import gpu_times as times
import gpu_train
from gpu_rows import Check, Row, keep, machine, run
from test_nccl_conformance import FEW

from nc10d import cuda
from nc10d.arrays.dtypes import DType

RESULTS = Path("gpu-results.json")


def checks(quick: bool) -> dict[str, Check]:
    """Return all checks by name."""
    size = times.QUICK if quick else times.Size()
    dtypes = (DType.FLOAT32,) if quick else FEW
    many = f"{size.arrays} x {size.nbytes >> 20} MiB, and packing {size.bucket >> 20} MiB"
    found: dict[str, Check] = {
        f"NCCL's conformance, {ranks} ranks": functools.partial(laws.conforms, ranks, dtypes)
        for ranks in (1, 2)
    }
    found["laws, 1 rank"] = lambda: laws.keep_laws(1)
    found["laws, 1 rank, nonblocking"] = lambda: laws.keep_laws(1, nonblocking=True)
    found["laws, 2 ranks"] = lambda: laws.keep_laws(2)
    found["arrays of other libraries"] = laws.libraries
    found["training by torch"] = gpu_train.trains
    for ranks in (2,) if quick else (2, 4):
        found[f"staged conformance, {ranks} ranks"] = functools.partial(laws.stages, ranks, dtypes)
    found[many] = lambda: times.beside(size)
    found["bus bandwidth"] = lambda: times.bandwidth(size)
    return found


def main(arguments: Sequence[str]) -> int:
    """Run all rows; return how many have failed."""
    rows: list[Row] = [machine()]
    for name, check in checks("--quick" in arguments).items():
        rows += run(name, check)
        rows[-1].show()
        keep(rows, RESULTS)  # what there is, should the time be over before the end
    for row in rows:
        row.show()
    return sum(row.failed for row in rows)


if __name__ == "__main__":
    if not cuda.available():
        sys.exit(
            "gpu-check: this process can use no GPU (no driver, no device, or no cuda-bindings)"
        )
    sys.exit(min(main(sys.argv[1:]), 1))
