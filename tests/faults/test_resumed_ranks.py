"""A rank that was stopped in a call wakes up after the others have gone on without it.

It gets an error, and the others' later results stay intact: the late rank no longer writes to their
arrays. `docs/design.md` explains why that needs no epoch.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import nc10d as dist
from benchmarks.faults.forked_ranks import ForkedRanks, Report
from benchmarks.libraries.nc10d import Nc10d
from nc10d.errors import Aborted, DistError

SIZE, LATE = 3, 2
PID, AWAKE = 0, 1
pytestmark = pytest.mark.slow
RESTORED = 7.0
LARGE = 1 << 21

Traffic = tuple[Any, Callable[[], object]]  # the array that peers write to; the writing call


def reduced(group: Any) -> Traffic:
    x = np.ones(100_000)
    return x, lambda: group.all_reduce(x)


def exposed(group: Any) -> Traffic:
    x = dist.zeros(LARGE)
    return x, lambda: group.all_reduce(x)


def sent_around(group: Any) -> Traffic:
    x, got = np.ones(LARGE // 4), np.zeros(LARGE // 4)
    after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size

    def step() -> None:
        for work in (group.isend(x, after), group.irecv(got, before)):
            work.wait()

    return got, step


KINDS = {"reduced": reduced, "exposed": exposed, "sent around": sent_around}
PLAYS = [(kind, hosts) for kind in KINDS for hosts in ("aaa", "aab")]
"""The traffic when a rank stops, and the host (a letter) of each rank."""


def main() -> None:
    library, chance = Nc10d(), random.Random(3)
    library.warm()
    for number, (kind, hosts) in enumerate(PLAYS):
        part = partial(live, library, number, kind, hosts, 0.03 * chance.random())
        print(json.dumps(ForkedRanks(SIZE).play(part, SIZE, 60.0).reports), flush=True)


def live(
    library: Nc10d, number: int, kind: str, hosts: str, delay: float, ranks: ForkedRanks, rank: int
) -> Report:
    os.environ["NC10D_HOST_ID"] = hosts[rank]
    library.join(number, rank, SIZE, 60.0)
    group = dist.get_default_group()
    x, step = KINDS[kind](group)
    step()
    group.timeout = 0.5
    if rank == LATE:
        ranks.note(PID, os.getpid())
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGSTOP)).start()
    try:
        while True:
            step()
    except DistError as error:
        raised = type(error).__name__
    x[:] = RESTORED
    try:
        dist.shrink_group(timeout=0.5)
    except Aborted as error:
        ranks.note(AWAKE, 1)
        return {"raised": raised, "then": str(error)}
    if rank == 0:
        os.kill(int(ranks.noted(PID)), signal.SIGCONT)
    return {"raised": raised, "right": goes_right(ranks), "untouched": bool((x == RESTORED).all())}


def goes_right(ranks: ForkedRanks) -> bool:
    """Communicate until the late rank has its error; return whether all results were right."""
    right, over = True, np.zeros(1)
    while not over[0]:
        y = np.ones(1000)
        dist.all_reduce(y)
        right = right and bool((y == dist.get_world_size()).all())
        over[0] = ranks.noted(AWAKE)
        dist.all_reduce(over, dist.ReduceOp.MAX)
    return right


@pytest.fixture(scope="module")
def played() -> list[dict[int, Report]]:
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    plays = map(json.loads, done.stdout.splitlines())
    return [{report["rank"]: report for report in reports} for reports in plays]


@pytest.mark.parametrize(
    "play", range(len(PLAYS)), ids=["-".join(kind_and_hosts) for kind_and_hosts in PLAYS]
)
def test_a_resumed_rank_gets_an_error_and_disturbs_no_other_rank(
    played: list[dict[int, Report]], play: int
) -> None:
    reports = played[play]
    assert sorted(reports) == [*range(SIZE)]
    assert {report["raised"] for report in reports.values()} == {"CollectiveTimeout"}
    assert f"gone on without rank {LATE}: they are [0, 1]" in reports[LATE]["then"]
    for rank in (0, 1):
        assert reports[rank]["right"]
        assert reports[rank]["untouched"]


if __name__ == "__main__":
    main()
