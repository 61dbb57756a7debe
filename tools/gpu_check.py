"""Check nc10d's GPU support on this machine: correctness first, then figures, then the claims.

tools/gpu_check.sh starts it. A row of the report is a name, a result ("ok", a figure, or an error),
and whether the check failed. A check that this machine can't run (a single card, no torch) reports
the reason and does not fail. Each check has a process of its own, so that a check that dies or
hangs is a failed row, and the others run; its rows are kept as they come. `--quick` runs all checks
with few types and sizes.

Without a GPU every check is a line "not yet run on a GPU", and no claim is shown.
"""

from __future__ import annotations

import argparse
import functools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import gpu_claims
from gpu_rows import NOT_HERE, Check, Row, as_line, from_line, keep, machine, run

from nc10d import cuda

RESULTS = Path(os.environ.get("GPU_CHECK_RESULTS", ""), "gpu-results.json")
MOST_SECONDS = 150.0
"""Seconds for a check, which is then ended; LONGER checks have twice that."""
LONGER = (
    "warm-up",
    "laws, 2 ranks",
    "laws, 2 ranks, nonblocking",
    "features, 2 ranks",
    "both ranks receive first",
    "aborts",
)
ALL_SECONDS = 870.0
"""Seconds for all checks: those that are left then do not run."""
NOT_YET = "not yet run on a GPU"


def warms() -> Iterator[Row]:
    """Compile all functions for the CPU, which the groups' timeouts do not allow for."""
    command = [sys.executable, "-m", "nc10d.warmup"]
    done = subprocess.run(command, capture_output=True, text=True)
    last = [f"exit code {done.returncode}", *(done.stdout + done.stderr).strip().splitlines()][-1]
    yield Row("kernels of the CPU", last, failed=bool(done.returncode))


def correctness(quick: bool) -> dict[str, Check]:
    """Return the checks that come first, by name: the laws of everything, with few types."""
    import gpu_laws as laws
    import gpu_train

    return {
        "warm-up": warms,
        "NCCL's conformance, 1 rank": functools.partial(laws.conforms, 1, laws.FLOATS),
        "laws, 1 rank": lambda: laws.keep_laws(1),
        "laws, 2 ranks": lambda: laws.keep_laws(2),
        "NCCL's conformance, 2 ranks": functools.partial(laws.conforms, 2, laws.FLOATS),
        "features, 1 rank": lambda: laws.keep_features(1),
        "features, 2 ranks": lambda: laws.keep_features(2),
        "laws, 1 rank, nonblocking": lambda: laws.keep_laws(1, nonblocking=True),
        "laws, 2 ranks, nonblocking": lambda: laws.keep_laws(2, nonblocking=True),
        "arrays of other libraries": laws.libraries,
        "torch on devices": gpu_train.keeps_laws,
        "training by torch": gpu_train.trains,
        "staged conformance, 2 ranks": functools.partial(laws.stages, 2, laws.FLOATS),
    }


def audited(quick: bool) -> dict[str, Check]:
    """Return the checks of hangs, leaks and orders that only a GPU has."""
    import gpu_laws as laws

    return {
        "both ranks receive first": laws.keep_queues,
        "aborts": lambda: laws.keep_audited("ABORTS"),
        "memory": lambda: laws.keep_audited("MEMORY"),
        "ends": lambda: laws.keep_audited("ENDS"),
        "durations": lambda: laws.keep_audited("TIMES"),
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


def parts(quick: bool) -> dict[str, dict[str, Check]]:
    """Return all checks, in their order."""
    return {
        "correctness": correctness(quick),
        "hangs and leaks": audited(quick),
        "all": the_rest(quick),
    }


def in_its_own_process(name: str, quick: bool, seconds: float) -> Iterator[Row]:
    """Yield the rows of a check as they come; it can't stop the other checks."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows")
        path.touch()
        command = [sys.executable, __file__, "--check", name, str(path), *["--quick"] * quick]
        # A session of its own: whatever is left of it is ended with it.
        process = subprocess.Popen(command, start_new_session=True)
        ends, count = time.monotonic() + seconds, 0
        try:
            with path.open() as lines:
                running = True
                while running:
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(min(1.0, max(ends - time.monotonic(), 0)))
                    running = process.poll() is None and time.monotonic() < ends
                    for line in lines:
                        yield from_line(line)
                        count += 1
        finally:
            ended = process.poll()
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if ended is None:
        yield Row(name, f"did not end within {seconds:.0f} s, after {count} rows", failed=True)
    elif ended:
        yield Row(name, f"its process ended with {ended}, after {count} rows", failed=True)


def one(name: str, path: Path, quick: bool) -> None:
    """Run a check in this process, and write its rows to a file as they come."""
    checks = {name: check for part in parts(quick).values() for name, check in part.items()}
    with path.open("a", buffering=1) as lines:
        for row in run(name, checks[name]):
            lines.write(as_line(row))


def main(arguments: Sequence[str]) -> int:
    """Run all checks; return the number of failures."""
    parser = argparse.ArgumentParser("tools/gpu_check.sh", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer types and sizes")
    quick = parser.parse_args(arguments).quick
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    if not cuda.available():
        print(f"No GPU: this process can use none, so nothing is checked: {NOT_YET}.")
        for name in gpu_claims.CHECKS:
            Row(name, NOT_YET).show()
        gpu_claims.show([], NOT_YET)
        return 0
    begin, rows = time.monotonic(), list[Row]()

    def add(row: Row) -> None:
        row.show()
        rows.append(row)
        keep(rows, RESULTS)  # after each row, for a run that is cut short

    add(machine())
    for part, checks in parts(quick).items():
        for name in checks:
            left = begin + ALL_SECONDS - time.monotonic()
            if left <= 0:
                add(Row(name, f"{NOT_HERE}no time was left"))
                continue
            most = MOST_SECONDS * (2 if name in LONGER else 1)
            for row in in_its_own_process(name, quick, min(left, most)):
                add(row)
        failed = sum(row.failed for row in rows)
        spent = f"after {time.monotonic() - begin:.0f} s"
        add(Row(f"{part}, {spent}", f"{failed} of {len(rows)} rows failed"))
    gpu_claims.show(rows, gpu_claims.where())
    return sum(row.failed for row in rows)


if __name__ == "__main__":
    if "--check" in sys.argv:
        at = sys.argv.index("--check")
        one(sys.argv[at + 1], Path(sys.argv[at + 2]), "--quick" in sys.argv)
    else:
        sys.exit(min(main(sys.argv[1:]), 1))
