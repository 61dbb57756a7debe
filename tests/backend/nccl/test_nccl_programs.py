"""Random programs on devices end as a sequential world does, at any timing."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import random_programs as on
from emulated import emulated_ranks, needs_emulators
from hypothesis import HealthCheck, Phase, assume, given, note, settings
from hypothesis import strategies as st
from random_programs import Machine, Program, Step, Way

from nc10d.testing import Ranks

SIZE = 3

pytestmark = needs_emulators


@st.composite
def ways(draw: st.DrawFn, size: int) -> tuple[Way, ...]:
    way = st.builds(Way, st.booleans(), st.integers(0, on.STREAMS - 1), st.booleans())
    return tuple(draw(way) for _ in range(size))


@st.composite
def collectives(draw: st.DrawFn, groups: tuple[tuple[int, ...], ...], number: int) -> Step:
    size, kind = len(groups[0]), draw(st.sampled_from(on.COLLECTIVES))
    root = draw(st.integers(0, len(groups[number]) - 1))
    return Step(kind, draw(ways(size)), number, draw(st.booleans()), root)


@st.composite
def steps(draw: st.DrawFn, groups: tuple[tuple[int, ...], ...]) -> Step:
    size, number = len(groups[0]), draw(st.integers(0, len(groups) - 1))
    kinds = [*on.COLLECTIVES, on.MESSAGE, on.EXCHANGE, on.COPY, on.WAIT, on.BLOCK, on.GRAPH]
    kind = draw(st.sampled_from(kinds))
    if kind in on.COLLECTIVES:
        return draw(collectives(groups, number))
    taking_part, long = draw(ways(size)), draw(st.booleans())
    if kind in (on.BLOCK, on.GRAPH):
        inner = draw(st.lists(collectives(groups, number), min_size=1, max_size=3))
        mode, turns = draw(st.integers(0, 2)), draw(st.integers(1, 3)) if kind == on.GRAPH else 1
        return Step(kind, taking_part, number, inner=tuple(inner), mode=mode, turns=turns)
    src = draw(st.integers(0, size - 1))
    dst = (src + draw(st.integers(1, size - 1))) % size
    return Step(kind, taking_part, 0, long, pair=(src, dst), tag=draw(st.integers(0, 3)))


@st.composite
def programs(draw: st.DrawFn) -> Program:
    size = draw(st.integers(2, SIZE))
    everybody = tuple(range(size))
    more = st.sets(st.sampled_from(everybody), min_size=1).map(lambda found: tuple(sorted(found)))
    groups = (everybody, *draw(st.lists(more, max_size=2)))
    return Program(size, groups, tuple(draw(st.lists(steps(groups), min_size=1, max_size=10))))


machines = st.builds(
    Machine, st.sampled_from([32, 8, 2, 1]), st.booleans(), st.booleans(), st.integers(0, 2**16)
)


@pytest.fixture(scope="module")
def three() -> Iterator[Ranks]:
    with emulated_ranks(SIZE, "cpu:cpu,cuda:nccl", timeout=10.0) as ranks:
        yield ranks


def is_borne(program: Program, machine: Machine) -> bool:
    """Return whether nc10d bears a program on such a machine.

    A link forms beside launches that wait for its ranks: an init that waits for the device would
    never end then. An exchange has a communicator for each direction, whose streams may share one
    of 8 queues; with 32, which nc10d sets, or with few, messages have no such streams.
    """
    kinds = {step.kind for step in program.steps}
    if machine.init_sync and kinds & {on.MESSAGE, on.EXCHANGE}:
        return False
    return not (on.EXCHANGE in kinds and machine.queues == 8)


def check(ranks: Ranks, program: Program, machine: Machine) -> None:
    assume(is_borne(program, machine))
    note(f"{program}\n{machine}")
    found = ranks.run(on.run_program, [program] * SIZE, [machine] * SIZE)
    for rank, wanted in enumerate(on.expected(program)):
        for number, (got, right) in enumerate(zip(found[rank] or [], wanted, strict=True)):
            assert np.array_equal(got, right), f"rank {rank}, array {number}"


@settings(
    deadline=None,
    max_examples=40,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(program=programs(), machine=machines)
def test_random_programs_are_sequential(three: Ranks, program: Program, machine: Machine) -> None:
    check(three, program, machine)


@pytest.mark.long
@settings(deadline=None, max_examples=3000, suppress_health_check=[HealthCheck.too_slow])
@given(program=programs(), machine=machines)
def test_many_random_programs_are_sequential(
    three: Ranks, program: Program, machine: Machine
) -> None:
    check(three, program, machine)
