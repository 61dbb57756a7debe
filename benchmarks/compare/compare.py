"""Compare nc10d with other libraries, collective by collective, in the same run.

In each round, for each collective, each library has a job of its own; they take turns at going
first. A cell is the median over rounds with its interval. Results are checked. The load of other
processes is noted for each round.

With --hosts the ranks are on separate hosts, network namespaces, which only root can make. The
peers tcp, tcp2... are plain copies of the bytes that have to cross, by so many sockets a pair; the
last column of words ignores them. An MPI can't run there: its launcher would have to reach the
hosts.

Each rank writes the array that a call reads just before the call, as programs do, and the time of
the writing is subtracted. With --untouched no rank does. Calls then read arrays that have not
changed since the first call, mostly from the reader's own cache, as in most benchmarks.

The file of --json is written after each round, so --read can show an interrupted run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks import figures
from benchmarks.background_load import BackgroundLoad
from benchmarks.estimates import (
    CONFIDENCE,
    LEAD,
    LEADING,
    NEAR,
    NEAR_SMALL,
    compare,
    coverage,
    estimate,
    too_near,
    turns,
)
from benchmarks.libraries import C10D_NAMES, NAMES, is_tcp
from benchmarks.libraries.jobs import Rows, run_job, start_command
from benchmarks.libraries.namespaces import run_on_hosts, separate_hosts
from nc10d.base.text import byte_size

SIZES = [8, 1 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20]
COLLECTIVES = [
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "all_to_all",
    "ping_pong",
    "exchange",
    "barrier",
]
MORE = [
    *("all_gather_list", "gather_list", "scatter_list", "reduce_scatter_list", "all_to_all_list"),
    *("all_gather_uneven", "gather_uneven", "scatter_uneven", "reduce_scatter_uneven"),
    "all_to_all_uneven",
    *("all_gather_object", "gather_object", "broadcast_object", "scatter_object"),
    "ping_pong_object",
    *("window", "message_window"),
    *("scan", "exscan"),
]
"""Collectives that are compared if they are named: a list is MPI's call with counts (Gatherv), an
uneven list has arrays that grow with the rank; an object is a list of floats up to 1 KiB, else a
dict with an array, for MPI by mpi4py's lower-case calls; a window is 64 asynchronous all_reduces of
equal pieces of the array, and then all waits; a message_window 64 receives and 64 sends of them."""
GLOO_LACKS = {
    *("all_gather_uneven", "gather_uneven", "scatter_uneven", "reduce_scatter_uneven"),
    *("scan", "exscan"),
}
Cell = tuple[str, int]
Samples = dict[str, dict[Cell, list[float]]]
Start = Callable[[str, Sequence[object]], Rows]
"""Runs a library's job with the arguments of `call_times.rows`."""
PEERS = "gloo,mpich,openmpi"
WORKER = "benchmarks.compare.call_times"


def cells(collective: str, largest: int, smallest: int = 0) -> list[Cell]:
    """Return the cells of a collective: its sizes up to `largest`; a barrier has a single cell."""
    sizes = [0] if collective == "barrier" else [n for n in SIZES if smallest <= n <= largest]
    return [(collective, nbytes) for nbytes in sizes]


@contextlib.contextmanager
def started(options: argparse.Namespace) -> Iterator[Start]:
    """Yield a function that runs jobs: on this host, or on hosts that are made for it."""
    if options.hosts == 1:
        yield lambda library, words: run_job(library, options.ranks, WORKER, words, options.limit)
        return
    local_ranks = options.ranks // options.hosts
    with separate_hosts(options.hosts) as net:
        yield lambda library, words: run_on_hosts(
            net, local_ranks, library, WORKER, words, options.limit
        )


def collect(options: argparse.Namespace, start: Start) -> tuple[Samples, list[float]]:
    """Run all rounds; return times by library and cell, and each round's other load in cores.

    With --json, everything measured so far is saved after each round. Blocks for all rounds.
    """
    samples: Samples = {library: {} for library in options.libraries}
    loads: list[float] = []
    for number in range(options.rounds):
        with BackgroundLoad() as others:
            for library, collective in _order(options, number):
                for (name, nbytes), seconds in _measured(start, library, collective, options):
                    samples[library].setdefault((name, nbytes), []).append(seconds)
        loads.append(others.cores)
        if options.json:
            save(options.json, samples, options.ranks, loads, untouched=options.untouched)
        progress = f"# round {number + 1} of {options.rounds}: others used {others.cores:.2f} cores"
        print(progress, file=sys.stderr, flush=True)
    return samples, loads


