"""monitored_barrier: every rank gets the names of the missing ranks when the time is up."""

import datetime
import threading
import time
from typing import Any

import numpy as np
import pytest

import nc10d as dist
from nc10d import CollectiveTimeout, DistError
from nc10d.testing import Ranks, run_local, run_ranks

SIZE = 4
LIMIT = 0.4


def caught(call: Any) -> DistError:
    with pytest.raises(DistError) as found:
        call()
    return found.value


def test_all_ranks_pass_each_time_all_have_arrived() -> None:
    def call_barrier(group: Any) -> list[int]:
        come: list[int] = []
        for turn in range(3):
            dist.monitored_barrier(timeout=datetime.timedelta(seconds=20))
            x = np.ones(1)
            group.all_reduce(x)
            come.append(turn)
        return come

    assert run_ranks(call_barrier, SIZE) == [[0, 1, 2]] * SIZE
    assert run_local(call_barrier, SIZE) == [[0, 1, 2]] * SIZE


def test_no_rank_leaves_before_all_have_arrived() -> None:
    came: list[int] = []

    def call_barrier(group: Any) -> int:
        came.append(group.rank)
        dist.monitored_barrier()
        return len(came)

    assert run_ranks(call_barrier, SIZE) == [SIZE] * SIZE


@pytest.mark.parametrize("missing", [[0], [2], [1, 3], [0, 1, 2]])
@pytest.mark.parametrize("wait_all_ranks", [False, True])
def test_missing_ranks_are_named_on_every_rank(missing: list[int], wait_all_ranks: bool) -> None:
    over = threading.Barrier(SIZE)

    def call_barrier(group: Any) -> DistError:
        dist.monitored_barrier()
        start = time.monotonic()
        if group.rank not in missing:
            error = caught(lambda: dist.monitored_barrier(group, LIMIT, wait_all_ranks))
            assert LIMIT * 0.9 <= time.monotonic() - start < LIMIT + 5
        over.wait(30)
        if group.rank in missing:  # a late rank raises the same
            error = caught(lambda: dist.monitored_barrier(group, LIMIT))
        return error

    for error in run_ranks(call_barrier, SIZE):
        assert type(error) is CollectiveTimeout
        assert error.rank == missing[0]
        named = ", ".join(map(str, missing))
        assert f"rank{'s' if missing[1:] else ''} {named} of group 'world' did not come" in str(
            error
        )


def test_the_shortest_time_decides() -> None:
    over = threading.Event()

    def call_barrier(group: Any) -> tuple[DistError, float]:
        start = time.monotonic()
        if group.rank == 1:
            over.wait(30)
        error = caught(lambda: dist.monitored_barrier(timeout=LIMIT if group.rank == 0 else 60))
        over.set()
        return error, time.monotonic() - start

    outcomes = run_ranks(call_barrier, 3)
    assert all("rank 1 of group" in str(error) for error, _ in outcomes)
    assert all(taken < 10 for _, taken in outcomes)


def test_a_sub_group_counts_for_itself() -> None:
    with Ranks(SIZE) as ranks:
        error = ranks.run(_pair_apart)[3]
    assert error.rank == 0
    text = "rank 1 (global rank 3) after 0.4 s: rank 0 (global rank 1) of group 'world/1' did not"
    assert text in str(error)


def _pair_apart(group: Any) -> DistError | None:
    """Ranks 1 and 3 call as a pair; then 3 waits for 1, which is in a call of the world."""
    two = dist.new_group([1, 3])
    if group.rank in (0, 2):
        with pytest.warns(RuntimeWarning, match="not in the group"):
            dist.monitored_barrier(two)
    else:
        dist.monitored_barrier(two)
    error = caught(lambda: dist.monitored_barrier(two, LIMIT)) if group.rank == 3 else None
    dist.monitored_barrier()
    return error


def test_a_rank_that_makes_another_call_is_a_mismatch() -> None:
    def call_barrier(group: Any) -> DistError:
        call = group.barrier if group.rank else dist.monitored_barrier
        if group.rank == 1:
            call = lambda: group.all_reduce(np.ones(1))  # noqa: E731
        return caught(call)

    assert {type(error) for error in run_ranks(call_barrier, 2)} == {dist.CollectiveMismatch}


@pytest.mark.ranks(2, strict=False)
def test_mistakes_are_refused() -> None:
    with dist.coalescing_manager(), pytest.raises(ValueError, match="coalescing block"):
        dist.monitored_barrier()
    with pytest.raises(ValueError, match="timeout"):
        dist.monitored_barrier(timeout=-1)
    dist.monitored_barrier()
