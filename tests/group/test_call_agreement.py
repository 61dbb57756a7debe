"""Groups are what their members said: ranks that make different groups all get the same error."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import nc10d as dist
from nc10d.errors import Aborted, CollectiveMismatch, RendezvousError
from nc10d.group.call_agreement import LOCAL
from nc10d.group.process_group import ProcessGroup
from nc10d.group.world import current_world
from nc10d.testing import run_ranks

Lists = list[list[int]]
SIZE = 3


def use(group: Any, members: list[int]) -> None:
    """Require that a group computes among `members` and nobody else."""
    if isinstance(group, ProcessGroup):
        world = current_world().default
        assert world is not None
        x = np.full(300, 10.0**world.rank)
        group.all_reduce(x)
        assert (x == sum(10**rank for rank in members)).all(), (members, x[0])


def make(world: ProcessGroup, lists: Lists) -> str:
    """Make and use groups, and a last group in another way; return the error that ends this."""
    try:
        for members in lists:
            use(dist.new_group(members, sort_ranks=False), members)
        use(dist.split_group(world, [[0, 1, 2]]), [0, 1, 2])
        world.barrier()
    except CollectiveMismatch as error:
        return str(error)
    return ""


members = st.permutations(range(SIZE)).flatmap(
    lambda order: st.integers(1, SIZE).map(lambda count: list(order[:count]))
)


@settings(max_examples=30, deadline=None)
@given(
    lists=st.lists(members, max_size=4),
    others=st.lists(members, max_size=2),
    start=st.integers(0, 4),
    length=st.integers(0, 2),
    odd=st.integers(0, SIZE - 1),
)
def test_ranks_that_make_other_groups_all_learn_which(
    lists: Lists, others: Lists, start: int, length: int, odd: int
) -> None:
    """One rank makes `others` in place of some of the groups: other lists, fewer, or more."""
    different = lists[:start] + others + lists[start + length :]
    assume(different != lists)
    texts = run_ranks(
        make, SIZE, "threads", [different if r == odd else lists for r in range(SIZE)]
    )
    assert len(set(texts)) == 1, texts
    first = next(n for n in range(9) if lists[n : n + 1] != different[n : n + 1])
    for way in (lists, different):
        call = f"new_group({way[first]})" if first < len(way) else "split_group([[0, 1, 2]])"
        assert f"called {call}" in texts[0], (first, texts[0])


def members_alone(world: ProcessGroup, local: bool) -> float | str:
    try:
        if world.rank < 2:
            use(dist.new_group([0, 1], use_local_synchronization=local), [0, 1])
        x = np.ones(1)
        whole = dist.new_group()
        assert isinstance(whole, ProcessGroup)
        whole.all_reduce(x)
        return float(x[0])
    except CollectiveMismatch as error:
        return str(error)


def test_members_alone_make_a_group_if_they_say_so() -> None:
    assert run_ranks(members_alone, SIZE, "threads", [True] * SIZE) == [3.0] * SIZE
    texts = run_ranks(members_alone, SIZE, "threads", [False] * SIZE)
    assert len(set(texts)) == 1
    for part in ("called new_group([0, 1])", "rank 2 called new_group([0, 1, 2])", LOCAL):
        assert part in str(texts[0])


WAYS: dict[str, tuple[Callable[[], Any], Callable[[], Any], str, str]] = {
    "order": (
        lambda: dist.new_group([2, 0, 1]),
        lambda: dist.new_group([2, 0, 1], sort_ranks=False),
        "new_group([0, 1, 2])",
        "new_group([2, 0, 1])",
    ),
    "split": (
        lambda: dist.split_group(None, [[0, 1], [2]]),
        lambda: dist.split_group(None, [[0, 1, 2]]),
        "split_group([[0, 1], [2]])",
        "split_group([[0, 1, 2]])",
    ),
    "subgroups": (
        lambda: dist.new_subgroups(1),
        lambda: dist.new_subgroups_by_enumeration([[0, 2], [1]]),
        "new_subgroups([[0], [1], [2]])",
        "new_subgroups([[0, 2], [1]])",
    ),
    "call": (
        lambda: dist.new_group(),
        lambda: dist.split_group(None, [[0, 1, 2]]),
        "new_group([0, 1, 2])",
        "split_group([[0, 1, 2]])",
    ),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("odd", range(SIZE))
def test_every_call_that_makes_groups_is_compared(way: str, odd: int) -> None:
    usual, other, usual_text, other_text = WAYS[way]

    def call(world: ProcessGroup) -> str:
        try:
            (other if world.rank == odd else usual)()
            world.barrier()
        except CollectiveMismatch as error:
            return str(error)
        return ""

    texts = run_ranks(call, SIZE)
    assert len(set(texts)) == 1, texts
    assert f"rank {odd} called {other_text}" in texts[0]
    assert f"called {usual_text}" in texts[0]


def alone_with_other_lists(world: ProcessGroup) -> str:
    ranks = [0, 1] if world.rank == 0 else [0, 1, 2]
    # What the others call must be in the store before the first rank gives up.
    world.calls.number_local(tuple(ranks), f"new_group({ranks}, {LOCAL})")
    world.barrier()
    with pytest.raises(RendezvousError) as caught:
        dist.new_group(ranks, 0.3, use_local_synchronization=True)
    return str(caught.value)


def test_members_that_wait_in_vain_tell_what_the_others_called() -> None:
    for text in run_ranks(alone_with_other_lists, SIZE):
        assert f"rank 0 new_group([0, 1], {LOCAL})" in text
        assert f"rank 1 new_group([0, 1, 2], {LOCAL})" in text


class Interrupting:
    """A store that a rank is interrupted in."""

    def compare_set(self, *_: Any) -> Any:
        raise KeyboardInterrupt

    set = compare_set


def interrupted_before_it_joins(world: ProcessGroup, local: bool) -> str:
    """Interrupt rank 0 before its call counts; return why the others' group does not form."""
    ends: type[BaseException] = Aborted
    if world.rank == 0:
        vars(world.calls)["_store"], ends = Interrupting(), KeyboardInterrupt
    with pytest.raises(ends):
        dist.new_group(use_local_synchronization=local)
    with pytest.raises(Aborted) as caught:
        world.barrier()
    return str(caught.value)


@pytest.mark.parametrize("local", [False, True])
def test_an_interrupt_before_a_rank_joins_is_told_to_all_at_once(local: bool) -> None:
    start = time.monotonic()
    texts = run_ranks(interrupted_before_it_joins, SIZE, "threads", [local] * SIZE, timeout=30.0)
    assert len(set(texts)) == 1
    call = f"new_group([0, 1, 2]{', ' + LOCAL if local else ''})"
    assert texts[0].endswith(f"by its rank 0: it was interrupted in {call} (KeyboardInterrupt)")
    assert time.monotonic() - start < 15.0  # the others have not waited out their 30 s


def two_of_one_name(world: ProcessGroup) -> None:
    """Make overlapping groups of one name, which must share nothing."""
    made = []
    for ranks in ([0, 1], [0, 1, 2], [1, 0], [1, 2]):
        if world.rank in ranks:
            group = world.child("same", ranks, 20.0, world.config)
            group.make_backends()
            made.append((ranks, group))
    for ranks, group in (*made, *made):
        use(group, ranks)
        y = np.array([group.rank])
        group.broadcast(y, group.size - 1)
        assert y[0] == group.size - 1
    world.barrier()
    for _, group in made:
        group.close()


def test_groups_of_one_name_with_other_members_share_nothing() -> None:
    run_ranks(two_of_one_name, SIZE)
