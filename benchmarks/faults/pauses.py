"""A fault scenario: ranks pause for less than the timeout, and must not be taken for dead.

Ranks communicate, four to a core. In turn, each is stopped, or made to hold the GIL, for a time
shorter than the operations' timeout.
"""

from __future__ import annotations

import os
import random
import signal
import time
from functools import partial

from benchmarks.faults.forked_ranks import ForkedRanks, Report
from benchmarks.faults.results import Result, counted, hold, numbers
from benchmarks.libraries.c10d import COLLECTIVES, C10dLibrary

MOST_RANKS = 16
_OVER = 0
_PATIENCE = 120.0
_JOINING = 60.0
_HELD = 3.0
"""Longest time of holding the GIL, in seconds."""
_REST = 0.3
"""Seconds between two pauses, so that a call meets a single pause at most."""


def paused(
    library: C10dLibrary, seconds: int, timeout: float = 20.0, share: float = 0.05
) -> Result:
    """Pause ranks in turn for `seconds`, each pause up to `share` of the timeout.

    A long run (such as an hour) uses nine tenths of a timeout of 4 s. The default is milder: on a
    shared machine, a rank may also wait for other programs.
    """
    if seconds > _PATIENCE:
        timeout, share = 4.0, 0.9
    ranks = ForkedRanks(min(4 * len(os.sched_getaffinity(0)), MOST_RANKS))
    part = partial(_rank, library, next(numbers), seconds, timeout, timeout * share)
    played = ranks.play(part, ranks.size, seconds + _PATIENCE)
    ends = [report["error"] or "goes on" for report in played.reports]
    ends += ["hung"] * (ranks.size - len(played.reports))
    return Result((), f"{seconds} s, {ranks.size} ranks: {counted(ends)}")


def _rank(
    library: C10dLibrary,
    number: int,
    seconds: float,
    timeout: float,
    longest: float,
    ranks: ForkedRanks,
    rank: int,
) -> Report:
    library.join(number, rank, ranks.size, _JOINING)
    signal.signal(signal.SIGUSR1, lambda *_: hold(min(_HELD, longest)))
    library.shorten(timeout)
    ranks.note(1 + rank, os.getpid())
    if rank == 0:
        ranks.fork(rank, partial(_disturb, ranks, seconds, longest))
    chance, error = random.Random(5), ""
    try:
        while not _agreed_over(library, ranks):
            library.call(chance.randrange(COLLECTIVES), 1000)
    except RuntimeError as found:
        error = f"{type(found).__name__}: {found}"
    return {"error": error}


def _agreed_over(library: C10dLibrary, ranks: ForkedRanks) -> bool:
    """Return whether the time is up, the same on all ranks: they must stop after the same call."""
    dist = library.dist
    over = library.ones(1) * ranks.noted(_OVER)
    dist.all_reduce(over, dist.ReduceOp.MAX)
    return bool(over[0])


def _disturb(ranks: ForkedRanks, seconds: float, longest: float) -> None:
    """Pause ranks in turn until the time is up."""
    chance, until = random.Random(7), time.monotonic() + seconds
    while time.monotonic() < until:
        pid = int(ranks.noted(1 + chance.randrange(ranks.size)))
        if pid and chance.random() < 0.5:
            os.kill(pid, signal.SIGUSR1)
            time.sleep(min(_HELD, longest))
        elif pid:
            os.kill(pid, signal.SIGSTOP)
            time.sleep(chance.random() * longest)
            os.kill(pid, signal.SIGCONT)
        time.sleep(_REST)
    ranks.note(_OVER, 1)
