"""A caller's mistake on a real group: ValueError or TypeError, nothing sent, and the group goes on.

A rank makes the mistake and catches it; its peers are not involved. Then all ranks make calls that
would fail, or hang, if the mistaken call had sent anything.
"""

import datetime
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from wrong_calls import RANK, SIZE, WRONG

import nc10d as dist
from nc10d import ops as O
from nc10d.group.process_group import ProcessGroup
from nc10d.testing.strategies import issue

N = 6
on_two = pytest.mark.ranks(2, strict=False)


def piece() -> Any:
    return np.ones(N)


def right_calls(group: ProcessGroup) -> None:
    """Make correct calls; they hang or fail if a mistaken call was partly sent."""
    rank, size = int(group.rank), int(group.size)
    x, all_of_it, part = np.full(N, rank + 1.0), np.zeros(size * N), np.zeros(N)
    group.all_gather_into_tensor(all_of_it, x)
    assert all_of_it.tolist() == [1.0 + r for r in range(size) for _ in range(N)]
    group.reduce_scatter_tensor(part, all_of_it)
    assert (part == size * (rank + 1)).all()
    sent, previous = group.isend(x, (rank + 1) % size), (rank - 1) % size
    assert group.recv(part, previous) == previous
    assert (part == previous + 1).all()
    assert sent is not None
    sent.wait()
    group.broadcast(part, 1)
    assert (part == 1).all()
    group.all_reduce(x)
    total = size * (size + 1) / 2
    assert (x == total).all()
    group.reduce(x, 1)
    assert (x == (size * total if rank == 1 else total)).all()


def make(group: ProcessGroup, op: Any, async_op: bool = False) -> Any:
    if isinstance(op, (O.Send, O.Recv)):
        name = "send" if isinstance(op, O.Send) else "recv"
        return getattr(group, "i" * async_op + name)(op.x, op.peer, op.tag)
    return issue(group, op, async_op)


def coalesce(group: ProcessGroup, before: Any, call: Callable[[ProcessGroup], Any]) -> None:
    with dist.coalescing_manager(group):
        group.all_reduce(before)
        call(group)


@pytest.mark.ranks(SIZE, strict=False)
@pytest.mark.parametrize(("op", "error", "message"), WRONG)
def test_a_mistake_raises_in_its_rank_and_the_group_goes_on(
    world: ProcessGroup, op: Any, error: type[Exception], message: str
) -> None:
    """In calls that block, in others, and in a block, whose calls before it are not launched."""
    right_calls(world)
    before, launches = np.ones(3), world.seq
    for call in (
        lambda: make(world, op),
        lambda: make(world, op, True),
        lambda: coalesce(world, before, lambda group: make(group, op)),
    ):
        if world.rank == RANK:
            with pytest.raises(error, match=message) as caught:
                call()
            assert not isinstance(caught.value, dist.DistError)
            assert (before == 1).all()
            assert world.seq - launches in (0, 1)
        right_calls(world)
        launches = world.seq


