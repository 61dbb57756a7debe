"""`python -m nc10d.bench --compare gloo,mpich,openmpi`: nc10d beside other libraries, in one run.

In each round, for each collective, each library has a job of its own, and they take turns at going
first. A cell is the median over rounds with its interval. Results are checked. What other
processes did to the machine is noted for each round.

With --hosts the ranks are on hosts of their own, network namespaces, which only root can make; the
peers `tcp`, `tcp2`... are plain copies of the bytes that have to cross, by so many sockets a pair
(plain.py); no verdict counts them. An MPI can't be asked for there: its launcher would have to
reach the hosts.

Each rank writes the array that a call reads just before the call, as programs do, and the time of
the writing is taken off. With --untouched nobody does: then calls read what nobody has changed
since the first one, and much of it is in the reader's own cache, as it is in most benchmarks.

What --json names is written after each round, so a run that was ended early can be shown by --read.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.compare import plots
from benchmarks.compare.apart import hosts_of_their_own, run_apart, words_of
from benchmarks.compare.foreign import Foreign
from benchmarks.compare.plain import is_plain
from benchmarks.compare.starters import LIBRARIES, WANDERERS, Rows, run_job, starter
from benchmarks.compare.verdicts import (
    CONFIDENCE,
    LEAD,
    LEADING,
    NEAR,
    NEAR_SMALL,
    Estimate,
    coverage,
    estimate,
    judge,
    too_near,
)

SIZES = [8, 1 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20]
COLLECTIVES = [
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "all_to_all",
    "ping_pong",
    "exchange",
    "barrier",
]
Cell = tuple[str, int]
Samples = dict[str, dict[Cell, list[float]]]
Start = Callable[[str, Sequence[str]], Rows]
"""Runs a library's job with the arguments of peers.py."""


def cells(collective: str, largest: int, smallest: int = 0) -> list[Cell]:
    """Return what is measured of a collective: its sizes up to `largest`; a barrier has none."""
    sizes = [0] if collective == "barrier" else [n for n in SIZES if smallest <= n <= largest]
    return [(collective, nbytes) for nbytes in sizes]


def turns(libraries: Sequence[str], number: int) -> list[str]:
    """Return who goes when: each round another one first, and every other round backwards."""
    first = number % len(libraries)
    order = [*libraries[first:], *libraries[:first]]
    return order if number % 2 == 0 else order[::-1]


@contextlib.contextmanager
def started(options: argparse.Namespace) -> Iterator[Start]:
    """Yield how jobs are run: by a launcher on this host, or on hosts that are made for it."""
    if options.hosts == 1:
        module = "benchmarks.compare.peers"
        yield lambda library, words: run_job(library, options.ranks, module, words, options.limit)
        return
    mates = options.ranks // options.hosts
    with hosts_of_their_own(options.hosts) as net:
        yield lambda library, words: run_apart(
            net, mates, [*words_of(net, library), *words], options.limit
        )


def collect(options: argparse.Namespace, start: Start) -> tuple[Samples, list[float]]:
    """Run all rounds; return times by library and cell, and each round's foreign load in cores.

    After each round all that has been measured is saved, if that is asked for.
    """
    samples: Samples = {library: {} for library in options.libraries}
    loads: list[float] = []
    for number in range(options.rounds):
        with Foreign() as foreign:
            for library, collective in _order(options, number):
                for (name, nbytes), seconds in _measured(start, library, collective, options):
                    samples[library].setdefault((name, nbytes), []).append(seconds)
        loads.append(foreign.cores)
        if options.json:
            save(options.json, samples, options.ranks, loads, untouched=options.untouched)
        told = f"# round {number + 1} of {options.rounds}: others used {foreign.cores:.2f} cores"
        print(told, file=sys.stderr, flush=True)
    return samples, loads


def _order(options: argparse.Namespace, number: int) -> Iterator[tuple[str, str]]:
    for place, collective in enumerate(options.collectives):
        for library in turns(options.libraries, number + place):
            yield library, collective


def _measured(
    start: Start, library: str, collective: str, options: argparse.Namespace
) -> Iterator[tuple[Cell, float]]:
    """Yield one job's times; RuntimeError if any element was wrong."""
    jobs = json.dumps(cells(collective, options.max_bytes, options.min_bytes))
    words = [jobs, str(options.budget), str(int(options.untouched))]
    for name, nbytes, seconds, wrong in start(library, words):
        if wrong:
            raise RuntimeError(f"{library}: {wrong} wrong elements in {name} of {nbytes} bytes")
        yield (name, nbytes), seconds


