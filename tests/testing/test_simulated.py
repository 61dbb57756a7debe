"""Simulated ranks: users' programs in virtual time, with faults, each run decided by an integer."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

import nc10d as dist
from nc10d.errors import CollectiveMismatch, CollectiveTimeout, PeerLost, StoreTimeout
from nc10d.testing import ClockJump, Kill, Partition, Pause, explore, run_ranks


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
        time.sleep(100.0)
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


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (data_parallel_step, [-1.0] * 3),
        (pipeline, [[], [], [3.0, 4.0, 5.0, 6.0, 7.0]]),
        (checkpoint, [6.0, None, None]),
    ],
)
def test_programs_run_as_with_threads(program: Any, expected: list[Any]) -> None:
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


def test_a_stores_timeout_is_virtual() -> None:
    def wait(group: Any) -> float:
        with pytest.raises(StoreTimeout):
            group.store.wait(["never"], 3600.0)
        return time.monotonic()

    assert simulated(wait, 1)[0] >= 3600


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


def lost_update(group: Any) -> None:
    """Read, then write: two ranks may both read the old value."""
    store = group.store
    store.compare_set("count", "", "0")
    value = int(store.get("count"))
    store.set("count", str(value + 1))
    dist.barrier()
    assert int(store.get("count")) == 2


def test_every_order_is_explored() -> None:
    assert explore(lambda group: dist.barrier(), 2) > 1
    with pytest.raises(AssertionError) as caught:
        explore(lost_update, 2)
    assert any("order" in note for note in caught.value.__notes__)


def test_sends_wait_for_their_receivers_if_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def send_first(group: Any) -> None:
        group.send(np.ones(1), 1 - group.rank)
        group.recv(np.ones(1), 1 - group.rank)

    simulated(send_first, 2)
    monkeypatch.setenv("NC10D_SYNC_SENDS", "1")
    with pytest.raises(CollectiveMismatch, match=r"rank 0 waits in send to 1 at"):
        simulated(send_first, 2)
