"""`python -m nc10d.debug.faults`: what goes wrong, and what ranks are told: nc10d beside gloo.

Each row is a scenario that both libraries play: a rank is killed, a rank is stopped, ranks make
calls that don't fit together, Ctrl-C comes in a blocking call. A cell says how late ranks were
told, and how much. Lateness is in ms, median and most, beyond the kill, the timeout or the signal.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from nc10d.debug.kills import play, rounds
from nc10d.debug.libraries import LIBRARIES, Library
from nc10d.debug.stage import Report, Stage

TIMEOUT = 1.0
LIMIT = 20.0
_BASE = "all_reduce"
_numbers = itertools.count(1_000_000)


@dataclass(frozen=True, slots=True)
class Cell:
    """What one library did in one scenario: how late, in seconds, and a few words."""

    late: tuple[float, ...]
    words: str

    def __str__(self) -> str:
        if not self.late:
            return self.words
        middle, most = statistics.median(self.late), max(self.late)
        return f"{1e3 * middle:.0f} / {1e3 * most:.0f} ms, {self.words}"


Scenario = Callable[[Library, int], Cell]


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
        played = Stage(3).play(partial(_stand_still, library, next(_numbers)), 2, LIMIT)
        late += [report["late"] for report in played.reports]
        named += sum(report["failed"] == 2 for report in played.reports)
        reports += 2
    return Cell(tuple(late), f"{named} of {reports} are told who")


def _stand_still(library: Library, number: int, stage: Stage, rank: int) -> Report:
    library.join(number, rank, stage.size, LIMIT)
    library.call(0, 1)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    _shorten(library)
    began = time.monotonic()
    return _told(library, partial(library.call, 0, 1), began + TIMEOUT)


def _shorten(library: Library) -> None:
    """Give the group the timeout of the scenario: to join may take longer."""
    if library.name == "nc10d":
        import nc10d

        nc10d.world.get_default_group().timeout = TIMEOUT
        return
    from datetime import timedelta

    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _set_pg_timeout

    _set_pg_timeout(timedelta(seconds=TIMEOUT), dist.group.WORLD)


def _told(library: Library, call: Callable[[], object], due: float) -> Report:
    """Return what a call ended with, and how long after it was due."""
    try:
        call()
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  (it is what is looked at)
        return {"late": time.monotonic() - due, **library.told(error)}
    return {"late": time.monotonic() - due, "kind": "nothing", "message": "", "failed": None}


def interrupted(library: Library, count: int) -> Cell:
    """Press Ctrl-C while a rank waits for another one."""
    late, told = [], Counter[str]()
    for _ in range(count):
        played = Stage(2).play(partial(_press, library, next(_numbers)), 1, LIMIT)
        late += [report["late"] for report in played.reports]
        told.update(report["kind"] for report in played.reports)
    return Cell(tuple(late), ", ".join(f"{kind} {number}x" for kind, number in told.items()))


def _press(library: Library, number: int, stage: Stage, rank: int) -> Report | None:
    library.join(number, rank, stage.size, LIMIT)
    library.call(0, 1)
    if rank == 1:
        signal.pause()
        return None
    _shorten(library)
    sent = time.monotonic() + 0.2
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    return _told(library, partial(library.call, 0, 1), sent)


def mismatched(library: Library, count: int) -> Cell:
    """Have one rank of two call something else than the other, in each of the ways there are."""
    outcomes = Counter[str]()
    late: list[float] = []
    for mine, theirs in _pairs():
        for _ in range(count):
            part = partial(_disagree, library, next(_numbers), mine, theirs)
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
    _shorten(library)
    call = library.calls()[mine if rank == 0 else theirs]
    return _told(library, call, time.monotonic())


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