@on_two
def test_an_array_in_a_reductions_place_is_told_to_be_an_output(world: ProcessGroup) -> None:
    x: Any = piece()
    for call, words in (
        (lambda: world.all_reduce(x, x), "is passed as out="),
        (lambda: world.reduce(x, 0, x), "passed as out="),
        (lambda: world.reduce_scatter_tensor(np.ones(N // 2), x, x), "the result replaces output"),
    ):
        with pytest.raises(TypeError, match=words):
            call()
    right_calls(world)


# A call with the same arrays as before is checked again


@on_two
def test_an_array_that_has_become_read_only_is_refused(world: ProcessGroup) -> None:
    x, y = piece(), piece()
    for turn in range(3):
        with dist.coalescing_manager(world):
            world.all_reduce(x)
            world.all_reduce(y)
        world.all_reduce(x)
        assert (y == 2 ** (turn + 1)).all()
    if world.rank == 0:
        x.flags.writeable = False
        with pytest.raises(ValueError, match="read-only"):
            world.all_reduce(x)
        with pytest.raises(ValueError, match="read-only"):
            coalesce(world, y, lambda g: g.all_reduce(x))
        assert (y == 8).all()
    right_calls(world)


# Blocks, groups, works and timeouts


def nested(group: ProcessGroup) -> None:
    with dist.coalescing_manager(group):
        coalesce(group, piece(), lambda g: None)


def new_group_inside(group: ProcessGroup) -> None:
    with dist.coalescing_manager(group):
        dist.new_group([0])


def split_inside(group: ProcessGroup) -> None:
    with dist.coalescing_manager(group):
        dist.split_group(group, [[0, 1]])


def waits_inside(group: ProcessGroup) -> None:
    with dist.coalescing_manager(group):
        work = group.all_reduce(piece(), async_op=True)
        assert work is not None
        work.wait()


def mixed_batch(group: ProcessGroup) -> None:
    pair = dist.new_group([group.rank], use_local_synchronization=True)
    ops = [dist.P2POp(dist.isend, piece(), 1 - group.rank), dist.P2POp(dist.isend, piece(), 0)]
    ops[1].group = pair  # type: ignore[assignment]
    dist.batch_isend_irecv(ops)


Lone = tuple[Callable[[ProcessGroup], Any], str]
OTHERS: dict[str, Lone] = {
    "a block in a block": (nested, "nested"),
    "new_group in a block": (new_group_inside, "inside a coalescing block"),
    "split_group in a block": (split_inside, "inside a coalescing block"),
    "a wait in its own block": (waits_inside, "has not ended"),
    "an empty batch of messages": (lambda g: dist.batch_isend_irecv([]), "empty"),
    "a batch of messages of two groups": (mixed_batch, "same group"),
    "a broadcast without a root": (lambda g: dist.broadcast(piece()), "src"),
    "a broadcast with two roots": (lambda g: dist.broadcast(piece(), 0, group_src=0), "src"),
    "a reduction to a stranger": (lambda g: dist.reduce(piece(), group_dst=7), "7"),
    "a P2POp without a peer": (lambda g: dist.P2POp(dist.isend, piece()), "either peer"),
    "a P2POp that is none": (lambda g: dist.P2POp(g.isend, piece(), 0), "isend or irecv"),
    "a group of nobody": (lambda g: dist.new_group([]), "at least one"),
    "a group with a double": (lambda g: dist.new_group([0, 0]), "duplicates"),
    "a group with a negative rank": (lambda g: dist.new_group([-1]), "-1"),
    "a group with a stranger": (lambda g: dist.new_group([0, 2]), "2"),
    "a group of an unknown backend": (lambda g: dist.new_group([0, 1], backend="no"), "no"),
    "a group with a negative timeout": (lambda g: dist.new_group([0, 1], timeout=-1), ">= 0"),
    "a split into nothing": (lambda g: dist.split_group(g, []), "not empty"),
    "a split with a stranger": (lambda g: dist.split_group(g, [[0], [5]]), "5"),
    "a split that overlaps": (lambda g: dist.split_group(g, [[0], [0, 1]]), "twice"),
    "a split with a negative timeout": (
        lambda g: dist.split_group(g, [[0, 1]], timeout=-1),
        ">= 0",
    ),
    "a split of an unknown backend": (lambda g: dist.split_group(g, [[0, 1]], backend="no"), "no"),
    "subgroups that don't divide": (lambda g: dist.new_subgroups(3), "divide"),
    "subgroups that overlap": (lambda g: dist.new_subgroups_by_enumeration([[0], [0]]), "twice"),
    "subgroups with a stranger": (
        lambda g: dist.new_subgroups_by_enumeration([[g.rank], [4]]),
        "4",
    ),
    "a negative timeout": (
        lambda g: g.all_reduce(piece(), timeout=datetime.timedelta(seconds=-1)),
        ">= 0",
    ),
    "a second world": (
        lambda g: dist.init_process_group("cpu", rank=0, world_size=1),
        "exists already",
    ),
}


@on_two
@pytest.mark.parametrize("offender", [0, 1])
@pytest.mark.parametrize("name", OTHERS)
def test_a_mistake_about_blocks_or_groups_raises_in_its_rank_too(
    world: ProcessGroup, name: str, offender: int
) -> None:
    call, words = OTHERS[name]
    if world.rank == offender:
        with pytest.raises(ValueError, match=words):
            call(world)
    right_calls(world)
    # A group's name contains the number of groups made before: ranks must still agree on it.
    again = dist.new_group([0, 1])
    assert isinstance(again, ProcessGroup)
    split = dist.split_group(world, [[1, 0]])
    assert isinstance(split, ProcessGroup)
    for made in (again, split):
        x = piece()
        made.all_reduce(x)
        assert (x == 2).all()
        dist.destroy_process_group(made)


@on_two
def test_a_wrong_timeout_of_wait_changes_nothing(world: ProcessGroup) -> None:
    x = piece()
    work = world.all_reduce(x, async_op=True)
    assert work is not None
    with pytest.raises(ValueError, match=">= 0"):
        work.wait(-1)
    for wrong in ("soon", "5", True):
        with pytest.raises(TypeError, match="timeout must be a number of seconds"):
            work.wait(wrong)  # type: ignore[arg-type]
    work.wait()
    assert (x == 2).all()


@on_two
def test_a_non_member_sends_nothing_to_a_group(world: ProcessGroup) -> None:
    other = dist.new_group([1])
    if world.rank == 0:
        assert other is dist.GroupMember.NON_GROUP_MEMBER
        for refused in (dist.get_process_group_ranks, dist.get_backend):
            with pytest.raises(ValueError, match="not in the group"):
                refused(other)
        with pytest.raises(ValueError, match="not in the group"):
            dist.P2POp(dist.isend, piece(), 1, other)
        x = piece()
        with pytest.warns(RuntimeWarning, match="not in the group"):
            assert dist.all_reduce(x, group=other) is None
        assert (x == 1).all()
    right_calls(world)
