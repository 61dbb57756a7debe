"""Ranks of `run_ranks` that can't go on are told so at once, threads as well as processes."""

from __future__ import annotations

import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nc10d as dist
from nc10d.errors import CollectiveMismatch
from nc10d.testing import Ranks, run_ranks

SOON = 10.0
"""Seconds, far below the timeout of the group."""


def receives_first(group: Any) -> None:
    x = np.ones(2)
    group.recv(x, 1 - group.rank)
    group.send(x, 1 - group.rank)


def other_order(group: Any) -> None:
    pair = dist.new_group([0, 1])
    (group if group.rank else pair).barrier()
    (pair if group.rank else group).barrier()


def play_a_circle(function: Any) -> None:
    start = time.monotonic()
    with pytest.raises(CollectiveMismatch, match=r"in a circle .*test_stuck_ranks\.py:\d+"):
        run_ranks(function, 2, timeout=60.0)
    assert time.monotonic() - start < SOON


@pytest.mark.parametrize("function", ["receives_first", "other_order"])
def test_threads_that_wait_in_a_circle_are_told_so(function: str) -> None:
    # In a process of its own: each unknown thread (pytest-xdist has some) could end the wait.
    script = f"import test_stuck_ranks as t; t.play_a_circle(t.{function})"
    subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parent, check=True)


def returns_late(group: Any, late: int) -> float:
    """Every rank computes for a while after the others have returned, then none waits."""
    x = np.ones(1)
    group.all_reduce(x)
    if group.rank == late:
        time.sleep(0.2)
    return float(x[0])


def test_ranks_that_return_one_after_the_other_run_again() -> None:
    with Ranks(3, timeout=20.0) as ranks:
        for late in range(3):
            assert ranks.run(returns_late, [late] * 3) == [3.0] * 3


def fails(group: Any) -> None:
    if group.rank == 1:
        raise ValueError("the only line of its kind")
    group.barrier()


def test_a_failure_shows_its_traceback_once() -> None:
    with pytest.raises(ValueError, match="only line") as caught:
        run_ranks(fails, 2)
    text = "".join(traceback.format_exception(caught.value))
    assert text.count('raise ValueError("the only line of its kind")') == 1
    assert "rank 0: Aborted" in text
