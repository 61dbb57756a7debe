"""Simulated ranks: users' programs in virtual time, with faults, each run decided by an integer."""

import functools
import importlib.util
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

import nc10d as dist
from nc10d.errors import CollectiveMismatch, CollectiveTimeout, PeerLost, StoreTimeout
from nc10d.testing import ClockJump, Kill, Partition, Pause, draw_faults, run_ranks
from nc10d.testing.strategies import fault_plans


def simulated(function: Any, size: int, *columns: Any, **options: Any) -> list[Any]:
    return run_ranks(function, size, "simulated", *columns, **options)


def data_parallel_step(group: Any) -> float:
    weights = np.full(4, float(group.rank == 0))
    dist.broadcast(weights, 0)
    gradients = [np.full(4, group.rank + 1.0), np.full(4, 2.0)]
    works = [dist.all_reduce(x, dist.ReduceOp.AVG, async_op=True) for x in gradients]
    for work, gradient in zip(works, gradients, strict=True):
        assert work is not None
        work.wait()
        weights -= 0.5 * gradient
    return float(weights[0])


def pipeline(group: Any) -> list[float]:
    """Micro-batches go through the ranks, one stage each; the last rank has the results."""
    done = []
    for batch in range(5):
        x = np.array([float(batch)])
        if group.rank:
            group.recv(x, group.rank - 1)
        x += 1
        if group.rank < group.size - 1:
            group.isend(x.copy(), group.rank + 1).wait()
        else:
            done.append(float(x[0]))
    return done


def checkpoint(group: Any) -> float | None:
    """Rank 0 writes slowly; the others go on when it has."""
    parts = [np.zeros(2) for _ in range(group.size)] if group.rank == 0 else None
    dist.gather(np.full(2, float(group.rank)), parts, dst=0)
    if group.rank == 0:
        time.sleep(0.05)
        group.store.set("written", "1")
    group.store.wait(["written"])
    dist.barrier()
    return None if parts is None else float(sum(part.sum() for part in parts))


def election(group: Any) -> str:
    """The first rank that writes leads; the others read who does."""
    winner = group.store.compare_set("leader", "", str(int(group.rank)))
    everyone: list[Any] = [None] * group.size
    dist.all_gather_object(everyone, winner.decode())
    assert len(set(everyone)) == 1
    return str(everyone[0])


@functools.cache
def example() -> Any:
    """Return examples/reducer_numpy.py, with a small network."""
    path = Path(__file__).parents[2] / "examples" / "reducer_numpy.py"
    spec = importlib.util.spec_from_file_location("reducer_numpy", path)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.WIDTHS = [4, 8, 1]
    return module


def reduced_in_buckets(group: Any) -> list[float]:
    """Train by a Reducer."""
    model = example().new_model()
    averaged = example().by_reducer(model, False)
    losses = [example().step(model, number, averaged)[0] for number in range(3)]
    assert example().equal_on_all_ranks(model)
    return losses


def led(group: Any) -> bool:
    return election(group) in {str(rank) for rank in range(group.size)}


PROGRAMS = [data_parallel_step, reduced_in_buckets, pipeline, checkpoint, led]


@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_run_as_with_threads(program: Any) -> None:
    expected = run_ranks(program, 3, "threads")
    for seed in range(10):
        assert simulated(program, 3, seed=seed) == expected


def test_the_seed_decides_who_leads() -> None:
    leaders = {seed: simulated(election, 4, seed=seed)[0] for seed in range(12)}
    assert len(set(leaders.values())) > 1, "seeds give other orders"
    assert leaders == {seed: simulated(election, 4, seed=seed)[0] for seed in range(12)}


def first_come(group: Any) -> list[int]:
    if group.rank:
        time.sleep(0.001 * (group.rank % 2))
        group.send(np.zeros(1), 0)
        return []
    return [int(group.recv(np.zeros(1))) for _ in range(group.size - 1)]


def test_a_run_replays_from_its_seed() -> None:
    runs = [simulated(first_come, 8, seed=seed)[0] for seed in range(8)]
    assert len({tuple(run) for run in runs}) > 3
    assert runs == [simulated(first_come, 8, seed=seed)[0] for seed in range(8)]


def test_a_thousand_ranks() -> None:
    def small(group: Any) -> float:
        x = np.ones(1)
        dist.all_reduce(x)
        return float(x[0])

    assert set(simulated(small, 1000)) == {1000.0}


def test_ranks_that_cannot_go_on_are_named() -> None:
    with pytest.raises(
        CollectiveMismatch, match=r"recv from 1 at .*test_simulated.py:\d+ and rank"
    ):
        simulated(lambda group: group.recv(np.empty(1), 1 - group.rank), 2)
    with pytest.raises(PeerLost, match=r"rank 0 has returned from its function at .*:\d+"):
        simulated(lambda group: dist.barrier() if group.rank else None, 2)
    with pytest.raises(CollectiveMismatch, match=r"rank \d called barrier"):
        simulated(lambda group: dist.barrier() if group.rank else dist.broadcast(np.ones(1), 0), 2)


