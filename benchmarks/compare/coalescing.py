"""Compare the ways to reduce 64 float32 arrays, as c10d's published comparison does.

Each library has its ways: a coalescing block, a plan, call by call, a flat array with the copies.
The table has wall time, CPU time of a rank, and time until all calls have returned. Libraries take
turns in interleaved rounds; results are checked. The last rows have each library's quickest way.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Mapping, Sequence

from benchmarks.background_load import BackgroundLoad
from benchmarks.compare.coalescing_ways import NAMES
from benchmarks.compare.compare import PEERS, require
from benchmarks.estimates import Estimate, estimate, turns
from benchmarks.figures import bytes_label
from benchmarks.libraries.jobs import run_job
from nc10d.base.text import byte_size

SIZES = [1 << 10, 128 << 10, 8 << 20]
QUICKEST = "quickest"
WORKER = "benchmarks.compare.coalescing_ways"
MEASURES = ["wall", "CPU", "issue"]
Key = tuple[str, str, int, str]
"""Library, way, bytes of an array, measure."""
Samples = dict[Key, list[float]]


def collect(options: argparse.Namespace) -> tuple[Samples, float]:
    """Run all rounds; return seconds by key, and the load of others in cores."""
    samples: Samples = {}
    with BackgroundLoad() as others:
        for number in range(options.rounds):
            for library in turns(options.libraries, number):
                _job(samples, library, options)
            print(f"# round {number + 1} of {options.rounds} done", file=sys.stderr, flush=True)
    return samples, others.cores


def _job(samples: Samples, library: str, options: argparse.Namespace) -> None:
    arguments = [options.sizes, options.budget]
    rows = run_job(library, options.ranks, WORKER, arguments, options.limit)
    for way, nbytes, *costs, wrong in rows:
        if wrong:
            raise RuntimeError(f"{library}, {way}: {wrong} wrong elements of {nbytes} bytes")
        for measure, seconds in zip(MEASURES, costs, strict=True):
            samples.setdefault((library, way, nbytes, measure), []).append(seconds)


def table(found: Mapping[Key, Estimate]) -> list[str]:
    """Return a Markdown table: a row for each size, way and measure; a column for each library."""
    libraries = list(dict.fromkeys(library for library, *_ in found))
    head = ["64 arrays of", "way", "µs", *libraries, "best peer/nc10d"]
    rows = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for nbytes in sorted({nbytes for _, _, nbytes, _ in found}):
        for way, measure in itertools.product([*NAMES, QUICKEST], MEASURES):
            cells = [_cell(found, library, way, nbytes, measure) for library in libraries]
            if any(cells):
                shown = ["–" if cell is None else str(cell) for cell in cells]
                words = [bytes_label(nbytes), way, measure, *shown, _ahead(libraries, cells)]
                rows.append(f"| {' | '.join(words)} |")
    return rows


def _cell(
    found: Mapping[Key, Estimate], library: str, way: str, nbytes: int, measure: str
) -> Estimate | None:
    if way != QUICKEST:
        return found.get((library, way, nbytes, measure))
    ways = [found[key] for key in found if (key[0], *key[2:]) == (library, nbytes, measure)]
    return min(ways, key=lambda times: times.median, default=None)


def _ahead(libraries: Sequence[str], cells: Sequence[Estimate | None]) -> str:
    """Return the best peer's median divided by nc10d's."""
    medians = {library: cell.median for library, cell in zip(libraries, cells, strict=True) if cell}
    ours = medians.pop("nc10d", None)
    return f"{min(medians.values()) / ours:.2f}" if ours and medians else "–"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks coalescing", description=__doc__)
    parser.add_argument("peers", nargs="?", default=PEERS, help="libraries (%(default)s)")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget", type=float, default=0.3, help="seconds for a way's repeats")
    parser.add_argument(
        "--sizes", type=byte_size, nargs="+", default=SIZES, help="bytes of an array"
    )
    parser.add_argument("--limit", type=float, default=900.0, help="seconds for one job")
    options = parser.parse_args(arguments)
    options.libraries = ["nc10d", *filter(None, options.peers.split(","))]
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print. Blocks for all rounds."""
    options = parse(arguments)
    require(options.libraries)
    samples, load = collect(options)
    cores = len(os.sched_getaffinity(0))
    print(f"{options.ranks} ranks on {cores} cores, {options.rounds} rounds; others used", end=" ")
    print(f"{load:.2f} cores. Median (interval) of all 64, µs.\n")
    print(*table({key: estimate(times) for key, times in samples.items()}), sep="\n")
    return 0
