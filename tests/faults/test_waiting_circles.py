"""Ranks that wait for each other in a circle: all of them are told who, and only they."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import nc10d as dist
from nc10d.errors import CollectiveMismatch, DistError
from nc10d.testing.ranks import Ranks

Script = Callable[[list[Any]], object]  # what a rank does with its groups, the world first


def groups_of(group: Any, others: list[list[int]]) -> list[Any]:
    made = [group, *(dist.new_group(ranks) for ranks in others)]
    group.barrier()
    return made


def x() -> Any:
    return np.ones(4)


def two_groups(groups: list[Any]) -> None:
    world, pair = groups
    first, second = (world, pair) if world.rank == 0 else (pair, world)
    first.all_reduce(x())
    second.all_reduce(x())


def three_groups(groups: list[Any]) -> None:
    rank = groups[0].rank
    mine, next_one = groups[1 + rank], groups[1 + (rank + 1) % 3]
    mine.all_reduce(x())
    next_one.all_reduce(x())


def both_receive(groups: list[Any]) -> None:
    groups[0].recv(x(), 1 - groups[0].rank)


def message_and_collective(groups: list[Any]) -> None:
    if groups[0].rank == 0:
        groups[0].all_reduce(x())
    else:
        groups[0].recv(x(), 0)


def both_send_what_has_no_room(groups: list[Any]) -> None:
    large = np.ones(1 << 21)
    groups[0].send(large, 1 - groups[0].rank)
    groups[0].recv(large, 1 - groups[0].rank)


def waits_of_asynchronous_calls(groups: list[Any]) -> None:
    world, pair = groups
    first, second = (world, pair) if world.rank == 0 else (pair, world)
    first.all_reduce(x(), async_op=True).wait()
    second.all_reduce(x(), async_op=True).wait()


CIRCLES: dict[str, tuple[int, list[list[int]], Script]] = {
    "two groups": (2, [[0, 1]], two_groups),
    "three groups": (3, [[0, 2], [0, 1], [1, 2]], three_groups),
    "both receive": (2, [], both_receive),
    "message and collective": (2, [], message_and_collective),
    "both send": (2, [], both_send_what_has_no_room),
    "asynchronous": (2, [[0, 1]], waits_of_asynchronous_calls),
}


def told(group: Any, name: str) -> tuple[DistError | None, float]:
    _, others, script = CIRCLES[name]
    groups = groups_of(group, others)
    start = time.monotonic()
    try:
        script(groups)
    except DistError as error:
        return error, time.monotonic() - start
    return None, 0.0


@pytest.mark.parametrize("name", CIRCLES)
def test_a_circle_is_told_to_all_its_ranks_long_before_the_timeout(name: str) -> None:
    size = CIRCLES[name][0]
    with Ranks(size, "processes", timeout=120.0) as ranks:
        errors = ranks.run(told, [name] * size)
    assert len({str(error) for error, _ in errors}) == 1
    for error, late in errors:
        assert isinstance(error, CollectiveMismatch)
        assert late < 30
        for rank in range(size):
            assert f"rank {rank} waits in" in str(error)
            assert f"for rank {rank}" in str(error)
        assert str(error).count("test_waiting_circles.py:") == size


def comes_late(group: Any, by_thread: bool) -> bool:
    """Rank 1 waits in one group; rank 0 comes there late, maybe by a thread while it waits too."""
    world, pair = groups_of(group, [[0, 1]])
    y, never = x(), threading.Event()

    def missing() -> None:
        never.wait(0.5)
        pair.all_reduce(y)

    if group.rank == 1:
        pair.all_reduce(y)
        world.all_reduce(x())
    elif by_thread:
        other = threading.Thread(target=missing)
        other.start()
        world.all_reduce(x())
        other.join()
    else:
        missing()
        world.all_reduce(x())
    return bool((y == 2).all())


@pytest.mark.parametrize("by_thread", [False, True])
def test_nobody_is_accused_while_somebody_may_still_come(by_thread: bool) -> None:
    with Ranks(2, "processes", timeout=60.0) as ranks:
        assert ranks.run(comes_late, [by_thread] * 2) == [True, True]


def apart(group: Any) -> str:
    groups, never = groups_of(group, [[0, 1]]), threading.Event()
    group.timeout = 1.0
    if group.rank == 0:
        with pytest.raises(DistError) as caught:
            groups[0].all_reduce(x())
        return str(caught.value)
    while (failure := group.backend("cpu").failure()) is None:
        never.wait(0.02)  # it waits for no rank, and does not call either
    return str(failure)


def test_a_rank_that_waits_for_something_else_is_late_and_in_no_circle() -> None:
    with Ranks(2, "processes", timeout=60.0) as ranks:
        told = ranks.run(apart)
    assert all("timed out on rank 0 waiting for rank 1" in one for one in told)
