"""`python -m nc10d.bench --coalesced`: many all_reduces as one, beside other libraries' best ways.

64 arrays of 1 KiB and of 128 KiB, each library in each way it has, all of Python included, in
interleaved rounds. What counts is a library's quickest way; results are checked.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence

from nc10d.bench.compare import require, turns
from nc10d.bench.foreign import Foreign
from nc10d.bench.plots import bytes_label
from nc10d.bench.starters import run_job
from nc10d.bench.verdicts import Estimate, estimate

SIZES = [1 << 10, 128 << 10]
Way = tuple[str, str]
Samples = dict[tuple[Way, int], list[float]]
Estimates = Mapping[tuple[Way, int], Estimate]


def collect(options: argparse.Namespace) -> tuple[Samples, float]:
    """Run all rounds; return times by (library, way) and size, and the foreign load in cores."""
    samples: Samples = {}
    with Foreign() as foreign:
        for number in range(options.rounds):
            for library in turns(options.libraries, number):
                _job(samples, library, options)
            print(f"# round {number + 1} of {options.rounds} done", file=sys.stderr, flush=True)
    return samples, foreign.cores


def _job(samples: Samples, library: str, options: argparse.Namespace) -> None:
    arguments = [json.dumps(SIZES), str(options.budget)]
    rows = run_job(library, options.ranks, "nc10d.bench.batches", arguments, options.limit)
    for way, nbytes, seconds, wrong in rows:
        if wrong:
            raise RuntimeError(f"{library}, {way}: {wrong} wrong elements of {nbytes} bytes")
        samples.setdefault(((library, way), nbytes), []).append(seconds)


def table(found: Estimates) -> list[str]:
    """Return a Markdown table: ways by size, and how far the best peer is behind each of ours."""
    head = ["library", "way"]
    for nbytes in SIZES:
        head += [f"64 × {bytes_label(nbytes)}, µs", "best peer/this"]
    rows = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for way in dict.fromkeys(way for way, _ in found):
        told = list(way)
        for nbytes in SIZES:
            this = found[way, nbytes]
            told += [str(this), f"{best_peer(found, nbytes) / this.median:.2f}"]
        rows.append(f"| {' | '.join(told)} |")
    return rows


def best_peer(found: Estimates, nbytes: int) -> float:
    """Return the seconds of the quickest way of any other library."""
    peers = (way for way, size in found if way[0] != "nc10d" and size == nbytes)
    return min(found[way, nbytes].median for way in peers)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m nc10d.bench", description=__doc__)
    parser.add_argument("--coalesced", action="store_true", help="this table")
    parser.add_argument("--compare", default="gloo,mpich,openmpi", help="peers (%(default)s)")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget", type=float, default=0.08, help="seconds for a way's round")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for one job")
    options = parser.parse_args(arguments)
    options.libraries = ["nc10d", *options.compare.split(",")]
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
