"""Broadcasts that fit into a cache line: every rank compares calls before it leaves."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from algorithm_cases import IDLE, all_reduce, barrier, broadcast, caught, layouts
from algorithm_cases import play as play_in

from nc10d.backend.cpu.engine.call_sites import text_at
from nc10d.backend.cpu.native.offsets import RECORD_RING
from nc10d.backend.cpu.program.program import Program, StepKind
from nc10d.errors import CollectiveMismatch, DistError
from nc10d.testing.ranks import Ranks
from simulation.race_simulator.simulator import Disagreement, SimulatedWorld

LINE = re.escape(text_at(__file__, 0).removesuffix(":0")) + r":\d+"
Call = Callable[[Any, Any], object]


def small(value: float, count: int = 2, dtype: Any = np.float64) -> Any:
    return np.full(count, value, dtype)


def in_turns(group: Any, seed: int) -> None:
    """Broadcasts from changing roots among other calls; each has its own values."""
    rng = random.Random(seed)
    for number in range(400):
        root, count, other = rng.randrange(group.size), rng.randint(1, 4), rng.randrange(8)
        x = np.full(count, group.rank * 1000 + number, np.int32)
        group.broadcast(x, root)
        assert (x == root * 1000 + number).all(), (number, x)
        if other == 0:
            group.barrier()
        elif other == 1:
            y = np.full(3, group.rank)
            group.all_reduce(y)
            assert (y == sum(range(group.size))).all()
        elif other == 2:
            y = np.full(50, group.rank)
            group.broadcast(y, root, async_op=True).wait()
            assert (y == root).all()


@pytest.mark.parametrize("size", [2, 3, 5])
def test_small_broadcasts_mix_with_all_other_calls(size: int) -> None:
    with Ranks(size) as ranks:
        for seed in range(3):
            ranks.run(in_turns, [seed] * size)


USUAL: Call = lambda g, x: g.broadcast(x, 0)  # noqa: E731
MISTAKES: dict[str, Call] = {
    "root": lambda g, x: g.broadcast(x, 1),
    "itself": lambda g, x: g.broadcast(x, g.rank),
    "dtype": lambda g, x: g.broadcast(x.view(np.int64), 0),
    "count": lambda g, x: g.broadcast(x[:1], 0),
    "more": lambda g, x: g.broadcast(np.concatenate([x, x]), 0),
    "operation": lambda g, x: g.all_reduce(x),
    "barrier": lambda g, x: g.barrier(),
    "reduce": lambda g, x: g.reduce(x, 0),
    "gather": lambda g, x: g.all_gather_into_tensor(small(0, 2 * g.size), x),
}
SAME = "itself", 0  # the call of all other ranks, if rank 0 is odd


def mistaken(group: Any, name: str, odd: int, before: int) -> tuple[DistError, Any]:
    """After some good calls the `odd` rank makes another call than the other ranks do."""
    for number in range(before):
        group.broadcast(small(number), 0)
    x = small(group.rank)
    with pytest.raises(CollectiveMismatch) as caught:
        (MISTAKES[name] if group.rank == odd else USUAL)(group, x)
    return caught.value, x


CASES = [(name, odd, 0) for name in MISTAKES for odd in (0, 2) if (name, odd) != SAME]
CASES += [(name, 2, 2 * RECORD_RING + 1) for name in ("root", "itself", "dtype", "operation")]


@pytest.mark.parametrize(("name", "odd", "before"), CASES)
def test_a_call_that_differs_is_an_error_of_that_very_call_on_every_rank(
    name: str, odd: int, before: int
) -> None:
    with Ranks(3, timeout=40.0) as ranks:
        ranks.run(lambda group: group.barrier())
        errors = ranks.run(mistaken, [name] * 3, [odd] * 3, [before] * 3)
    assert len({str(error) for error, _ in errors}) == 1, "one root cause everywhere"
    for rank, (error, x) in enumerate(errors):
        assert error.seq == before + 2, error
        assert f"#{before + 2} of group" in str(error)
        assert len(set(re.findall(LINE, str(error)))) == 2, error
        assert (x == rank).all(), "no rank has taken another one's array"


def two_roots(group: Any) -> str:
    """Both ranks are the root of a broadcast of 8 bytes, the last call of the group."""
    x = small(group.rank, 1)
    with pytest.raises(CollectiveMismatch) as caught:
        group.broadcast(x, group.rank)
    assert x[0] == group.rank
    return str(caught.value)


@pytest.mark.parametrize("size", [2, 3])
def test_two_roots_of_one_broadcast_of_8_bytes_are_an_error_of_that_call_on_every_rank(
    size: int,
) -> None:
    with Ranks(size, timeout=40.0) as ranks:
        assert len(set(ranks.run(two_roots))) == 1


def without(program: Program, kind: StepKind) -> Program:
    """The program without its waits of a kind."""
    steps = tuple(IDLE if step.kind is kind else step for step in program.steps)
    return replace(program, steps=steps)


def play(size: int, seed: int, kind: StepKind | None, rank: int) -> None:
    """Many small rounds with a slow rank; maybe without some of a rank's waits."""
    world = layouts(size, 1024, 256)
    cases = [broadcast(world, 1 + i % 2, 0) for i in range(20)]
    cases += [barrier(world, 0, 0), all_reduce(world, 3, 4)]
    for case in cases if kind is not None else ():
        case.programs[rank] = without(case.programs[rank], kind)
    rng = random.Random(seed)
    # Mostly the first rank that may go on does: the last in the list falls behind.
    mostly_first = lambda count: 0 if rng.random() < 0.9 else rng.randrange(count)  # noqa: E731
    play_in(SimulatedWorld(size, 1024), cases, mostly_first)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("rank", [0, 1])
def test_small_rounds_are_ordered_and_need_each_wait(size: int, rank: int) -> None:
    for seed in range(5):
        play(size, seed, None, 0)
    assert any(caught(partial(play, size, n, StepKind.MEET_ALL, rank)) for n in range(40))


@pytest.mark.parametrize("roots", [(0, 1), (1, 2)])
def test_two_roots_are_noticed_in_any_interleaving(roots: tuple[int, int]) -> None:
    for seed in range(10):
        world, sim = layouts(3, 1024, 256), SimulatedWorld(3, 1024)
        one, other = (broadcast(world, 1, root) for root in roots)
        for rank in range(3):
            case, root = (other, roots[1]) if rank == roots[1] else (one, roots[0])
            program = case.programs[rank]
            program = replace(program, call=replace(program.call, root=root))
            sim.submit(rank, program, [case.arrays[rank][0].view(np.uint8)])
        with pytest.raises(Disagreement):
            sim.run(random.Random(seed).randrange)
