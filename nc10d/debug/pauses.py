"""Ranks that are stopped and go on, and hold the GIL: slow is not dead.

`python -m nc10d.debug.pauses SECONDS SIZE TIMEOUT SHARE` lets SIZE ranks communicate while one
after the other is stopped for up to SHARE of the operations' timeout, and prints a line of JSON:
how many calls each rank has made, and what went wrong, if anything.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from functools import partial

from nc10d.debug.kills import HOLD
from nc10d.debug.libraries import COLLECTIVES, Nc10d
from nc10d.debug.stage import Report, Stage

_OVER = 0


def _rank(
    library: Nc10d, seconds: float, timeout: float, longest: float, stage: Stage, rank: int
) -> Report:
    library.join(0, rank, stage.size, 60.0)
    import nc10d as dist

    group = dist.get_default_group()
    group.timeout = timeout
    stage.note(1 + rank, os.getpid())
    if rank == 0:
        stage.fork(rank, partial(_pause, stage, seconds, longest))
    chance, own, calls = random.Random(5), random.Random(rank), 0
    error = ""
    try:
        while not _agreed_over(stage):
            library.call(chance.randrange(COLLECTIVES), 1000)
            calls += 1
            if own.random() < 0.01:
                HOLD * HOLD
    except dist.DistError as found:
        error = f"{type(found).__name__}: {found}"
    return {"calls": calls, "error": error}


def _agreed_over(stage: Stage) -> bool:
    """Say whether the time is up: the same to all ranks, or they would part in mid-course."""
    import numpy as np

    import nc10d as dist

    over = np.array([stage.noted(_OVER)])
    dist.all_reduce(over, dist.ReduceOp.MAX)
    return bool(over[0])


def _pause(stage: Stage, seconds: float, longest: float) -> None:
    """Stop one rank after the other, each for a moment, until the time is up."""
    chance, until = random.Random(7), time.monotonic() + seconds
    while time.monotonic() < until:
        pid = int(stage.noted(1 + chance.randrange(stage.size)))
        if pid:
            os.kill(pid, signal.SIGSTOP)
            time.sleep(chance.random() * longest)
            os.kill(pid, signal.SIGCONT)
    stage.note(_OVER, 1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Play it; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m nc10d.debug.pauses", description=__doc__)
    for name in ("seconds", "size", "timeout", "share"):
        parser.add_argument(name, type=float)
    options = parser.parse_args(arguments)
    library, size = Nc10d(), int(options.size)
    library.warm()
    stage = Stage(size)
    longest = options.timeout * options.share
    part = partial(_rank, library, options.seconds, options.timeout, longest)
    played = stage.play(part, size, options.seconds + 120)
    print(json.dumps({"codes": played.codes, "reports": played.reports}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
