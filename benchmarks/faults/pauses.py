"""A scenario of faults: ranks are stopped and go on, and hold the GIL: slow is not dead.

Ranks communicate, four to a core, while one after the other is stopped, or is made to hold the GIL,
for a time shorter than the operations' timeout.
"""

from __future__ import annotations

import os
import random
import signal
import time
from functools import partial

from benchmarks.faults.cells import Cell, counted, hold, numbers
from benchmarks.faults.libraries import COLLECTIVES, Library
from benchmarks.faults.stage import Report, Stage

MOST_RANKS = 16
_OVER = 0
_PATIENCE = 120.0
_JOINING = 60.0
_HELD = 3.0
"""Seconds for which the GIL is held, where the timeout allows it."""
_REST = 0.3
"""Seconds between two pauses: a call may meet one of them, not several."""


def paused(library: Library, seconds: int, timeout: float = 20.0, share: float = 0.05) -> Cell:
    """Pause ranks for up to `share` of the timeout, one at a time, for so many seconds.

    A campaign (an hour, say) goes up to nine tenths of a timeout of 4 s; on a machine that others
    use too, a rank may be kept waiting by more than its own pause.
    """
    if seconds > _PATIENCE:
        timeout, share = 4.0, 0.9
    stage = Stage(min(4 * len(os.sched_getaffinity(0)), MOST_RANKS))
    part = partial(_rank, library, next(numbers), seconds, timeout, timeout * share)
    played = stage.play(part, stage.size, seconds + _PATIENCE)
    ends = [report["error"] or "goes on" for report in played.reports]
    ends += ["hung"] * (stage.size - len(played.reports))
    return Cell((), f"{seconds} s, {stage.size} ranks: {counted(ends)}")


def _rank(
    library: Library,
    number: int,
    seconds: float,
    timeout: float,
    longest: float,
    stage: Stage,
    rank: int,
) -> Report:
    library.join(number, rank, stage.size, _JOINING)
    signal.signal(signal.SIGUSR1, lambda *_: hold(min(_HELD, longest)))
    library.shorten(timeout)
    stage.note(1 + rank, os.getpid())
    if rank == 0:
        stage.fork(rank, partial(_disturb, stage, seconds, longest))
    chance, error = random.Random(5), ""
    try:
        while not _agreed_over(library, stage):
            library.call(chance.randrange(COLLECTIVES), 1000)
    except RuntimeError as found:
        error = f"{type(found).__name__}: {found}"
    return {"error": error}


def _agreed_over(library: Library, stage: Stage) -> bool:
    """Say whether the time is up: the same to all ranks, or they would part in mid-course."""
    dist = library.dist
    over = library.ones(1) * stage.noted(_OVER)
    dist.all_reduce(over, dist.ReduceOp.MAX)
    return bool(over[0])


def _disturb(stage: Stage, seconds: float, longest: float) -> None:
    """Pause one rank after the other until the time is up; where it is, each goes on by itself."""
    chance, until = random.Random(7), time.monotonic() + seconds
    while time.monotonic() < until:
        pid = int(stage.noted(1 + chance.randrange(stage.size)))
        if pid and chance.random() < 0.5:
            os.kill(pid, signal.SIGUSR1)
            time.sleep(min(_HELD, longest))
        elif pid:
            os.kill(pid, signal.SIGSTOP)
            time.sleep(chance.random() * longest)
            os.kill(pid, signal.SIGCONT)
        time.sleep(_REST)
    stage.note(_OVER, 1)
