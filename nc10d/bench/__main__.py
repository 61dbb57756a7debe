"""`python -m nc10d.bench`: what collectives cost on this machine, in nccl-tests' columns.

Under a launcher (RANK is set) it measures that job; otherwise it starts `--ranks` processes.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence

from nc10d.bench.measure import COLLECTIVES, Job, Row, measure

HEADER = (
    f"{'collective':<15}{'bytes':>11}{'count':>11} {'type':<9}{'op':<6}"
    f"{'time us':>11}{'algbw GB/s':>12}{'busbw GB/s':>12}{'wrong':>7}"
)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m nc10d.bench", description=__doc__)
    parser.add_argument(
        "collectives", nargs="*", metavar="COLLECTIVE", help=f"of {', '.join(COLLECTIVES)}; or all"
    )
    parser.add_argument("--ranks", type=int, default=2, help="processes to start (default 2)")
    parser.add_argument("--min-bytes", type=size, default=8, help="smallest size (default 8)")
    parser.add_argument("--max-bytes", type=size, default=size("16M"), help="largest (default 16M)")
    parser.add_argument("--factor", type=int, default=8, help="from size to size (default 8)")
    parser.add_argument("--dtype", default="float32", help="a NumPy dtype (default float32)")
    parser.add_argument("--repeats", type=int, default=5, help="rounds per row (default 5)")
    found = parser.parse_args(arguments)
    unknown = sorted(set(found.collectives) - set(COLLECTIVES))
    if unknown:
        parser.error(f"unknown collective {', '.join(unknown)}; known: {', '.join(COLLECTIVES)}")
    if found.factor < 2 or found.ranks < 1 or found.repeats < 1:
        parser.error("--factor must be at least 2, --ranks and --repeats at least 1")
    return found


def size(text: str) -> int:
    """Read a size in bytes: 64, 4K, 16M, 1G."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    unit = units.get(text[-1:].upper(), 1)
    return int(text[:-1] if unit > 1 else text) * unit


def jobs(options: argparse.Namespace) -> Iterator[Job]:
    """Return what to measure, in order."""
    for collective in options.collectives or COLLECTIVES:
        nbytes = options.min_bytes
        while nbytes <= options.max_bytes:
            iterations = max(3, min(2000, (64 << 20) // max(nbytes, 1)))
            yield Job(collective, nbytes, options.dtype, iterations, options.repeats)
            if collective == "barrier":
                break
            nbytes *= options.factor


def line(row: Row) -> str:
    """Return a row as text."""
    job = row.job
    nbytes = 0 if job.collective == "barrier" else job.nbytes
    return (
        f"{job.collective:<15}{nbytes:>11}{row.count:>11} {job.dtype:<9}{row.op:<6}"
        f"{row.seconds * 1e6:>11.2f}{row.algbw:>12.3f}{row.busbw:>12.3f}{row.wrong:>7}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; the answer is 1 if any element was wrong."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    wrong = _under_launcher(options) if "RANK" in os.environ else _own_ranks(options)
    return 1 if wrong else 0


def _under_launcher(options: argparse.Namespace) -> int:
    import nc10d as dist

    dist.init_process_group()
    group = dist.get_default_group()
    try:
        rows = (measure(group, job) for job in jobs(options))
        return _show(rows, group.size) if group.rank == 0 else sum(row.wrong for row in rows)
    finally:
        dist.destroy_process_group()


def _own_ranks(options: argparse.Namespace) -> int:
    from nc10d.testing.ranks import Ranks

    with Ranks(options.ranks, "processes", timeout=300.0) as ranks:
        count = options.ranks
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


if __name__ == "__main__":
    raise SystemExit(main())
