"""Calls that differ leave every array as it was, on all ranks, whatever the two calls are."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from algorithm_cases import MAKERS, layouts
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from lettered_hosts import ranks_on

import nc10d
from nc10d import ops as O
from nc10d.arrays.dtypes import DType
from nc10d.backend.cpu.algorithms.group_shape import grouped
from nc10d.errors import CollectiveMismatch
from nc10d.testing import reference
from nc10d.testing.strategies import KINDS, CollectiveCall, issue, mixed_values, outputs
from simulation.race_simulator.hosts import Cluster
from simulation.race_simulator.simulator import Disagreement

SLOT = 2048

# Programs, in the simulator


def step_apart(cluster: Cluster, rng: random.Random) -> int:
    """Run all ranks until none can move, in any order; return how many have found a difference."""
    running, disagreed, moved = list(cluster.ranks), 0, True
    while moved:
        moved, changes = False, cluster.pipes.changes
        rng.shuffle(running)
        for rank in list(running):
            try:
                for _ in range(rng.randrange(1, 9)):
                    moved = (not rank.idle() and rank.step()) or moved
            except Disagreement:
                running.remove(rank)
                disagreed += 1
        moved = moved or cluster.pipes.changes != changes
    return disagreed


@pytest.mark.parametrize("hosts", ["000", "0000", "001", "0011", "012"])
@pytest.mark.parametrize("name", MAKERS)
def test_no_program_writes_before_all_calls_are_compared(name: str, hosts: str) -> None:
    if name == "uneven_exchange" and hosts == "012":
        pytest.skip("docs/failures.md: sizes between three hosts")
    topology = grouped(hosts)
    world = layouts(len(hosts), SLOT, 256, topology if len(topology.hosts) > 1 else None)
    for seed in range(6):
        rng = random.Random(f"{name} {hosts} {seed}")
        count, other, odd = rng.choice([1, 30, 900]), rng.choice([2, 40]), rng.randrange(len(world))
        case = MAKERS[name](world, count, 3)
        theirs = MAKERS[name](world, other, 5)
        case.arrays[odd], case.programs[odd] = theirs.arrays[odd], theirs.programs[odd]
        if name != "uneven_exchange":  # whose calls are equal: only their sizes differ
            call = replace(case.programs[odd].call, detail="another")
            case.programs[odd] = replace(case.programs[odd], call=call)
        before = [[array.copy() for array in arrays] for arrays in case.arrays]
        cluster = Cluster(topology, SLOT)
        for rank, program in enumerate(case.programs):
            cluster.submit(rank, program, [array.view(np.uint8) for array in case.arrays[rank]])
        assert step_apart(cluster, rng) > 0, (name, seed)
        for mine, theirs_before in zip(case.arrays, before, strict=True):
            assert all(map(np.array_equal, mine, theirs_before)), (name, seed, count, other, odd)


# Calls, in the engine


@dataclass(frozen=True)
class Plan:
    """A collective of all ranks, by values that print well; equal plans are equal calls."""

    kind: type[Any]
    count: int
    dtype: DType
    op: O.ReduceOp
    root: int
    flat: bool
    registered: bool

    def key(self) -> tuple[Any, ...]:
        """Return the facts that ranks compare."""
        reduces = self.kind in (O.AllReduce, O.Reduce, O.ReduceScatter)
        rooted = self.kind in (O.Reduce, O.Broadcast, O.Gather, O.Scatter)
        if self.kind is O.Barrier:
            return (self.kind,)
        key = (self.op if reduces else None, self.root if rooted else None)
        return (self.kind, self.count, self.dtype, *key)

    def make(self, rank: int, size: int) -> Any:
        """Return a rank's operation, on arrays of its own."""
        table = self.kind in (O.ReduceScatter, O.AllToAll, O.Scatter)
        rows = [
            [mixed_values(self.dtype, self.count, 10 * r + c) for c in range(size)]
            for r in range(size)
        ]
        inputs = rows if table else [row[0] for row in rows]
        call = CollectiveCall(self.kind, inputs, self.op, self.root, self.flat)
        op = call.make(rank)
        for name in ("x", "inp", "out") if self.registered else ():
            value = getattr(op, name, None)
            if value is not None:
                many = isinstance(value, list)
                own = [nc10d.from_numpy(x) for x in (value if many else [value])]
                setattr(op, name, own if many else own[0])
        return op


def plans(size: int) -> st.SearchStrategy[Plan]:
    return st.builds(
        Plan,
        st.sampled_from(KINDS),
        st.sampled_from([1, 2, 3, 100, 1000, 2000, 9000, 40_000, 300_000]),
        st.sampled_from([DType.FLOAT64, DType.FLOAT32, DType.INT64, DType.UINT8]),
        st.sampled_from([O.SUM, O.MAX]),
        st.integers(0, size - 1),
        st.booleans(),
        st.booleans(),
    )


def play(group: Any, mine: Plan, theirs: Plan, odd: frozenset[int], later: bool) -> list[str]:
    """Make a call of a new group, which differs on the `odd` ranks; return all faults."""
    own = nc10d.new_group()
    assert isinstance(own, nc10d.ProcessGroup)
    plan = theirs if group.rank in odd else mine
    op, before = (plan.make(group.rank, group.size) for _ in range(2))
    own.barrier()
    try:
        work = issue(own, op, later)
        if later:
            work.wait()
        own.barrier()
        return [f"rank {group.rank} noticed nothing"]
    except CollectiveMismatch:
        same = map(reference.same_bits, outputs(op), outputs(before))
        return [] if all(same) else [f"rank {group.rank} has written"]
    finally:
        nc10d.destroy_process_group(own)


@pytest.mark.parametrize(("names", "examples"), [("aa", 30), ("aaaa", 25), ("aab", 15)])
def test_arrays_of_calls_that_differ_are_untouched(names: str, examples: int) -> None:
    size = len(names)

    @settings(max_examples=examples, deadline=None, database=None)
    @given(
        plans(size),
        plans(size),
        st.sets(st.integers(0, size - 1), min_size=1, max_size=size - 1),
        st.booleans(),
        st.integers(0, 2),
    )
    def law(mine: Plan, theirs: Plan, odd: set[int], later: bool, alike: int) -> None:
        if alike:  # calls that differ in a single thing are the likeliest
            theirs = replace(mine, count=theirs.count) if alike == 1 else replace(theirs, count=9)
        assume(mine.key() != theirs.key())
        rows = [[mine] * size, [theirs] * size, [frozenset(odd)] * size, [later] * size]
        assert not any(ranks.run(play, *rows)), (mine, theirs, odd, later)

    with ranks_on(names, timeout=20.0) as ranks:
        law()


def test_a_waiting_rank_reports_the_difference_that_it_alone_finds() -> None:
    """The others wait for more bytes than a barrier sends; the rank's waiting thread compares."""
    reduce = Plan(O.Reduce, 2000, DType.FLOAT32, O.SUM, 2, True, True)
    barrier = replace(reduce, kind=O.Barrier)
    with ranks_on("aab", timeout=20.0) as ranks:
        for _ in range(10):
            rows = [[reduce] * 3, [barrier] * 3, [frozenset({2})] * 3, [True] * 3]
            assert not any(ranks.run(play, *rows))
