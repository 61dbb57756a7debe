"""A group that its program has dropped leaves nothing behind, and nothing in flight is cut off."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nc10d
from nc10d.api import functional
from nc10d.group.world import current_world
from nc10d.testing.local_backend import run_local
from nc10d.testing.ranks import Ranks


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2) as made:
        yield made


def use(group: Any) -> None:
    x = np.ones(3000)
    nc10d.all_reduce(x, group=group)
    assert (x == 2).all()
    if group.rank == 0:
        group.send(x, 1)
    else:
        group.recv(x, 0)
    group.all_reduce(x, async_op=True).wait()


def start_worker(group: Any) -> None:
    """Start this rank's worker, which else starts when a peer is first late."""
    x, peer = np.ones(3), 1 - group.rank
    work = group.irecv(x, peer)
    group.barrier()
    group.send(np.ones(3), peer)
    work.wait()


def make_and_drop(group: Any, count: int) -> tuple[int, int, int]:
    """Make, use and drop so many groups; return what is left: memory, groups, registered groups."""
    for turn in range(count):
        use(nc10d.new_group(use_local_synchronization=turn % 2 == 0))
        use(nc10d.split_group(split_ranks=[[0, 1]]))
    group.barrier()  # the other rank has dropped its groups, too
    context = group.backend("cpu").group.context
    context.arena.free(context.allocate(1))  # reclaims what all ranks have left
    group.barrier()
    live = sum(1 for _ in context.live_groups.all())
    return context.arena.used(), live, len(current_world().groups)


def process() -> tuple[int, int, int]:
    """Return the descriptors, threads and MiB of resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return len(os.listdir("/proc/self/fd")), threading.active_count(), pages * 4096 >> 20


@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.long)])
def test_dropped_groups_leave_nothing(ranks: Ranks, count: int) -> None:
    ranks.run(start_worker)
    first = ranks.run(make_and_drop, [10] * 2)
    before = process()
    gc.disable()
    try:
        assert ranks.run(make_and_drop, [count] * 2) == first
        after = process()
    finally:
        gc.enable()
    assert first[0][1:] == (1, 1), "the default group alone"
    assert after[:2] == before[:2]
    assert after[2] - before[2] < 8


def ended(dropped: list[Any]) -> bool:
    return all(table.droppable() for table in dropped)


def fire_and_forget(group: Any, gate: threading.Barrier) -> bool:
    """Start operations of a group that is dropped at once, together with their Works."""
    sums = [np.full(300_000, 1.0) for _ in range(4)]
    made = nc10d.new_group()
    if group.rank == 1:
        gate.wait()
    for x in sums:
        nc10d.all_reduce(x, group=made, async_op=True)
    del made
    if group.rank == 0:
        assert current_world().dropped, "its operations wait for rank 1"
        gate.wait()
    # The last elements are there a moment before their operations have ended.
    while any(x[-1] != 2 for x in sums) or not ended(current_world().dropped):
        group.backend("cpu").group.health.check()
        time.sleep(0.001)  # nothing announces the end of a dropped Work
    nc10d.new_group()
    return not current_world().dropped


def test_operations_in_flight_outlive_their_dropped_group_and_works(ranks: Ranks) -> None:
    assert ranks.run(fire_and_forget, [threading.Barrier(2)] * 2) == [True, True]


def kept_by_its_work(group: Any) -> float:
    x = np.full(300_000, 1.0)
    work = nc10d.all_reduce(x, group=nc10d.new_group(), async_op=True)
    assert work is not None
    work.wait()
    return float(x[-1])


def test_a_work_outlives_its_dropped_group(ranks: Ranks) -> None:
    assert ranks.run(kept_by_its_work) == [2.0, 2.0]


def sent_before(group: Any, gate: threading.Barrier) -> float:
    made = nc10d.new_group()
    x = np.full(10, float(group.rank))
    if group.rank == 0:
        nc10d.send(x, 1, group=made)
        del made
        gate.wait()
    else:
        gate.wait()
        nc10d.recv(x, 0, group=made)
    return float(x[0])


def test_a_message_outlives_the_senders_dropped_group(ranks: Ranks) -> None:
    assert ranks.run(sent_before, [threading.Barrier(2)] * 2) == [0.0, 0.0]


def test_groups_of_listed_ranks_are_found_again_on_every_rank() -> None:
    def run(group: Any) -> bool:
        nc10d.new_group([0, 1])  # which a rank has dropped, and another perhaps not yet
        if group.rank > 1:
            return True
        first = id(functional.find_group([0, 1]))
        gc.collect()
        return id(functional.find_group([0, 1])) == first

    assert all(run_local(run, 3))
