"""Check nc10d's GPU support on this machine: conformance, laws, training and times.

tools/gpu_check.sh starts it. A row of the report is a name, a result ("ok", a figure, or an error),
and whether the check failed. A check that this machine can't run (a single card, no torch) reports
the reason and does not fail. `--quick` runs all checks with few types and sizes.
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
    table: dict[str, Check] = {
        f"NCCL's conformance, {ranks} ranks": functools.partial(laws.conforms, ranks, dtypes)
        for ranks in (1, 2)
    }
    table["laws, 1 rank"] = lambda: laws.keep_laws(1)
    table["laws, 1 rank, nonblocking"] = lambda: laws.keep_laws(1, nonblocking=True)
    table["laws, 2 ranks"] = lambda: laws.keep_laws(2)
    table["arrays of other libraries"] = laws.libraries
    table["training by torch"] = gpu_train.trains
    for ranks in (2,) if quick else (2, 4):
        table[f"staged conformance, {ranks} ranks"] = functools.partial(laws.stages, ranks, dtypes)
    table[many] = lambda: times.beside(size)
    table["bus bandwidth"] = lambda: times.bandwidth(size)
    return table


def main(arguments: Sequence[str]) -> int:
    """Run all checks; return the number of failures."""
    rows: list[Row] = [machine()]
    for name, check in checks("--quick" in arguments).items():
        rows += run(name, check)
        rows[-1].show()
        keep(rows, RESULTS)  # after each check, for a run that is cut short
    for row in rows:
        row.show()
    return sum(row.failed for row in rows)


if __name__ == "__main__":
    if not cuda.available():
        sys.exit(
            "gpu-check: this process can use no GPU (no driver, no device, or no cuda-bindings)"
        )
    sys.exit(min(main(sys.argv[1:]), 1))
