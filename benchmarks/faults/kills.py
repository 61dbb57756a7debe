"""Kill -9 of a rank at a random moment of random collectives, again and again: what survivors say.

`python -m benchmarks.faults.kills COUNT SIZE` prints a line of JSON for each kill. A round takes a
fraction of a second, since its ranks are forked from a process that has loaded everything. The
victim kills itself from a thread of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.faults.cells import hold
from benchmarks.faults.libraries import COLLECTIVES, LIBRARIES, Library
from benchmarks.faults.stage import Report, Stage

LATEST = 0.03
"""Seconds of traffic before the victim dies, at most."""
HANG = 60.0
"""Seconds after which a survivor that says nothing counts as one that hangs."""
HOLD = 0.1
"""Seconds for which a survivor holds the GIL now and then."""
_DEATH = 0


@dataclass(frozen=True, slots=True)
class Round:
    """One kill: who of how many, when, and what else goes on."""

    number: int
    size: int
    victim: int
    delay: float
    seed: int
    forked: bool  # ranks have children that hold their descriptors
    holder: int | None  # this rank holds the GIL now and then


def rounds(count: int, size: int, seed: int) -> Iterator[Round]:
    """Draw `count` rounds; all that is random about them follows from `seed`."""
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


def play(one: Round, library: Library, timeout: float = HANG) -> dict[str, Any]:
    """Play one round; return who died and what the survivors reported, `late` in seconds."""
    stage = Stage(one.size)
    played = stage.play(partial(_rank, one, library, timeout), one.size - 1, HANG)
    for report in played.reports:
        report["late"] = report.pop("at") - max(stage.noted(_DEATH), report.pop("free"))
    return {
        "victim": one.victim,
        "pid": played.pids[one.victim],
        "size": one.size,
        "forked": one.forked,
        "holder": one.holder,
        "codes": played.codes,
        "told": played.reports,
    }


def _rank(one: Round, library: Library, timeout: float, stage: Stage, rank: int) -> Report:
    library.join(one.number, rank, one.size, timeout)
    if one.forked:
        stage.fork(rank, signal.pause)
    library.call(0, 1)
    if rank == one.victim:
        threading.Timer(one.delay, _die, (stage,)).start()
    chance, own, free = random.Random(one.seed), random.Random(rank), 0.0
    try:
        while True:
            library.call(chance.randrange(COLLECTIVES), chance.choice((1, 100, 5_000, 100_000)))
            if rank == one.holder and own.random() < 0.05:
                hold(HOLD)
                free = time.monotonic()
    except Exception as error:  # noqa: BLE001  (whatever it is: it is what the survivor was told)
        report = {"at": time.monotonic(), "free": free, **library.told(error)}
    library.leave()
    return report


def _die(stage: Stage) -> None:
    stage.note(_DEATH, time.monotonic())
    os.kill(os.getpid(), signal.SIGKILL)


def main(arguments: Sequence[str] | None = None) -> int:
    """Play the rounds; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults.kills", description=__doc__)
    parser.add_argument("count", type=int)
    parser.add_argument("size", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--library", choices=LIBRARIES, default="nc10d")
    options = parser.parse_args(arguments)
    library = LIBRARIES[options.library]()
    library.warm()
    for one in rounds(options.count, options.size, options.seed):
        print(json.dumps(play(one, library)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
