"""The table that `python -m nc10d.bench` prints: options, the rows to measure, and rows as text.

`read`, `sizes`, `jobs` and `line` are pure; `run` measures and prints.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence

import nc10d as dist
from nc10d.arrays.dtypes import DType
from nc10d.base.text import byte_size
from nc10d.bench.measure import BenchJob, Row, measure
from nc10d.bench.workloads import COLLECTIVES
from nc10d.testing.ranks import Ranks

DESCRIPTION = """
The time of collectives on this machine, in nccl-tests' columns. Under a launcher (RANK is set) it
measures that job; otherwise it starts its own processes. "wrong" counts, over all ranks, the
elements that differ from NumPy's results; if there are any, the exit code is 1.
"""
EPILOG = """
Comparisons with other libraries, and other tables for developers: in a checkout, python -m
benchmarks --help.
"""
DTYPES = {dtype.label: dtype for dtype in DType}
ALL = "all"
MOST, MOST_LISTED = 2000, 100
"""Calls in a round; fewer with lists or objects, which take far longer."""
LIMIT = 300.0
"""Seconds for a rank's call: far more than any row takes."""
HEADER = (
    f"{'collective':<23}{'bytes':>11}{'count':>11} {'type':<14}{'op':<6}"
    f"{'time us':>11}{'algbw GB/s':>12}{'busbw GB/s':>12}{'wrong':>7}"
)


def read(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line; SystemExit with usage for wrong options."""
    parser = argparse.ArgumentParser(
        prog="python -m nc10d.bench", description=DESCRIPTION, epilog=EPILOG
    )
    parser.add_argument(
        "collectives",
        nargs="*",
        metavar="COLLECTIVE",
        help=f"of {', '.join(COLLECTIVES)}; or {ALL}",
    )
    parser.add_argument("--ranks", type=positive, default=2, help="processes to start (default 2)")
    parser.add_argument("--min-bytes", type=byte_size, default=8, help="smallest size (default 8)")
    parser.add_argument(
        "--max-bytes", type=byte_size, default=16 << 20, help="largest (default 16M)"
    )
    parser.add_argument("--factor", type=int, default=8, help="from size to size (default 8)")
    parser.add_argument(
        "--dtype", default="float32", metavar="TYPE", help=f"of {', '.join(DTYPES)} (float32)"
    )
    parser.add_argument("--repeats", type=positive, default=5, help="rounds per row (default 5)")
    found = parser.parse_args(arguments)
    problem = _problem(found)
    if problem:
        parser.error(problem)
    return found


def _problem(options: argparse.Namespace) -> str:
    """Return the error if well-formed options don't fit together, else ""."""
    unknown = sorted(set(options.collectives) - {*COLLECTIVES, ALL})
    if unknown:
        return f"unknown collective {', '.join(unknown)}; known: {', '.join(COLLECTIVES)}"
    if options.dtype not in DTYPES:
        return f"unknown --dtype {options.dtype}; known: {', '.join(DTYPES)}"
    if options.factor < 2:
        return "--factor must be at least 2"
    if options.min_bytes > options.max_bytes:
        return f"--min-bytes {options.min_bytes} is more than --max-bytes {options.max_bytes}"
    return ""


def positive(text: str) -> int:
    """Read a whole number, at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def sizes(smallest: int, largest: int, factor: int) -> Iterator[int]:
    """Yield sizes from `smallest`, each `factor` times the last; the final size is `largest`."""
    while smallest < largest:
        yield smallest
        smallest *= factor
    yield largest


def jobs(options: argparse.Namespace) -> Iterator[BenchJob]:
    """Yield the rows to measure, in order."""
    all_sizes = list(sizes(options.min_bytes, options.max_bytes, options.factor))
    listed_all = not options.collectives or ALL in options.collectives
    for collective in COLLECTIVES if listed_all else options.collectives:
        for nbytes in all_sizes if collective != "barrier" else [0]:
            listed = collective.endswith(("_list", "_object"))
            most = MOST_LISTED if listed else MOST
            iterations = max(3, min(most, (64 << 20) // max(nbytes, 1)))
            yield BenchJob(collective, nbytes, DTYPES[options.dtype], iterations, options.repeats)


def line(row: Row) -> str:
    """Return a row as text, in HEADER's columns."""
    job = row.job
    return (
        f"{job.collective:<23}{row.nbytes:>11}{row.count:>11} {job.dtype.label:<14}{row.op:<6}"
        f"{row.seconds * 1e6:>11.2f}{row.algbw:>12.3f}{row.busbw:>12.3f}{row.wrong:>7}"
    )


def run(options: argparse.Namespace) -> int:
    """Measure and print on rank 0; return 1 if any element was wrong. Blocks for all rows."""
    wrong = _under_launcher(options) if "RANK" in os.environ else _own_ranks(options)
    return 1 if wrong else 0


def _under_launcher(options: argparse.Namespace) -> int:
    dist.init_process_group()
    group = dist.get_default_group()
    try:
        rows = (measure(group, job) for job in jobs(options))
        return _show(rows, group.size) if group.rank == 0 else sum(row.wrong for row in rows)
    finally:
        dist.destroy_process_group()


def _own_ranks(options: argparse.Namespace) -> int:
    count = options.ranks
    with Ranks(count, "processes", timeout=LIMIT) as ranks:
        return _show((ranks.run(measure, [job] * count)[0] for job in jobs(options)), count)


def _show(rows: Iterator[Row], ranks: int) -> int:
    load = os.getloadavg()[0]
    cores = len(os.sched_getaffinity(0))
    print(f"# {ranks} ranks on {cores} cores; load average at the start {load:.2f}")
    print(HEADER, flush=True)
    wrong = 0
    for row in rows:
        print(line(row), flush=True)
        wrong += row.wrong
    print(f"# {wrong} wrong elements")
    return wrong