def table(samples: Samples) -> list[str]:
    """Return the comparison as a Markdown table; below it, the cells that fall short."""
    libraries, ours = list(samples), samples["nc10d"]
    head = ["collective", "bytes", *(f"{name} µs" for name in libraries), "best/nc10d", "nc10d is"]
    head += ["copy/nc10d"] if any(map(is_plain, libraries)) else []
    rows = [_row(head), "|" + "---|" * len(head)]
    behind, near = [], []
    for (collective, nbytes), _ in ours.items():
        found = {name: estimate(samples[name][collective, nbytes]) for name in libraries}
        plain = {name: one for name, one in found.items() if is_plain(name)}
        peers = {name: one for name, one in found.items() if name not in {"nc10d", *plain}}
        verdict = judge(nbytes, found["nc10d"], peers)
        told = [*map(str, found.values()), f"{verdict.ratio:.2f}", verdict.word]
        if plain:
            told.append(f"{_quickest(plain) / found['nc10d'].median:.2f}")
        rows.append(_row([collective, str(nbytes), *told]))
        if verdict.word == "behind":
            behind.append(f"{collective} {nbytes} ({verdict.best}, {verdict.ratio:.2f})")
        if too_near(collective, nbytes, verdict.ratio):
            near.append(f"{collective} {nbytes} ({verdict.best}, {verdict.ratio:.2f})")
    leading = f"Of {' and '.join(sorted(LEADING))} from 1 MiB on, less than {LEAD} times ahead"
    return [*rows, "", _listed("Behind", behind), _listed(leading, near)]


def _quickest(found: Mapping[str, Estimate]) -> float:
    return min(one.median for one in found.values())


def _listed(what: str, found: Sequence[str]) -> str:
    return f"{what}: {', '.join(found) or 'none'}."


def _row(words: Sequence[str]) -> str:
    return f"| {' | '.join(words)} |"


def heading(
    samples: Samples, ranks: int, loads: Sequence[float], *, untouched: bool = False
) -> str:
    """Say what was measured, on what, how surely, and beside what load."""
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
    """Write everything that was measured as JSON, in place of what the file held."""
    flat = {lib: [[*cell, times] for cell, times in of.items()] for lib, of in samples.items()}
    head = {"ranks": ranks, "untouched": untouched}
    # Whole or not at all: who is interrupted here keeps the round before.
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
    parser = argparse.ArgumentParser(prog="python -m nc10d.bench", description=__doc__)
    parser.add_argument("--compare", default="gloo,mpich,openmpi", help="peers (%(default)s)")
    parser.add_argument("--ranks", type=int, default=2, help="of all hosts together (2)")
    parser.add_argument("--hosts", type=int, default=1, help="network namespaces to run on (1)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--min-bytes", type=int, default=0)
    parser.add_argument("--max-bytes", type=int, default=SIZES[-1])
    parser.add_argument("--collectives", default=",".join(COLLECTIVES))
    parser.add_argument("--budget", type=float, default=0.08, help="seconds for a cell's round")
    parser.add_argument("--untouched", action="store_true", help="leave arrays between calls")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for one job")
    parser.add_argument("--json", type=Path, help="write samples to this file after each round")
    parser.add_argument("--read", type=Path, help="show the samples of this file: measure nothing")
    parser.add_argument("--plot", type=Path, help="draw time over bytes into this PNG file")
    options = parser.parse_args(arguments)
    options.libraries = ["nc10d", *options.compare.split(",")]
    options.collectives = options.collectives.split(",")
    problem = "" if options.read else _problem(options)
    if problem:
        parser.error(problem)
    return options


def _problem(options: argparse.Namespace) -> str:
    """Say what is wrong with options that each are well-formed; empty if nothing is."""
    peers = options.libraries[1:]
    plain = [name for name in peers if is_plain(name)]
    beside = [name for name in peers if name not in plain]
    for what, found, known in (
        ("collective", options.collectives, COLLECTIVES),
        ("library", beside, LIBRARIES),
    ):
        unknown = sorted(set(found) - set(known))
        if unknown:
            return f"unknown {what} {', '.join(unknown)}; known: {', '.join(known)}"
    if not beside:
        return "a comparison needs a library beside nc10d: gloo, or gloo,tcp with --hosts 2"
    if options.hosts < 1 or options.ranks % options.hosts:
        return f"{options.ranks} ranks can't be dealt to {options.hosts} hosts evenly"
    return _misplaced(options.hosts, plain, beside)


def _misplaced(hosts: int, plain: Sequence[str], beside: Sequence[str]) -> str:
    if hosts == 1 and plain:
        return f"{', '.join(plain)} copies between hosts: it needs --hosts 2 or more"
    bound = [name for name in beside if name not in WANDERERS]
    if hosts > 1 and bound:
        return f"{', '.join(bound)} can't be started with --hosts {hosts}; gloo can"
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
        plots.time_over_bytes(samples, f"{ranks} ranks", options.plot)
    return 0


def require(libraries: Sequence[str]) -> None:
    """Leave with a word if a library's launcher is not installed."""
    for library in libraries:
        missing = "" if is_plain(library) else starter(library, 1).missing
        if missing:
            raise SystemExit(f"{library}: {missing} is not installed")


if __name__ == "__main__":
    raise SystemExit(main())
