"""Ranks of `run_ranks` that can't go on are told so at once, threads as well as processes."""

import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nc10d as dist
from nc10d.errors import CollectiveMismatch, CollectiveTimeout, PeerLost
from nc10d.testing import Ranks, run_ranks

SOON = 45.0
"""Seconds, below the timeout of the group. The start of processes counts, too."""


def receives_first(group: Any) -> None:
    x = np.ones(2)
    group.recv(x, 1 - group.rank)
    group.send(x, 1 - group.rank)


def other_order(group: Any) -> None:
    pair = dist.new_group([0, 1])
    (group if group.rank else pair).barrier()
    (pair if group.rank else group).barrier()


def other_order_after_a_future(group: Any) -> None:
    work = group.all_reduce(np.ones(2), async_op=True)
    work.get_future()
    work.wait()
    other_order(group)


def play_a_circle(function: Any) -> None:
    start = time.monotonic()
    with pytest.raises(CollectiveMismatch, match=r"in a circle .*test_stuck_ranks\.py:\d+"):
        run_ranks(function, 2, timeout=60.0)
    assert time.monotonic() - start < SOON


def in_own_process(call: str) -> None:
    """Run a call of this module in a process without pytest-xdist.

    That has threads which could make a call, and so end a wait, for all that the engine knows.
    """
    script = f"import test_stuck_ranks; from nc10d.testing import run_ranks; {call}"
    subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parent, check=True)


@pytest.mark.parametrize(
    "function", ["receives_first", "other_order", "other_order_after_a_future"]
)
def test_threads_that_wait_in_a_circle_are_told_so(function: str) -> None:
    in_own_process(f"test_stuck_ranks.play_a_circle(test_stuck_ranks.{function})")


def probes(group: Any) -> None:
    pair = dist.new_group([0, 1])
    pair.set_timeout(0.5)  # several times the wait after which the search begins
    if group.rank == 0:
        with pytest.raises(CollectiveTimeout):
            pair.barrier()
    group.barrier()


def test_a_group_with_a_short_timeout_may_probe_a_peer_that_waits_in_another_group() -> None:
    in_own_process("run_ranks(test_stuck_ranks.probes, 2, timeout=60.0)")


def one_returns(group: Any, message: bool) -> int:
    if group.rank == 1:
        return 1
    x = np.ones(2)
    if message:
        group.recv(x, 1)
    else:
        group.all_reduce(x)
    return 0


def play_a_return(kind: Any, message: bool) -> None:
    start = time.monotonic()
    expected = r"rank 0 waits in .*test_stuck_ranks\.py:\d+, for rank 1; rank 1 has returned"
    with pytest.raises(PeerLost, match=expected):
        run_ranks(one_returns, 2, kind, [message] * 2, timeout=60.0)
    assert time.monotonic() - start < SOON


@pytest.mark.parametrize("kind", ["threads", "processes"])
@pytest.mark.parametrize("message", [False, True])
def test_a_rank_that_has_returned_counts_as_left(kind: str, message: bool) -> None:
    in_own_process(f"test_stuck_ranks.play_a_return({kind!r}, {message})")


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


class Slow:
    """An argument that reaches its rank late."""

    def __reduce__(self) -> Any:
        return time.sleep, (1.0,)


def reduces(group: Any, _: Any) -> float:
    x = np.ones(1)
    group.all_reduce(x)
    return float(x[0])


def test_a_rank_that_begins_its_next_task_late_has_not_returned() -> None:
    with Ranks(3, "processes", timeout=20.0) as ranks:
        for _ in range(2):
            assert ranks.run(reduces, [None, None, None]) == [3.0] * 3
            assert ranks.run(reduces, [None, Slow(), None]) == [3.0] * 3


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
