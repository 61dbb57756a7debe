"""Orders of simulated ranks: what can be told apart is explored, and only that."""

import re
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

import nc10d as dist
from nc10d.errors import PeerLost
from nc10d.testing import explore, strategies
from nc10d.testing.programs.mixed_program import MixedProgram, complaints
from nc10d.testing.simulated.explore import Explored, Priorities
from testing.test_simulated import data_parallel_step, election, pipeline


@pytest.mark.parametrize("program", [data_parallel_step, pipeline])
def test_collectives_and_messages_from_a_given_rank_have_one_order(program: Any) -> None:
    assert explore(program, 3) == Explored(1, True)


@settings(max_examples=8)
@given(program=strategies.mixed_programs(3))
def test_a_drawn_program_has_the_oracles_results_in_every_order(program: MixedProgram) -> None:
    def check(group: Any) -> None:
        assert complaints(program, {group.rank: program.run(group.rank)}) == []

    assert explore(check, 3, most=5).orders


def first_come(group: Any) -> list[int]:
    if group.rank:
        group.send(np.zeros(1), 0)
        return []
    return [int(group.recv(np.zeros(1))) for _ in range(group.size - 1)]


def some_came(group: Any) -> int:
    if group.rank:
        return group.send(np.zeros(1), 0) or 0
    works = [group.irecv(np.zeros(1), src) for src in (1, 2)]
    first = dist.wait_any(works)
    for work in works:
        work.wait()
    return -1 if first is None else first


def called_back(group: Any) -> list[int]:
    """The order of callbacks, while the rank waits for something else than a Work."""
    if group.rank:
        group.send(np.zeros(1), 0)
        return []
    order: list[int] = []
    both = threading.Event()

    def note(src: int) -> None:
        order.append(src)
        if len(order) == 2:
            both.set()

    for src in (1, 2):
        work = group.irecv(np.zeros(1), src)
        work.add_done_callback(lambda _, src=src: note(src))
    both.wait()
    return order


def looked(group: Any) -> bool:
    work = dist.all_reduce(np.ones(1), async_op=True)
    assert work is not None
    seen = work.is_completed()
    work.wait()
    return seen


def saw(group: Any) -> bool:
    if group.rank:
        return group.send(np.zeros(1), 0) is None
    found = dist.iprobe(1)
    group.recv(np.zeros(1), 1)
    return found is not None


def probed(group: Any) -> int:
    if group.rank:
        return group.send(np.zeros(1), 0) or 0
    found = dist.probe()
    assert found is not None
    assert group.recv(np.zeros(1)) == found.src, "the message that was seen is received first"
    group.recv(np.zeros(1))
    return found.src


def winner(group: Any) -> str:
    return election(group)


@pytest.mark.parametrize(
    ("function", "size", "outcomes"),
    [
        (first_come, 3, {"[1, 2]", "[2, 1]"}),
        (some_came, 3, {"0", "1"}),
        (called_back, 3, {"[1, 2]", "[2, 1]"}),
        (looked, 2, {"True", "False"}),
        (saw, 2, {"True", "False"}),
        (probed, 3, {"1", "2"}),
        (winner, 3, {"0", "1", "2"}),
    ],
)
def test_every_outcome_is_met(function: Callable[..., Any], size: int, outcomes: set[str]) -> None:
    met = set()

    def note(group: Any) -> None:
        found = function(group)
        if group.rank == 0:
            met.add(str(found))

    found = explore(note, size)
    assert found.complete
    assert met == outcomes


def lost_update(group: Any) -> None:
    """Read, then write: two ranks may both read the old value."""
    value = int(group.store.compare_set("count", "", "0"))
    group.store.set("count", str(value + 1))
    dist.barrier()
    assert int(group.store.get("count")) == group.size


def test_the_choices_of_a_failure_run_it_again() -> None:
    with pytest.raises(AssertionError) as caught:
        explore(lost_update, 3)
    note, steps = caught.value.__notes__[-2:]
    choices = [int(choice) for choice in note.partition("=[")[2].rstrip("]").split(",") if choice]
    with pytest.raises(AssertionError):
        explore(lost_update, 3, choices=choices)
    assert re.search(r"rank \d goes on at .*test_explore.py:\d+", steps)
    assert explore(first_come, 3, choices=[1]) == Explored(1, False)


def takes_from_rank_1_last(group: Any) -> None:
    """Wrong if rank 1's message is the first that comes."""
    if group.rank == 0:
        for src in (None, 1):
            group.recv(np.zeros(1), src)
    else:
        group.send(np.zeros(1), 0)


def test_a_receive_from_any_rank_can_take_the_wrong_message() -> None:
    with pytest.raises(PeerLost, match="rank 0 waits in recv from 1") as caught:
        explore(takes_from_rank_1_last, 3)
    assert "a message of rank 1 reaches rank 0" in caught.value.__notes__[-1]


def starts_late(group: Any) -> None:
    """Wrong only if rank 2 makes all of its accesses before rank 0 makes its first."""
    if group.rank == 0:
        assert not group.store.check(["2/9"])
    for number in range(10):
        group.store.set(f"{group.rank}/{number}", "")


def test_a_rank_can_run_far_ahead() -> None:
    with pytest.raises(AssertionError) as caught:
        explore(starts_late, 3, most=40)
    assert int(caught.value.__notes__[-2].split()[1].rstrip(":")) > 20, "by priorities"


def test_a_bound_is_told_and_arrays_are_new_in_each_order() -> None:
    def add(group: Any, x: Any) -> None:
        x += 1
        assert x[0] == 1
        for number in range(4):
            group.store.add(str(number), 1)

    assert explore(add, 3, [np.zeros(1)] * 3, most=20) == Explored(20, False)
    with pytest.raises(ValueError, match="at least one order, got 0"):
        explore(add, 3, [np.zeros(1)] * 3, most=0)


def test_no_step_comes_first_for_ever() -> None:
    choose = Priorities(1)
    labels = [("rank", 0), ("rank", 1), ("rank", 2)]
    assert {choose(labels) for _ in range(500)} == {0, 1, 2}


def test_a_loop_of_looks_ends_in_every_order() -> None:
    def look(group: Any) -> None:
        if group.rank == 0:
            time.sleep(1.0)
        work = dist.barrier(async_op=True)
        assert work is not None
        while not work.is_completed():
            pass

    assert explore(look, 2).complete
