"""Simulated ranks go on without the dead: `shrink_group` in virtual time."""

import random
import time
from functools import partial
from typing import Any

import numpy as np
import pytest

import nc10d as dist
from nc10d.errors import Aborted, DistError
from nc10d.testing import Kill, Partition, Pause, draw_faults, run_ranks
from nc10d.testing.simulated.survivors import Announcements, SimulatedControl
from nc10d.testing.simulated.virtual_time import Scheduler

STEPS = 20


def train(group: Any) -> tuple[int, int]:
    """Reduce STEPS times, without the ranks that die; return step and size at the end."""
    step = np.zeros(1)
    while step[0] < STEPS:
        time.sleep(1.0)
        try:
            dist.all_reduce(np.ones(1))
            step += 1
        except DistError:
            dist.shrink_group()
            # A step may have ended on some ranks only: all go on from the least of theirs.
            dist.all_reduce(step, dist.ReduceOp.MIN)
    return int(step[0]), dist.get_world_size()


def simulated(faults: Any, seed: int = 0) -> list[Any]:
    return run_ranks(train, 4, "simulated", seed=seed, faults=faults)


@pytest.mark.parametrize(
    "faults",
    [
        [Kill(1, 5.5), Kill(3, 9.2)],
        [Kill(1, 5.5), Kill(0, 5.506)],  # the member that decides, amid the agreement
        [Kill(2, 5.5), Kill(0, 5.5)],
    ],
)
def test_survivors_go_on_together(faults: list[Any]) -> None:
    dead = {fault.rank for fault in faults}
    for seed in range(5):
        ends = simulated(faults, seed)
        assert [end for rank, end in enumerate(ends) if rank not in dead] == [(STEPS, 2)] * 2


def test_a_rank_that_comes_too_late_is_left_out() -> None:
    with pytest.raises(Aborted, match=r"have gone on without rank 2: they are \[0, 3\]"):
        simulated([Kill(1, 5.5), Pause(2, 5.0, 20.0)])
    with pytest.raises(Aborted, match=r"have gone on without rank 2: they are \[0, 3\]"):
        simulated([Kill(1, 5.5), Partition([2], 5.0, 20.0)])


def test_any_deaths_leave_a_group_that_agrees() -> None:
    for seed in range(30):
        faults = draw_faults(4, 25.0, seed, [Kill])
        ends = [end for end in simulated(faults, seed) if end is not None]
        sizes = {size for _, size in ends}
        assert len(sizes) == 1
        assert {step for step, _ in ends} == {STEPS}
        assert len(ends) <= sizes.pop() <= 4


@pytest.mark.parametrize("seed", range(20))
def test_one_of_several_proposals_is_decided(seed: int) -> None:
    scheduler = Scheduler(lambda labels: 0)
    draw = random.Random(seed).random
    announcements = Announcements(scheduler, lambda src, dst: draw(), [])
    announcements.members.update({0: 0, 1: 1, 2: 2})
    decided = []

    def propose(rank: int) -> None:
        control = SimulatedControl(announcements, rank, 3)
        decided.append(control.decide("topic", f"of rank {rank}"))

    scheduler.run([partial(propose, rank) for rank in range(3)])
    assert len(decided) == 3
    assert len(set(decided)) == 1
