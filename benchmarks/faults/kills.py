"""Kill a rank with SIGKILL amid random collectives, again and again; report the survivors' errors.

The command prints a line of JSON for each kill. A round takes a fraction of a second, because its
ranks are forked from a process that has loaded everything. The victim kills itself from a separate
thread.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.faults.forked_ranks import ForkedRanks, Report
from benchmarks.faults.results import hold
from benchmarks.libraries import C10D_NAMES, make_c10d
from benchmarks.libraries.c10d import COLLECTIVES, C10dLibrary

LATEST = 0.03
"""Seconds of traffic before the victim dies, at most."""
HANG = 60.0
"""Seconds after which a survivor without a report counts as hung."""
HOLD = 0.1
"""Seconds for which a survivor holds the GIL now and then."""
_DEATH = 0


@dataclass(frozen=True, slots=True)
class Round:
    """A kill: the victim, the number of ranks, the moment, and disturbances."""

    number: int
    size: int
    victim: int
    delay: float
    seed: int
    forked: bool  # ranks have children that hold their descriptors
    holder: int | None  # this rank holds the GIL now and then


def rounds(count: int, size: int, seed: int) -> Iterator[Round]:
    """Draw `count` rounds from `seed`."""
    chance = random.Random(seed)
    for number in range(count):
        victim = chance.randrange(size)
        others = [rank for rank in range(size) if rank != victim]
        yield Round(
            number=number,
            size=size,
            victim=victim,
            delay=chance.random() * LATEST,
            seed=chance.randrange(1 << 30),
            forked=chance.random() < 0.3,
            holder=chance.choice(others) if chance.random() < 0.3 else None,
        )


def play(drawn: Round, library: C10dLibrary, timeout: float = HANG) -> dict[str, Any]:
    """Play a round; return the victim and the survivors' reports, `late` in seconds."""
    ranks = ForkedRanks(drawn.size)
    played = ranks.play(partial(_rank, drawn, library, timeout), drawn.size - 1, HANG)
    for report in played.reports:
        report["late"] = report.pop("at") - max(ranks.noted(_DEATH), report.pop("free"))
    return {
        "victim": drawn.victim,
        "pid": played.pids[drawn.victim],
        "size": drawn.size,
        "forked": drawn.forked,
        "holder": drawn.holder,
        "codes": played.codes,
        "reports": played.reports,
    }


def _rank(
    drawn: Round, library: C10dLibrary, timeout: float, ranks: ForkedRanks, rank: int
) -> Report:
    library.join(drawn.number, rank, drawn.size, timeout)
    if drawn.forked:
        ranks.fork(rank, signal.pause)
    library.call(0, 1)
    if rank == drawn.victim:
        threading.Timer(drawn.delay, _die, (ranks,)).start()
    chance, own, free = random.Random(drawn.seed), random.Random(rank), 0.0
    try:
        while True:
            library.call(chance.randrange(COLLECTIVES), chance.choice((1, 100, 5_000, 100_000)))
            if rank == drawn.holder and own.random() < 0.05:
                hold(HOLD)
                free = time.monotonic()
    except Exception as error:  # noqa: BLE001  (any error is the survivor's report)
        report = {"at": time.monotonic(), "free": free, **library.describe(error)}
    library.leave()
    return report


def _die(ranks: ForkedRanks) -> None:
    ranks.note(_DEATH, time.monotonic())
    os.kill(os.getpid(), signal.SIGKILL)


def main(arguments: Sequence[str] | None = None) -> int:
    """Play the rounds; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks kills", description=__doc__)
    parser.add_argument("count", type=int)
    parser.add_argument("size", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--library", choices=C10D_NAMES, default="nc10d")
    options = parser.parse_args(arguments)
    library = make_c10d(options.library)
    library.warm()
    for drawn in rounds(options.count, options.size, options.seed):
        print(json.dumps(play(drawn, library)), flush=True)
    return 0
