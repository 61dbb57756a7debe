"""Every algorithm's program, run by the simulator: right, ordered, and no wait too many or few."""

from __future__ import annotations

import random
from functools import partial

import numpy as np
import pytest
from algorithm_cases import (
    MAKERS,
    WAITS,
    Case,
    all_gather,
    all_reduce,
    broadcast,
    caught,
    layouts,
    messages,
    submit,
    without,
)
from algorithm_cases import play as play_in
from hypothesis import given, settings
from hypothesis import strategies as st

from nc10d.backend.cpu.program.program import StepKind
from simulation.race_simulator.simulator import CELLS, SimulatedWorld

SLOT, SMALL = 8192, 2048


def play(cases: list[Case], size: int, slot: int, seed: int) -> None:
    play_in(SimulatedWorld(size, slot), cases, random.Random(seed).randrange)


# Larger worlds are slower: sizes from 34 to 62 need a long campaign, and 65 is of the slow tests.
MARKS = {65: pytest.mark.slow} | dict.fromkeys(range(34, 63), pytest.mark.long)
SIZES = [pytest.param(n, marks=MARKS.get(n, ())) for n in range(1, 66)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", MAKERS)
def test_every_world_size_agrees_with_the_oracle(name: str, size: int) -> None:
    for seed, count in ((1, 0), (2, 1), (3, 37), (4, 3 * SLOT // 8 // min(size, 8) + 5)):
        if size > 12 and count != 1 and (size, seed) not in {(16, 3), (16, 4), (33, 3), (65, 3)}:
            continue  # a few worlds stand for the others
        case = MAKERS[name](layouts(size, SLOT, SMALL), count, seed)
        play([case], size, SLOT, seed)


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(2, 5),
    names=st.lists(st.sampled_from(sorted(MAKERS)), min_size=2, max_size=6),
    counts=st.lists(st.sampled_from([0, 1, 2, 3, 200, 700, 1500]), min_size=6, max_size=6),
    seed=st.integers(0, 2**31),
)
def test_programs_mix_back_to_back_in_any_interleaving(
    size: int, names: list[str], counts: list[int], seed: int
) -> None:
    world = layouts(size, 4096, 1024)
    cases = [
        MAKERS[n](world, c, seed % 100 + i)
        for i, (n, c) in enumerate(zip(names, counts, strict=False))
    ]
    play(cases, size, 4096, seed)


@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("seed", range(30))
def test_rooted_calls_with_changing_roots_keep_out_of_each_others_way(size: int, seed: int) -> None:
    # Rounds of a long broadcast are ordered by nothing but FREE.
    world = layouts(size, 1024, 256)
    rng = random.Random(seed)
    makers = [broadcast, MAKERS["reduce"], all_gather]
    cases = [rng.choice(makers)(world, rng.choice([1, 2, 20, 150, 300]), i) for i in range(12)]
    play(cases, size, 1024, seed)


def test_a_broadcasting_root_never_overruns_a_sleeping_reader() -> None:
    world = layouts(3, 1024, 256)
    cases = [broadcast(world, 100 + i, 0) for i in range(20)]
    sim = SimulatedWorld(3, 1024)
    for case in cases:
        submit(sim, case)
    # Reader 2 sleeps until no other rank can move; then it takes a step at a time.
    while not all(rank.idle() for rank in sim.ranks):
        moved = False
        for rank in sim.ranks[:2]:
            while not rank.idle() and rank.step():
                moved = True
        if not sim.ranks[2].idle():
            moved = sim.ranks[2].step() or moved
        assert moved
    for case in cases:
        np.testing.assert_array_equal(case.arrays[2][0], case.expected[2][0])


@settings(max_examples=50, deadline=None)
@given(
    counts=st.lists(st.sampled_from([0, 1, 32, 33, 127, 128, 129, 300]), min_size=1, max_size=9),
    seed=st.integers(0, 2**31),
)
def test_messages_pass_a_link_in_order_whatever_their_sizes(counts: list[int], seed: int) -> None:
    play(messages(counts), 2, 1024, seed)


@pytest.mark.parametrize(
    ("counts", "victim"),
    [([300, 700, 300, 20, 20], 1), ([*range(10, 20)], CELLS.count)],
    ids=["in pieces", "in a cell"],
)
def test_removing_any_wait_of_a_message_is_caught(counts: list[int], victim: int) -> None:
    def broken(rank: int, index: int) -> list[Case]:
        cases = messages(counts)
        cases[victim].programs[rank] = without(cases[victim].programs[rank], index)
        return cases

    for rank, program in enumerate(messages(counts)[victim].programs):
        for index, step in enumerate(program.steps):
            if step.kind is StepKind.WAIT:
                runs = (partial(play, broken(rank, index), 2, 1024, seed) for seed in range(12))
                assert any(map(caught, runs)), (rank, index, step)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("name", "count"), [*((name, 750) for name in MAKERS if name != "barrier"), ("broadcast", 20)]
)
def test_removing_any_single_wait_is_caught(name: str, count: int, size: int) -> None:
    """Programs of several rounds, as 750 elements need; and a broadcast of a single round."""
    world = layouts(size, 1024, 256)

    def mix(victim: int, index: int | None, root: int) -> list[Case]:
        # A broadcast of two rounds: its slowest leaf may still read the root's data, or
        # another leaf's fingerprint, when they begin the next program. The first
        # FREE of a program prevents that.
        before = [all_gather(world, 20, 5), broadcast(world, 200, root)]
        target = MAKERS[name](world, count, 9)
        if index is not None:
            target.programs[victim] = without(target.programs[victim], index)
        after = [broadcast(world, 20, victim + 1), all_gather(world, 20, 7)]
        return [*before, target, MAKERS[name](world, count, 15), *after, all_reduce(world, 20, 8)]

    play(mix(0, None, 1), size, 1024, 1)
    for victim in range(size):
        steps = MAKERS[name](world, count, 9).programs[victim].steps
        for index, step in enumerate(steps):
            if step.kind not in WAITS:
                continue
            if name == "broadcast" and step.kind is StepKind.MEET_ALL and victim == 9 % size:
                continue  # the root waits to compare calls, not for memory (see below)
            if (
                name == "broadcast"
                and step.kind is StepKind.FREE
                and size == 2
                and victim != 9 % size
            ):
                continue  # between two ranks there is no other leaf
            runs = (
                partial(play, mix(victim, index, root), size, 1024, seed)
                for seed in range(12)
                for root in range(size)
            )
            assert any(map(caught, runs)), (victim, index, step)


@pytest.mark.parametrize("name", ["uneven_exchange", "gather"])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_an_exchange_has_a_round_for_each_piece_of_its_largest_array(name: str, size: int) -> None:
    line = 64
    head = -(-16 * size // line) * line  # bytes of the sizes
    parts = 1 if name == "gather" else max(1, size - 1)
    piece = (SLOT - head) // parts // line * line
    for elements in (0, 1, piece // 8, piece // 8 + 1, 3 * piece // 8, 3 * piece // 8 + 1):
        case = MAKERS[name](layouts(size, SLOT, SMALL), elements, 3)
        largest = max(int(users[0].max()) for users in case.arrays)
        world = SimulatedWorld(size, SLOT)
        submit(world, case)
        world.run()
        rounds = {rank.round for rank in world.ranks}
        assert rounds == {max(1, -(-largest // piece))}, (elements, largest)
