"""The MPI backend has the laws of polled backends, and handles what only MPI has."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest
from mpi_launchers import LIBRARIES
from polled_laws import *  # noqa: F403  (the laws)
from polled_laws import SIZE, OnDevice, raised, whole_group

import nc10d as dist
from nc10d.errors import CollectiveMismatch, RendezvousError, UnsupportedPlatform
from nc10d.group.process_group import ProcessGroup
from nc10d.ops import AllReduce
from nc10d.testing import Ranks


@pytest.fixture(scope="module", params=LIBRARIES)
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with request.param.ranks(SIZE, "mpi", 20.0) as found:
        yield found


def a_rank_stays_away(group: ProcessGroup) -> str:
    text = ""
    if group.rank != 1:
        members = [2, 1, 0]
        made = lambda: group.child("not-all", members, 0.3, group.config).make_backends()  # noqa: E731
        text = raised(RendezvousError, made)
    group.barrier()
    return text


def test_a_group_is_not_made_unless_all_members_arrive(ranks: Ranks) -> None:
    zero, _, two = ranks.run(a_rank_stays_away)
    assert "rank 1 did not come" in two
    assert "timed out after" in two
    assert "timed out after" in zero


def the_same_again(group: ProcessGroup) -> list[int]:
    from nc10d.backend.mpi.datatypes import reduction  # begins MPI

    def largest() -> dist.ReduceOp:
        @dist.reduction("f4", any_order=True)
        def larger(a, b):  # type: ignore[no-untyped-def]
            return max(a, b)

        return larger

    sizes = []
    for _ in range(100):
        x = np.full(3, group.rank, np.float32)
        group.all_reduce(x, largest())
        assert x.tolist() == [group.size - 1] * 3
        sizes.append(reduction.cache_info().currsize)
    return sizes


def test_equal_reductions_made_again_are_one_of_mpi(ranks: Ranks) -> None:
    for sizes in ranks.run(the_same_again):
        assert len(set(sizes)) == 1


def another_split(group: ProcessGroup) -> float:
    sub = whole_group(group)
    lists = [[0], [1, 2]] if group.rank == 2 else [[0, 1, 2]]
    before = time.monotonic()
    raised(CollectiveMismatch, lambda: sub.split_group(lists))
    group.barrier()
    return time.monotonic() - before


def test_ranks_that_wait_for_members_learn_at_once_that_others_make_another_group(
    ranks: Ranks,
) -> None:
    assert max(ranks.run(another_split)) < 10.0, "not the group's timeout"


def sends_from_a_device(group: ProcessGroup) -> None:
    backend = group.backend("cpu")
    op = AllReduce(OnDevice())
    text = raised(UnsupportedPlatform, lambda: backend.launch([op], 5.0, False))
    assert "not CUDA-aware" in text
    group.barrier()


def test_device_arrays_need_a_cuda_aware_mpi(ranks: Ranks) -> None:
    ranks.run(sends_from_a_device)


def makes_and_drops(group: ProcessGroup, count: int) -> None:
    for number in range(count):
        sub = dist.new_group([2, 0])
        if isinstance(sub, ProcessGroup):
            x = np.array([float(number + sub.rank)])
            sub.broadcast(x, 1)
            assert x[0] == number + 1
            dist.destroy_process_group(sub)
        if number % 50 == 0:
            group.barrier()


@pytest.mark.long
def test_destroyed_groups_cost_nothing(ranks: Ranks) -> None:
    # MPICH has 2048 communicators, and a group uses two.
    ranks.run(makes_and_drops, [2100] * SIZE)