def _order(options: argparse.Namespace, number: int) -> Iterator[tuple[str, str]]:
    for place, collective in enumerate(options.collectives):
        for library in turns(options.libraries, number + place):
            yield library, collective


def _measured(
    start: Start, library: str, collective: str, options: argparse.Namespace
) -> Iterator[tuple[Cell, float]]:
    """Yield one job's times; RuntimeError if any element was wrong."""
    jobs = cells(collective, options.max_bytes, options.min_bytes)
    arguments = [jobs, options.budget, options.untouched]
    for name, nbytes, seconds, wrong in start(library, arguments):
        if wrong:
            raise RuntimeError(f"{library}: {wrong} wrong elements in {name} of {nbytes} bytes")
        yield (name, nbytes), seconds


def table(samples: Samples) -> list[str]:
    """Return the comparison as a Markdown table; below it, the cells that fall short."""
    libraries, ours = list(samples), samples["nc10d"]
    head = ["collective", "bytes", *(f"{name} µs" for name in libraries), "best/nc10d", "nc10d is"]
    head += ["copy/nc10d"] if any(map(is_tcp, libraries)) else []
    rows = [_row(head), "|" + "---|" * len(head)]
    behind, near = [], []
    for (collective, nbytes), _ in ours.items():
        found = {name: estimate(samples[name][collective, nbytes]) for name in libraries}
        copies = {name: times for name, times in found.items() if is_tcp(name)}
        peers = {name: times for name, times in found.items() if name not in {"nc10d", *copies}}
        result = compare(nbytes, found["nc10d"], peers)
        words = [*map(str, found.values()), f"{result.ratio:.2f}", result.word]
        if copies:
            fastest = min(copy.median for copy in copies.values())
            words.append(f"{fastest / found['nc10d'].median:.2f}")
        rows.append(_row([collective, str(nbytes), *words]))
        if result.word == "behind":
            behind.append(f"{collective} {nbytes} ({result.best}, {result.ratio:.2f})")
        if too_near(collective, nbytes, result.ratio):
            near.append(f"{collective} {nbytes} ({result.best}, {result.ratio:.2f})")
    leading = f"Of {' and '.join(sorted(LEADING))} from 1 MiB on, less than {LEAD} times ahead"
    return [*rows, "", _listed("Behind", behind), _listed(leading, near)]


def _listed(title: str, found: Sequence[str]) -> str:
    return f"{title}: {', '.join(found) or 'none'}."


def _row(words: Sequence[str]) -> str:
    return f"| {' | '.join(words)} |"


def heading(
    samples: Samples, ranks: int, loads: Sequence[float], *, untouched: bool = False
) -> str:
    """Return a sentence on the machine, the rounds, the interval's confidence and the load."""
    cores = len(os.sched_getaffinity(0))
    surely = 100 * min(CONFIDENCE, coverage(len(loads), 0))
    load = ", ".join(f"{value:.2f}" for value in loads)
    arrays = "untouched between calls" if untouched else "written before each call"
    return (
        f"{ranks} ranks on {cores} cores of {platform.machine()}, {len(loads)} rounds of "
        f"{', '.join(samples)}; arrays {arrays}. "
        f"Median (interval that covers it with at least {surely:.0f} %). "
        f"Cores used by others in each round: {load}. "
        f"Tied: up to {NEAR} times the best peer's median, or intervals that overlap; "
        f"below 1 KiB up to 1 µs more or {NEAR_SMALL} times."
    )


def save(
    path: Path, samples: Samples, ranks: int, loads: Sequence[float], *, untouched: bool
) -> None:
    """Write all samples as JSON, in place of the file's contents."""
    flat = {lib: [[*cell, times] for cell, times in of.items()] for lib, of in samples.items()}
    head = {"ranks": ranks, "untouched": untouched}
    # Whole or not at all: an interrupted run keeps the round before.
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps({**head, "foreign": list(loads), "samples": flat}))
    partial.replace(path)


