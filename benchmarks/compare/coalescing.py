"""`python -m nc10d.bench --coalescing`: c10d's published comparison, beside gloo and MPI.

64 float32 arrays reduced in each way that a library has (`batches`: a coalescing block, a plan,
one by one, one flat array with the copies): wall time, CPU time of a rank, and time until all calls
have returned. Libraries take turns in interleaved rounds; results are checked. What counts in the
end is the least that any way of a library takes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from collections.abc import Mapping, Sequence

from benchmarks.compare.batches import NAMES
from benchmarks.compare.compare import require, turns
from benchmarks.compare.foreign import Foreign
from benchmarks.compare.plots import bytes_label
from benchmarks.compare.starters import run_job
from benchmarks.compare.verdicts import Estimate, estimate

SIZES = [1 << 10, 128 << 10, 8 << 20]
QUICKEST = "quickest"
MEASURES = ["wall", "CPU", "issue"]
Key = tuple[str, str, int, str]
"""Library, way, bytes of an array, measure."""
Samples = dict[Key, list[float]]


def collect(options: argparse.Namespace) -> tuple[Samples, float]:
    """Run all rounds; return seconds by key, and the foreign load in cores."""
    samples: Samples = {}
    with Foreign() as foreign:
        for number in range(options.rounds):
            for library in turns(options.libraries, number):
                _job(samples, library, options)
            print(f"# round {number + 1} of {options.rounds} done", file=sys.stderr, flush=True)
    return samples, foreign.cores


def _job(samples: Samples, library: str, options: argparse.Namespace) -> None:
    arguments = [json.dumps(options.sizes), str(options.budget)]
    rows = run_job(library, options.ranks, "benchmarks.compare.batches", arguments, options.limit)
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
                told = ["–" if cell is None else str(cell) for cell in cells]
                words = [bytes_label(nbytes), way, measure, *told, _ahead(libraries, cells)]
                rows.append(f"| {' | '.join(words)} |")
    return rows


def _cell(
    found: Mapping[Key, Estimate], library: str, way: str, nbytes: int, measure: str
) -> Estimate | None:
    if way != QUICKEST:
        return found.get((library, way, nbytes, measure))
    ways = [found[key] for key in found if (key[0], *key[2:]) == (library, nbytes, measure)]
    return min(ways, key=lambda one: one.median, default=None)


def _ahead(libraries: Sequence[str], cells: Sequence[Estimate | None]) -> str:
    """Return by how much the best peer's median is more than ours."""
    medians = {library: cell.median for library, cell in zip(libraries, cells, strict=True) if cell}
    ours = medians.pop("nc10d", None)
    return f"{min(medians.values()) / ours:.2f}" if ours and medians else "–"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m nc10d.bench", description=__doc__)
    parser.add_argument("--coalescing", action="store_true", help="this table")
    parser.add_argument("--compare", default="gloo,mpich,openmpi", help="peers (%(default)s)")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget", type=float, default=0.3, help="seconds for a way's repeats")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes of an array")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds for one job")
    options = parser.parse_args(arguments)
    options.libraries = ["nc10d", *filter(None, options.compare.split(","))]
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print. Blocks for all rounds."""
    options = parse(arguments)
    require(options.libraries)
    samples, foreign = collect(options)
    cores = len(os.sched_getaffinity(0))
    print(f"{options.ranks} ranks on {cores} cores, {options.rounds} rounds; others used", end=" ")
    print(f"{foreign:.2f} cores. Median (interval) of all 64, µs.\n")
    print(*table({key: estimate(times) for key, times in samples.items()}), sep="\n")
    return 0
