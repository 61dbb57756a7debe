"""Groups of some of the ranks: each computes only among its members."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from on_ranks import on_ranks

import nc10d as dist
from nc10d.group.process_group import ProcessGroup
from nc10d.testing import Ranks

Lists = list[list[int]]
At = Callable[[int], Ranks]


def total(members: list[int]) -> int:
    return sum(10**rank for rank in members)


def mine(lists: Lists) -> list[tuple[list[int], ProcessGroup]]:
    """Make the groups; return those that this rank is in, with their members."""
    made = [(members, dist.new_group(members, sort_ranks=False)) for members in lists]
    return [(members, group) for members, group in made if isinstance(group, ProcessGroup)]


def end(groups: list[tuple[list[int], ProcessGroup]]) -> None:
    for _, group in groups:
        dist.destroy_process_group(group)


def in_order(world: ProcessGroup, lists: Lists, count: int) -> None:
    """Make sync calls on one group after another; members differ in the number of their calls."""
    groups = mine(lists)
    for turn, (members, group) in enumerate(groups * 3):
        x = np.full(count, 10.0**world.rank)
        group.all_reduce(x)
        assert (x == total(members)).all(), (members, turn, x[:1])
        every = np.zeros(group.size, np.int64)
        group.all_gather_into_tensor(every, np.array([world.rank]))
        assert every.tolist() == members
        assert dist.get_process_group_ranks(group) == members
        assert members[group.rank] == world.rank
    world.barrier()
    end(groups)


def lists_of(size: int) -> st.SearchStrategy[Lists]:
    members = st.permutations(range(size)).flatmap(
        lambda order: st.integers(1, size).map(lambda count: list(order[:count]))
    )
    return st.lists(members, min_size=1, max_size=4)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), size=st.sampled_from([2, 3, 4, 5]))
def test_groups_of_any_ranks_compute_among_their_members(
    ranks_of: At, data: Any, size: int
) -> None:
    lists = data.draw(lists_of(size))
    count = data.draw(st.sampled_from([1, 500, 30_000]))
    ranks_of(size).run(in_order, [lists] * size, [count] * size)


def crosswise(world: ProcessGroup, lists: Lists, count: int) -> None:
    """Make async calls on overlapping groups, launched by each rank in an order of its own."""
    groups = mine(lists)
    turned = groups[world.rank :] + groups[: world.rank]
    order = turned if world.rank % 2 else turned[::-1]
    in_flight = []
    for members, group in order * 2:
        x, y = np.full(count, 10.0**world.rank), np.full(3, world.rank)
        in_flight.append((members, x, group.all_reduce(x, async_op=True)))
        in_flight.append((members, y, group.broadcast(y, group.size - 1, async_op=True)))
    for members, x, work in reversed(in_flight):
        assert work is not None
        work.wait()
        wanted = members[-1] if x.size == 3 else total(members)
        assert (x == wanted).all(), (members, x[:1], wanted)
    end(groups)


@pytest.mark.parametrize("count", [4, 9000, 200_000])
def test_overlapping_groups_progress_in_any_order_of_launch(ranks_of: At, count: int) -> None:
    pairs = [list(pair) for pair in itertools.combinations(range(4), 2)]
    ranks_of(4).run(crosswise, [[*pairs, [3, 1, 0], [0, 1, 2, 3]]] * 4, [count] * 4)


@on_ranks(4)
def test_rows_and_columns_of_a_grid_make_the_whole(world: ProcessGroup) -> None:
    """Use rows, then columns, of a 2 x 2 grid: together they contain all ranks."""
    x = np.arange(1000) + world.rank
    rows, all_rows = dist.new_subgroups(2)
    columns, all_columns = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    assert len(all_rows) == len(all_columns) == 2
    assert isinstance(rows, ProcessGroup)
    assert isinstance(columns, ProcessGroup)
    whole = x.copy()
    work = world.all_reduce(whole, async_op=True)
    rows.all_reduce(x)
    columns.all_reduce(x)
    assert work is not None
    work.wait()
    assert np.array_equal(x, whole)


def nested_splits(world: ProcessGroup) -> None:
    """Split a split: at each level both parts compute side by side."""
    group, members = world, list(range(world.size))
    while group.size > 1:
        middle = group.size // 2
        local = [list(range(middle)), list(range(middle, group.size))]
        child = dist.split_group(group, local)
        assert isinstance(child, ProcessGroup)
        members = members[:middle] if group.rank < middle else members[middle:]
        assert dist.get_process_group_ranks(child) == members
        x = np.full(7000, 10**world.rank)
        child.all_reduce(x)
        assert (x == total(members)).all()
        y = np.full(2, 10**world.rank)
        group.all_reduce(y)
        group = child
    world.barrier()


@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_split_can_be_split(ranks_of: At, size: int) -> None:
    ranks_of(size).run(nested_splits)


@on_ranks(3)
def test_a_rank_in_no_group_goes_on(world: ProcessGroup) -> None:
    group = dist.split_group(world, [[0, 2]])
    assert (group is None) == (world.rank == 1)
    other = dist.new_group([1], use_local_synchronization=True)
    assert isinstance(other, ProcessGroup) == (world.rank == 1)
    x = np.full(5, world.rank)
    if group is not None:
        group.all_reduce(x)
        assert (x == 2).all()
        assert dist.get_group_rank(group, 2) == 1
        assert dist.get_global_rank(group, 1) == 2
    elif isinstance(other, ProcessGroup):
        other.all_reduce(x)
        assert (x == 1).all()


@on_ranks(2)
def test_blocks_of_two_groups_may_nest(world: ProcessGroup) -> None:
    """Nest the blocks of two groups; a call goes to the block of its own group."""
    pair = dist.new_group([0, 1])
    assert isinstance(pair, ProcessGroup)
    x, y, z = (np.ones(50) for _ in range(3))
    with dist.coalescing_manager(world):
        world.all_reduce(x)
        with dist.coalescing_manager(pair):
            pair.all_reduce(y)
            world.all_reduce(z)
        assert (y == 2).all()
        assert (x == 1).all()
    assert (x == 2).all()
    assert (z == 2).all()
    pair.close()


@on_ranks(3)
def test_groups_do_not_mix_their_messages(world: ProcessGroup) -> None:
    """Send messages with the same tags and ranks in two groups; they must not mix."""
    turned = dist.new_group([2, 1, 0], sort_ranks=False)
    assert isinstance(turned, ProcessGroup)
    if world.rank == 0:
        turned.send(np.array([1.0]), 0)
        world.send(np.array([2.0]), 2)
    elif world.rank == 2:
        x, y = np.zeros(1), np.zeros(1)
        assert world.recv(x, None) == 0
        assert turned.recv(y, None) == 2
        assert (x[0], y[0]) == (2.0, 1.0)
    turned.barrier()


@on_ranks(3)
def test_many_groups_compute_at_once(world: ProcessGroup) -> None:
    made = [dist.new_group() for _ in range(60)]
    works = []
    for number, group in enumerate(made):
        assert isinstance(group, ProcessGroup)
        x = np.full(100, number)
        works.append((number, x, group.all_reduce(x, async_op=True)))
    for number, x, work in works:
        assert work is not None
        work.wait()
        assert (x == number * world.size).all()
    for group in made:
        dist.destroy_process_group(group)
