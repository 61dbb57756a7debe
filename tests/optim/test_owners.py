"""Owners of parameters: balanced, equal on all ranks, and unchanged by later groups."""

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from nc10d.optim import Shares, bucket_pieces, partition
from nc10d.testing import run_local, run_ranks

sizes = st.lists(st.integers(0, 50), max_size=12)
worlds = st.integers(1, 5)


def loads_of(sizes: list[int], owners: list[int], ranks: int) -> list[int]:
    return [sum(n for n, o in zip(sizes, owners, strict=True) if o == r) for r in range(ranks)]


@given(sizes, worlds)
def test_no_rank_has_more_than_the_mean_and_one_parameter(sizes, ranks):
    loads = loads_of(sizes, partition(sizes, ranks), ranks)
    assert max(loads) <= sum(sizes) / ranks + max(sizes, default=0)


@given(sizes, sizes, worlds)
def test_a_later_group_leaves_earlier_owners_and_evens_out_the_loads(first, second, ranks):
    loads = [0] * ranks
    owners = [*partition(first, ranks, loads), *partition(second, ranks, loads)]
    assert owners[: len(first)] == partition(first, ranks)
    assert loads == loads_of([*first, *second], owners, ranks)
    assert max(loads) <= sum([*first, *second]) / ranks + max([*first, *second], default=0)


def test_the_next_largest_goes_to_the_least_loaded_rank():
    assert partition([1, 5, 3, 3, 5], 2) == [0, 0, 0, 1, 1]


@given(st.lists(st.lists(st.integers(1, 20), min_size=1, max_size=6), max_size=6), worlds)
@pytest.mark.parametrize("divide", [False, True])
def test_pieces_cover_each_bucket_once_in_order(divide, buckets, ranks):
    pieces = bucket_pieces(buckets, ranks, divide)
    for index, (sizes, found) in enumerate(zip(buckets, pieces, strict=True)):
        assert [piece.bucket for piece in found] == [index] * len(found)
        assert [i for piece in found for i in range(piece.first, piece.end)] == [*range(len(sizes))]
        assert all(0 <= piece.owner < ranks for piece in found)
        if not divide:
            assert [piece.owner for piece in found] == [index % ranks]
        elif len(found) <= ranks:
            assert len({piece.owner for piece in found}) == len(found)


def test_a_large_bucket_is_divided_among_the_ranks_with_the_least():
    assert [
        (piece.bucket, piece.first, piece.end, piece.owner)
        for pieces in bucket_pieces([[10, 10, 10, 10], [2]], 2, divide=True)
        for piece in pieces
    ] == [(0, 0, 2, 1), (0, 2, 4, 0), (1, 0, 1, 0)]


@pytest.mark.parametrize("runner", [run_local, run_ranks])
def test_shares_give_every_rank_the_owners_arrays_also_in_new_memory(runner):
    def run(group: Any) -> Any:
        arrays = [np.zeros(n) for n in (3, 0, 5, 100_000)] + [np.zeros((4, 6)).T[::2]]
        owners = partition([x.size for x in arrays], group.size())
        shares = Shares(arrays, owners, group)
        rounds = []
        for step in range(3):
            for index, (x, owner) in enumerate(zip(arrays, owners, strict=True)):
                x[...] = 10 * step + index if owner == group.rank else -1
            shares.share()
            rounds.append([set(x.reshape(-1).tolist()) for x in arrays])
        return rounds

    expected = [[{10.0 * step + i} if i != 1 else set() for i in range(5)] for step in range(3)]
    assert runner(run, 3) == [expected] * 3


@pytest.mark.ranks(1)
def test_arrays_without_an_owner_for_each_are_refused(world: Any):
    with pytest.raises(ValueError, match="shorter"):
        Shares([np.zeros(1), np.zeros(1)], [0], world)