def rounds(group: Any) -> float:
    for _ in range(4):
        time.sleep(1.0)
        dist.barrier()
    return time.monotonic()


def test_a_killed_rank_is_lost_for_the_others() -> None:
    with pytest.raises(PeerLost, match=r"rank 1 is lost: killed by the plan at 2\.5 s"):
        simulated(rounds, 3, faults=[Kill(1, 2.5)])

    def survive(group: Any) -> str:
        try:
            rounds(group)
        except PeerLost as error:
            return str(error)
        return "nobody was lost"

    first, killed, last = simulated(survive, 3, faults=[Kill(1, 2.5)])
    assert killed is None
    assert first == last
    assert "killed by the plan" in first


def test_a_partition_delays_or_times_out() -> None:
    faults = [Partition([2], 0.5, 20.0)]
    assert min(simulated(rounds, 3, faults=faults)) > 20.0
    with pytest.raises(CollectiveTimeout, match=r"barrier at .* timed out after 5 s"):
        simulated(rounds, 3, faults=faults, timeout=5.0)


def test_pauses_and_clocks() -> None:
    assert min(simulated(rounds, 3, faults=[Pause(1, 0.5, 20.0)])) > 20.0

    def clock(group: Any) -> float:
        rounds(group)
        return time.time()

    times = simulated(clock, 3, faults=[ClockJump(1, 0.5, 1000.0)])
    assert [seconds > 1000 for seconds in times] == [False, True, False]


def test_faults_follow_from_a_seed() -> None:
    plans = [draw_faults(3, 60.0, seed) for seed in range(200)]
    assert plans == [draw_faults(3, 60.0, seed) for seed in range(200)]
    kinds = {type(fault) for plan in plans for fault in plan}
    assert kinds == {Kill, Pause, Partition, ClockJump}
    for plan in plans:
        assert len({fault.rank for fault in plan if isinstance(fault, Kill)}) < 3, "a rank is left"
    delays = [draw_faults(3, 3.0, seed, [Pause, Partition]) for seed in range(10)]
    assert all(min(simulated(rounds, 3, faults=plan)) >= 4.0 for plan in delays)


@settings(max_examples=20)
@given(faults=fault_plans(3, 4.0))
def test_drawn_faults_delay_a_program_or_end_it(faults: list[Any]) -> None:
    try:
        ends = simulated(rounds, 3, faults=faults)
    except PeerLost:
        assert any(isinstance(fault, Kill) for fault in faults)
    else:
        assert all(end is None or end >= 4.0 for end in ends)


def test_a_loop_of_looks_ends() -> None:
    def look(group: Any) -> float:
        if group.rank == 0:
            time.sleep(100.0)
            group.store.set("done", "")
        while not group.store.check(["done"]):
            pass
        work = dist.barrier(async_op=True)
        assert work is not None
        while not work.is_completed():
            pass
        return time.monotonic()

    assert all(100.0 <= end < 120.0 for end in simulated(look, 3))


def test_a_stores_timeout_is_virtual() -> None:
    def wait(group: Any) -> float:
        with pytest.raises(StoreTimeout):
            group.store.wait(["never"], 3600.0)
        return time.monotonic()

    assert simulated(wait, 1)[0] >= 3600


def test_ranks_wait_for_each_other_in_a_hash_store() -> None:
    store = dist.HashStore()

    def wait(group: Any) -> float:
        if group.rank == 0:
            time.sleep(100.0)
            store.set("done", "")
        store.wait(["done"], 3600.0)
        with pytest.raises(StoreTimeout):
            store.wait(["never"], 50.0)
        return time.monotonic()

    assert all(150.0 <= end < 151.0 for end in simulated(wait, 3))


def test_a_callback_runs_as_its_rank() -> None:
    def chained(group: Any) -> int:
        seen = []
        work = dist.all_reduce(np.ones(1), async_op=True)
        assert work is not None
        future = work.get_future().then(lambda _: seen.append(dist.get_rank()))
        future.wait()
        return seen[0]

    assert simulated(chained, 4, seed=3) == [0, 1, 2, 3]


def test_a_wrong_fault_is_refused() -> None:
    with pytest.raises(ValueError, match="ranks are 0 to 1"):
        simulated(rounds, 2, faults=[Kill(2, 1.0)])
    with pytest.raises(ValueError, match="faults are for kind='simulated'"):
        run_ranks(rounds, 2, faults=[Kill(1, 1.0)])


def test_sends_wait_for_their_receivers_if_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def send_first(group: Any) -> None:
        group.send(np.ones(1), 1 - group.rank)
        group.recv(np.ones(1), 1 - group.rank)

    simulated(send_first, 2)
    monkeypatch.setenv("NC10D_SYNC_SENDS", "1")
    with pytest.raises(CollectiveMismatch, match=r"rank 0 waits in send to 1 at"):
        simulated(send_first, 2)