def load(path: Path) -> tuple[Samples, int, list[float], bool]:
    """Read what `save` wrote: samples, ranks, loads, and whether arrays were untouched.

    ValueError where the file holds something else, OSError where it can't be read.
    """
    found = json.loads(path.read_text())
    if not isinstance(found, dict) or not {"ranks", "foreign", "samples"} <= found.keys():
        raise ValueError("it holds no samples")
    samples: Samples = {
        library: {(name, nbytes): times for name, nbytes, times in rows}
        for library, rows in found["samples"].items()
    }
    return samples, found["ranks"], found["foreign"], found.get("untouched", True)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; SystemExit with usage if it makes no sense."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("peers", nargs="?", default=PEERS, help="libraries (%(default)s)")
    parser.add_argument("--ranks", type=int, default=2, help="of all hosts together (2)")
    parser.add_argument("--hosts", type=int, default=1, help="network namespaces to run on (1)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--min-bytes", type=byte_size, default=0)
    parser.add_argument("--max-bytes", type=byte_size, default=SIZES[-1])
    parser.add_argument(
        "--collectives", default=",".join(COLLECTIVES), help="also: " + ", ".join(MORE)
    )
    parser.add_argument("--budget", type=float, default=0.08, help="seconds for a cell's round")
    parser.add_argument("--untouched", action="store_true", help="leave arrays between calls")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for one job")
    parser.add_argument("--json", type=Path, help="write samples to this file after each round")
    parser.add_argument("--read", type=Path, help="show the samples of this file: measure nothing")
    parser.add_argument("--plot", type=Path, help="draw time over bytes into this PNG file")
    options = parser.parse_args(arguments)
    options.libraries = ["nc10d", *options.peers.split(",")]
    options.collectives = options.collectives.split(",")
    problem = "" if options.read else _problem(options)
    if problem:
        parser.error(problem)
    return options


def _problem(options: argparse.Namespace) -> str:
    """Return the error of a combination of well-formed options; empty if they fit."""
    peers = options.libraries[1:]
    copies = [name for name in peers if is_tcp(name)]
    libraries = [name for name in peers if name not in copies]
    for kind, found, known in (
        ("collective", options.collectives, COLLECTIVES + MORE),
        ("library", libraries, NAMES),
    ):
        unknown = sorted(set(found) - set(known))
        if unknown:
            return f"unknown {kind} {', '.join(unknown)}; known: {', '.join(known)}"
    lacking = sorted(GLOO_LACKS & set(options.collectives)) if "gloo" in libraries else []
    if lacking:
        return f"gloo has no {', '.join(lacking)}: name other libraries, as mpich"
    if not libraries:
        return "a comparison needs a library beside nc10d: gloo, or gloo,tcp with --hosts 2"
    if options.hosts < 1 or options.ranks % options.hosts:
        return f"{options.ranks} ranks can't be dealt to {options.hosts} hosts evenly"
    if options.hosts == 1 and copies:
        return f"{', '.join(copies)} copies between hosts: it needs --hosts 2 or more"
    bound = [name for name in libraries if name not in C10D_NAMES]
    if options.hosts > 1 and bound:
        return f"{', '.join(bound)} can't be started with --hosts {options.hosts}; gloo can"
    return ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, print a table, and draw it if asked to. Blocks for all rounds."""
    options = parse(arguments)
    if options.read:
        try:
            samples, ranks, loads, untouched = load(options.read)
        except (OSError, ValueError) as error:
            raise SystemExit(f"--read {options.read}: {error}") from error
    else:
        require(options.libraries)
        ranks, untouched = options.ranks, options.untouched
        with started(options) as start:
            samples, loads = collect(options, start)
    print(heading(samples, ranks, loads, untouched=untouched), "", *table(samples), sep="\n")
    if options.plot:
        figures.time_over_bytes(samples, f"{ranks} ranks", options.plot)
    return 0


def require(libraries: Sequence[str]) -> None:
    """Exit with a message if a library's launcher is not installed."""
    for library in libraries:
        missing = "" if is_tcp(library) else start_command(library, 1).missing
        if missing:
            raise SystemExit(f"{library}: {missing} is not installed")
