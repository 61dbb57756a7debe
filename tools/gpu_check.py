"""Check nc10d's GPU support on this machine: correctness first, then figures, then the claims.

tools/gpu_check.sh starts it. A row of the report is a name, a result ("ok", a figure, or an error),
and whether the check failed. A check that this machine can't run (a single card, no torch) reports
the reason and does not fail. Each check has a process of its own, so that a check that dies or
hangs is a failed row, and the others run. `--quick` runs all checks with few types and sizes.

Without a GPU every check is a line "not yet run on a GPU", and no claim is shown.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import gpu_claims
from gpu_rows import Check, Row, keep, kept, machine, run

from nc10d import cuda

RESULTS = Path(os.environ.get("GPU_CHECK_RESULTS", ""), "gpu-results.json")
MOST_SECONDS = 150.0
"""Seconds for a check, which is then ended."""
NOT_YET = "not yet run on a GPU"


def correctness(quick: bool) -> dict[str, Check]:
    """Return the checks that come first, by name: the laws of everything, with few types."""
    import gpu_laws as laws
    import gpu_train

    return {
        "NCCL's conformance, 1 rank": functools.partial(laws.conforms, 1, laws.FLOATS),
        "laws, 1 rank": lambda: laws.keep_laws(1),
        "laws, 2 ranks": lambda: laws.keep_laws(2),
        "NCCL's conformance, 2 ranks": functools.partial(laws.conforms, 2, laws.FLOATS),
        "features, 1 rank": lambda: laws.keep_features(1),
        "features, 2 ranks": lambda: laws.keep_features(2),
        "laws, 1 rank, nonblocking": lambda: laws.keep_laws(1, nonblocking=True),
        "arrays of other libraries": laws.libraries,
        "torch on devices": gpu_train.keeps_laws,
        "training by torch": gpu_train.trains,
        "staged conformance, 2 ranks": functools.partial(laws.stages, 2, laws.FLOATS),
    }


def the_rest(quick: bool) -> dict[str, Check]:
    """Return the other checks by name: all types, and figures."""
    import gpu_laws as laws
    import gpu_times as times
    from test_nccl_conformance import FEW

    size = times.QUICK if quick else times.Size()
    many = f"{size.arrays} x {size.nbytes >> 20} MiB, and packing {size.bucket >> 20} MiB"
    figures: dict[str, Check] = {
        many: lambda: times.beside(size),
        "bus bandwidth": lambda: times.bandwidth(size),
    }
    if quick:
        return figures
    types: dict[str, Check] = {
        f"NCCL's conformance, all types, {ranks} ranks": functools.partial(
            laws.conforms, ranks, FEW
        )
        for ranks in (1, 2)
    }
    for ranks in (2, 4):
        name = f"staged conformance, all types, {ranks} ranks"
        types[name] = functools.partial(laws.stages, ranks, FEW)
    return {**figures, **types}


def in_its_own_process(name: str, quick: bool) -> list[Row]:
    """Return the rows of a check, which can't stop the others."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.json")
        command = [sys.executable, __file__, "--check", name, str(path), *["--quick"] * quick]
        try:
            done = subprocess.run(command, timeout=MOST_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            return [Row(name, f"did not end within {MOST_SECONDS:.0f} s", failed=True)]
        if path.exists():
            return kept(path)
        return [Row(name, f"its process ended with {done.returncode}", failed=True)]


def one(name: str, path: Path, quick: bool) -> None:
    """Run a check in this process, and write its rows to a file."""
    keep(run(name, {**correctness(quick), **the_rest(quick)}[name]), path)


def main(arguments: Sequence[str]) -> int:
    """Run all checks; return the number of failures."""
    quick = "--quick" in arguments
    if not cuda.available():
        print(f"No GPU: this process can use none, so nothing is checked: {NOT_YET}.")
        for name in gpu_claims.CHECKS:
            Row(name, NOT_YET).show()
        gpu_claims.show([], NOT_YET)
        return 0
    begin, rows = time.monotonic(), [machine()]
    rows[0].show()
    for part, checks in (("correctness", correctness(quick)), ("all", the_rest(quick))):
        for name in checks:
            found = in_its_own_process(name, quick)
            for row in found:
                row.show()
            rows += found
            keep(rows, RESULTS)  # after each check, for a run that is cut short
        failed = sum(row.failed for row in rows)
        spent = f"after {time.monotonic() - begin:.0f} s"
        rows.append(Row(f"{part}, {spent}", f"{failed} of {len(rows)} rows failed"))
        rows[-1].show()
    gpu_claims.show(rows, gpu_claims.where())
    keep(rows, RESULTS)
    return sum(row.failed for row in rows)


if __name__ == "__main__":
    if "--check" in sys.argv:
        at = sys.argv.index("--check")
        one(sys.argv[at + 1], Path(sys.argv[at + 2]), "--quick" in sys.argv)
    else:
        sys.exit(min(main(sys.argv[1:]), 1))
