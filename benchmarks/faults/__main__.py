"""`python -m benchmarks.faults`: what goes wrong, and what ranks learn: nc10d beside gloo.

Each row is a scenario that both libraries play: here those in which calls fail; others are in
`interrupts`, `pauses`, `doors` (stores), `networks` (one that is lost), `endings` (of groups and
processes) and `strangers`. A cell says how late ranks were told, and how much. Lateness is in ms,
median and most, beyond the kill, the timeout or the signal; where something is ended, it is how
long that took.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks.faults import endings, interrupts, networks, pauses, stores, strangers
from benchmarks.faults.cells import LIMIT, TIMEOUT, Cell, Scenario, numbers, told
from benchmarks.faults.kills import play, rounds
from benchmarks.faults.libraries import LIBRARIES, Library
from benchmarks.faults.stage import Report, Stage

_BASE = "all_reduce"


def killed(library: Library, count: int) -> Cell:
    """Kill a rank of four at a random moment of random collectives."""
    late, named, survivors = [], 0, 0
    for one in rounds(count, 4, seed=7):
        played = play(one, library, timeout=5.0)
        survivors += one.size - 1
        late += [report["late"] for report in played["told"]]
        named += sum(_names(report, played["pid"]) for report in played["told"])
    return Cell(tuple(late), f"{named} of {survivors} survivors are told who")


def _names(report: Report, pid: int) -> bool:
    return report["failed"] is not None and f"pid {pid}" in report["message"]


def stopped(library: Library, count: int) -> Cell:
    """Stop a rank of three (SIGSTOP); the others' calls have a timeout."""
    late, named, reports = [], 0, 0
    for _ in range(count):
        played = Stage(3).play(partial(_stand_still, library, next(numbers)), 2, LIMIT)
        late += [report["late"] for report in played.reports]
        named += sum(report["failed"] == 2 for report in played.reports)
        reports += 2
    return Cell(tuple(late), f"{named} of {reports} are told who")


def _stand_still(library: Library, number: int, stage: Stage, rank: int) -> Report:
    library.join(number, rank, stage.size, LIMIT)
    library.call(0, 1)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    library.shorten(TIMEOUT)
    began = time.monotonic()
    return told(library, partial(library.call, 0, 1), began + TIMEOUT)


def mismatched(library: Library, count: int) -> Cell:
    """Have one rank of two call something else than the other, in each of the ways there are."""
    outcomes = Counter[str]()
    late: list[float] = []
    for mine, theirs in _pairs():
        for _ in range(count):
            part = partial(_disagree, library, next(numbers), mine, theirs)
            played = Stage(2).play(part, 2, LIMIT)
            outcomes[_judged(played.codes, played.reports)] += 1
            late += [report["late"] for report in played.reports]
    return Cell(tuple(late), ", ".join(f"{what} {n}" for what, n in outcomes.most_common()))


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
    library: Library, number: int, mine: str, theirs: str, stage: Stage, rank: int
) -> Report:
    library.join(number, rank, stage.size, LIMIT)
    library.call(0, 1)
    library.shorten(TIMEOUT)
    calls = library.calls()

    def call_and_meet() -> None:
        # A root that leads goes on, and learns of it in what it calls next.
        calls[mine if rank == 0 else theirs]()
        calls["barrier"]()

    return told(library, call_and_meet, time.monotonic())


def _judged(codes: Sequence[int], reports: Sequence[Report]) -> str:
    """Say in a word what two ranks that disagree were told."""
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
    """A scenario, how often it is played as a matter of course, and how often in a campaign."""

    what: str
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
    "strangers": Row("strangers at the store, with a token", strangers.flooded, 200, 10_000),
    "ports": Row("strangers at the ports of ranks", strangers.at_ports, 1000, 100_000),
    "frames": Row("random and changed frames", strangers.mutated, 200_000, 5_000_000),
}


def table(names: Sequence[str], rows: Sequence[tuple[Row, int]]) -> Iterator[str]:
    """Play scenarios with every library, each so often; give the lines of a table."""
    libraries = [LIBRARIES[name]() for name in names]
    for library in libraries:
        library.warm()
    yield "| what | " + " | ".join(names) + " |"
    yield "|---" * (1 + len(names)) + "|"
    for row, count in rows:
        cells = [str(row.scenario(library, count)) for library in libraries]
        yield f"| {row.what} | " + " | ".join(cells) + " |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__)
    parser.add_argument("--long", action="store_true", help="play as often as campaigns do")
    parser.add_argument("--count", type=int, help="play so often, instead")
    for name, choices in (("row", ROWS), ("library", LIBRARIES)):
        parser.add_argument(
            f"--{name}", choices=choices, action="append", help="these only (default: all)"
        )
    options = parser.parse_args(arguments)
    rows = [ROWS[name] for name in options.row or ROWS]
    counts = [options.count or (row.long if options.long else row.count) for row in rows]
    for line in table(options.library or [*LIBRARIES], [*zip(rows, counts, strict=True)]):
        print(line, flush=True)
    print(f"\nmedian / most, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    return 0


if __name__ == "__main__":
    sys.exit(main())
