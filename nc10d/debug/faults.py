"""`python -m nc10d.debug.faults`: what goes wrong, and what ranks are told: nc10d beside gloo.

Each row is a scenario that both libraries play: here those in which calls fail; those in which
groups and processes end are in `endings`, those of stores and strangers in `doors`, the lost
network in `networks`. A cell says how late ranks were told, and how much. Lateness is in ms, median
and most, beyond the kill, the timeout or the signal; where something is ended, it is how long that
took.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial

from nc10d.debug import doors, endings, networks
from nc10d.debug.cells import LIMIT, TIMEOUT, Cell, Scenario, numbers, shorten, told
from nc10d.debug.kills import play, rounds
from nc10d.debug.libraries import LIBRARIES, Library
from nc10d.debug.stage import Report, Stage

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
    shorten(library)
    began = time.monotonic()
    return told(library, partial(library.call, 0, 1), began + TIMEOUT)


def interrupted(library: Library, count: int) -> Cell:
    """Press Ctrl-C while a rank waits for another one."""
    late, told = [], Counter[str]()
    for _ in range(count):
        played = Stage(2).play(partial(_press, library, next(numbers)), 1, LIMIT)
        late += [report["late"] for report in played.reports]
        told.update(report["kind"] for report in played.reports)
    return Cell(tuple(late), ", ".join(f"{kind} {number}x" for kind, number in told.items()))


def _press(library: Library, number: int, stage: Stage, rank: int) -> Report | None:
    library.join(number, rank, stage.size, LIMIT)
    library.call(0, 1)
    if rank == 1:
        signal.pause()
        return None
    shorten(library)
    sent = time.monotonic() + 0.2
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    return told(library, partial(library.call, 0, 1), sent)


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
    shorten(library)
    call = library.calls()[mine if rank == 0 else theirs]
    return told(library, call, time.monotonic())


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


ROWS: dict[str, tuple[Scenario, int]] = {
    "kill -9, 4 ranks": (killed, 10),
    f"SIGSTOP, timeout {TIMEOUT:g} s": (stopped, 3),
    "Ctrl-C in a call": (interrupted, 5),
    "16 kinds of mismatched calls": (mismatched, 1),
    f"a store absent, mute, frozen, dead; timeout {TIMEOUT:g} s": (doors.unanswered, 1),
    f"a host's network is lost; timeout {LIMIT:g} s": (networks.cut_off, 1),
    "destroy and exit with a call in flight": (endings.left, 3),
    "a call in a forked child": (endings.forked, 1),
    "init and destroy": (endings.cycles, 20),
    "kill -9 of all ranks": (endings.all_killed, 3),
    "strangers at the store, with a token": (doors.flooded, 200),
    "random and changed frames": (doors.mutated, 20_000),
}


def table(names: Sequence[str], scale: int) -> Iterator[str]:
    """Play every scenario with every library; give the lines of a table."""
    libraries = [LIBRARIES[name]() for name in names]
    for library in libraries:
        library.warm()
    yield "| what | " + " | ".join(names) + " |"
    yield "|---" * (1 + len(names)) + "|"
    for what, (scenario, count) in ROWS.items():
        cells = [str(scenario(library, count * scale)) for library in libraries]
        yield f"| {what} | " + " | ".join(cells) + " |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m nc10d.debug.faults", description=__doc__)
    parser.add_argument("--scale", type=int, default=1, help="so many times the usual counts")
    parser.add_argument(
        "--library", choices=LIBRARIES, action="append", help="these only (default: all)"
    )
    options = parser.parse_args(arguments)
    for line in table(options.library or [*LIBRARIES], options.scale):
        print(line, flush=True)
    print(f"\nmedian / most, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    return 0


if __name__ == "__main__":
    sys.exit(main())
