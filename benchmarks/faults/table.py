"""Play fault scenarios with nc10d and with gloo, and print how soon and how clearly ranks learn.

Each row is a scenario that both libraries play. A cell has the delay of the ranks' errors, and a
few words on them. The delay is in ms, median and most, after the kill, the timeout or the signal;
where a scenario ends something, it is the time that this took.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks.faults import endings, floods, interrupts, networks, pauses, stores
from benchmarks.faults.forked_ranks import ForkedRanks, Report
from benchmarks.faults.kills import play, rounds
from benchmarks.faults.results import LIMIT, TIMEOUT, Result, Scenario, numbers, outcome_of
from benchmarks.libraries import C10D_NAMES, make_c10d
from benchmarks.libraries.c10d import C10dLibrary

_BASE = "all_reduce"


def killed(library: C10dLibrary, count: int) -> Result:
    """Kill a rank of four at a random moment of random collectives."""
    late, named, survivors = [], 0, 0
    for drawn in rounds(count, 4, seed=7):
        played = play(drawn, library, timeout=5.0)
        survivors += drawn.size - 1
        late += [report["late"] for report in played["reports"]]
        named += sum(_names(report, played["pid"]) for report in played["reports"])
    return Result(tuple(late), f"{named} of {survivors} survivors name the lost rank")


def _names(report: Report, pid: int) -> bool:
    return report["failed"] is not None and f"pid {pid}" in report["message"]


def stopped(library: C10dLibrary, count: int) -> Result:
    """Stop a rank of three (SIGSTOP); the others' calls have a timeout."""
    late, named, reports = [], 0, 0
    for _ in range(count):
        played = ForkedRanks(3).play(partial(_stand_still, library, next(numbers)), 2, LIMIT)
        late += [report["late"] for report in played.reports]
        named += sum(report["failed"] == 2 for report in played.reports)
        reports += 2
    return Result(tuple(late), f"{named} of {reports} name the lost rank")


def _stand_still(library: C10dLibrary, number: int, ranks: ForkedRanks, rank: int) -> Report:
    library.join(number, rank, ranks.size, LIMIT)
    library.call(0, 1)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    library.shorten(TIMEOUT)
    began = time.monotonic()
    return outcome_of(library, partial(library.call, 0, 1), began + TIMEOUT)


def mismatched(library: C10dLibrary, count: int) -> Result:
    """Let two ranks make mismatching calls, in each of the ways there are."""
    outcomes = Counter[str]()
    late: list[float] = []
    for first, second in _pairs():
        for _ in range(count):
            part = partial(_disagree, library, next(numbers), first, second)
            played = ForkedRanks(2).play(part, 2, LIMIT)
            outcomes[_word_for(played.codes, played.reports)] += 1
            late += [report["late"] for report in played.reports]
    return Result(tuple(late), ", ".join(f"{word} {n}" for word, n in outcomes.most_common()))


def _pairs() -> Iterator[tuple[str, str]]:
    others = (
        *("all_reduce of another count", "all_reduce of another dtype", "all_reduce by another op"),
        *("all_reduce of far more", "barrier", "broadcast from 0", "reduce to 0", "all_gather"),
        *("reduce_scatter", "all_to_all"),
    )
    yield from ((_BASE, other) for other in others)
    yield from (("broadcast from 0", "broadcast from 1"), ("reduce to 0", "reduce to 1"))
    yield from (("broadcast from 0", "reduce to 0"), ("barrier", "all_gather"))
    yield from (("all_gather", "all_to_all"), ("reduce_scatter", "broadcast from 1"))


def _disagree(
    library: C10dLibrary, number: int, first: str, second: str, ranks: ForkedRanks, rank: int
) -> Report:
    library.join(number, rank, ranks.size, LIMIT)
    library.call(0, 1)
    library.shorten(TIMEOUT)
    calls = library.mismatching_calls()

    def call_and_meet() -> None:
        # Where the root of a broadcast leaves early, it learns of a mismatch in its next call.
        calls[first if rank == 0 else second]()
        calls["barrier"]()

    return outcome_of(library, call_and_meet, time.monotonic())


def _word_for(codes: Sequence[int], reports: Sequence[Report]) -> str:
    """Return a word for the outcome of two ranks' mismatching calls."""
    if any(code < 0 and code != -signal.SIGKILL for code in codes):
        return "aborted"
    if len(reports) < len(codes):
        return "hung"
    if any(report["kind"] == "nothing" for report in reports):
        return "silent"
    if all(report["kind"] == "CollectiveMismatch" for report in reports):
        return "clear"
    if any(report["late"] >= TIMEOUT for report in reports):
        return "timed out"
    return "unclear"


@dataclass(frozen=True, slots=True)
class Row:
    """A scenario, how often it is played by default, and how often with --long."""

    title: str
    scenario: Scenario
    count: int
    long: int


ROWS = {
    "kills": Row("kill -9, 4 ranks", killed, 10, 100),
    "stops": Row(f"SIGSTOP, timeout {TIMEOUT:g} s", stopped, 3, 100),
    "pauses": Row("seconds of pauses shorter than the timeout", pauses.paused, 4, 3600),
    "interrupts": Row("Ctrl-C in every call that waits", interrupts.interrupted, 1, 100),
    "mismatches": Row("16 kinds of mismatched calls", mismatched, 1, 100),
    "stores": Row(
        f"a store absent, mute, frozen, dead, half there; timeout {TIMEOUT:g} s",
        *(stores.unanswered, 1, 100),
    ),
    "networks": Row(f"a host's network is lost; timeout {LIMIT:g} s", networks.cut_off, 1, 50),
    "ends": Row("destroyed, dropped, left alone in a call; exit", endings.left, 20, 1000),
    "forks": Row("a call in a forked child", endings.forked, 1, 100),
    "cycles": Row("init and destroy", endings.cycles, 50, 1000),
    "drops": Row("groups dropped without destroy", endings.dropped, 20, 200),
    "all-killed": Row("kill -9 of all ranks", endings.all_killed, 3, 200),
    "strangers": Row("strangers at the store, with a token", floods.flooded, 200, 10_000),
    "ports": Row("strangers at the ports of ranks", floods.at_ports, 1000, 100_000),
    "frames": Row("random and changed frames", floods.mutated, 200_000, 5_000_000),
}


def table(names: Sequence[str], rows: Sequence[tuple[Row, int]]) -> Iterator[str]:
    """Play each scenario `count` times with every library; yield the lines of a table."""
    libraries = [make_c10d(name) for name in names]
    for library in libraries:
        library.warm()
    yield "| what | " + " | ".join(names) + " |"
    yield "|---" * (1 + len(names)) + "|"
    for row, count in rows:
        cells = [str(row.scenario(library, count)) for library in libraries]
        yield f"| {row.title} | " + " | ".join(cells) + " |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks faults", description=__doc__)
    parser.add_argument("--long", action="store_true", help="play as often as campaigns do")
    parser.add_argument("--count", type=int, help="play COUNT times instead")
    for name, choices in (("row", ROWS), ("library", C10D_NAMES)):
        parser.add_argument(
            f"--{name}", choices=choices, action="append", help="these only (default: all)"
        )
    options = parser.parse_args(arguments)
    rows = [ROWS[name] for name in options.row or ROWS]
    counts = [options.count or (row.long if options.long else row.count) for row in rows]
    for line in table(options.library or C10D_NAMES, [*zip(rows, counts, strict=True)]):
        print(line, flush=True)
    print(f"\nmedian / most, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    return 0
