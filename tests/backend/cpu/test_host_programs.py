"""Programs of groups that span hosts, run by the simulator: right on any hosts, in any order."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from algorithm_cases import MAKERS, WAITS, Case, caught, layouts, program, without
from algorithm_cases import play as play_in
from hypothesis import given, settings
from hypothesis import strategies as st

from nc10d.arrays.dtypes import DType
from nc10d.backend.cpu.algorithms import choose, hosts_reduce
from nc10d.backend.cpu.algorithms.group_shape import GroupShape, Topology, grouped
from nc10d.backend.cpu.algorithms.reduction import Reduction
from nc10d.backend.cpu.program.program import Program, StepKind
from nc10d.ops import SUM
from simulation.race_simulator.hosts import Cluster
from simulation.race_simulator.simulator import Disagreement

SLOT, SMALL = 4096, 1024


def play(
    hosts: Topology,
    cases: list[Case],
    slot: int,
    seed: int | None,
    unreadable: Collection[int] = (),
) -> None:
    """Run cases back to back and compare every array with its expected contents.

    Local peers can't read the arrays of `unreadable` ranks.
    """
    cluster = Cluster(hosts, slot, room=slot // 4, unreadable=unreadable)
    play_in(cluster, cases, None if seed is None else random.Random(seed).randrange)


def world(hosts: Topology, slot: int = SLOT, small: int = SMALL) -> list[GroupShape]:
    return layouts(hosts.size, slot, small, hosts)


SHAPES = ["01", "0011", "0101", "0001", "012", "001122", "000112", "01234", "0110220", "0120121"]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", MAKERS)
def test_every_shape_of_hosts_agrees_with_the_oracle(name: str, shape: str) -> None:
    hosts = grouped(shape)
    for seed, count in ((1, 0), (2, 1), (3, 37), (4, 700), (6, 5000)):
        play(hosts, [MAKERS[name](world(hosts), count, seed)], SLOT, seed)


@pytest.mark.parametrize("shape", ["01", "0011", "0001", "00012"])
@pytest.mark.parametrize("name", MAKERS)
def test_arrays_of_many_segments_are_reduced_right(name: str, shape: str) -> None:
    hosts = grouped(shape)
    for seed in (3, 4, 8):
        play(hosts, [MAKERS[name](world(hosts, 65536), 50_000, seed)], 65536, seed)


MANY = [range(16), [host // 2 for host in range(34)], [0, *range(33)]]


@pytest.mark.parametrize("names", MANY, ids=["16", "17 of 2", "33, one of 2"])
@pytest.mark.parametrize("name", ["all_reduce", "all_reduce_avg", "all_reduce_premul", "reduce"])
def test_many_hosts_reduce_pieces_of_any_size(name: str, names: Sequence[int]) -> None:
    hosts = grouped(names)
    for seed, count in ((1, 130), (2, 131), (3, 900), (4, 4000)):
        play(hosts, [MAKERS[name](world(hosts, SLOT, 64), count, seed)], SLOT, seed)


def test_many_hosts_reduce_in_the_order_of_hosts() -> None:
    hosts, count = grouped(range(17)), 700
    chance = np.random.default_rng(5)
    arrays = [chance.standard_normal(count) * 10.0 ** chance.integers(-9, 9) for _ in range(17)]
    want = functools.reduce(np.add, arrays)
    how = Reduction(SUM, DType.FLOAT64, 17)
    cluster = Cluster(hosts, SLOT)
    for rank, layout in enumerate(world(hosts)):
        steps = choose.all_reduce(layout, 8 * count, how)
        cluster.submit(rank, program("all_reduce", steps, 1), [arrays[rank].view(np.uint8)])
    cluster.run(random.Random(1).randrange)
    for array in arrays:
        np.testing.assert_array_equal(array, want)


FAR = [
    pytest.param("all_reduce", marks=pytest.mark.slow),
    "fused",
    "broadcast",
    "barrier",
    pytest.param("reduce", marks=pytest.mark.long),
]


@pytest.mark.parametrize("name", FAR)
def test_64_hosts_of_8_ranks_agree_with_the_oracle(name: str) -> None:
    hosts = grouped([rank // 8 for rank in range(512)])
    for count in (1, 2000):
        play(hosts, [MAKERS[name](world(hosts, 32768), count, 3)], 32768, None)


def direct(hosts: Topology) -> list[GroupShape]:
    return [replace(shape, direct=512) for shape in world(hosts)]


LARGE = ["all_reduce", "broadcast", "all_gather_into_one", "reduce_scatter", "even_all_to_all"]


@pytest.mark.parametrize("shape", ["0011", "0101", "0001", "001122", "000112", "0110220"])
@pytest.mark.parametrize("name", MAKERS)
def test_large_arrays_of_local_peers_are_read_in_place(name: str, shape: str) -> None:
    hosts = grouped(shape)
    for seed, count in ((1, 64), (2, 79), (4, 700), (5, 1300)):
        for unreadable in ([], [0], [hosts.size - 1], [1, 2]):
            case = MAKERS[name](direct(hosts), count, seed)
            if name in LARGE and count > 79:
                assert all(
                    StepKind.BRANCH_IF_FLAGGED in kinds(program) for program in case.programs[:2]
                )
            play(hosts, [case], SLOT, seed, unreadable)


def kinds(program: Program) -> set[StepKind]:
    return {step.kind for step in program.steps}


@pytest.fixture(params=["tree", "chain"])
def ways_of(request: pytest.FixtureRequest) -> Iterator[None]:
    """Broadcast down a tree of hosts, or down a chain as large arrays do."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "chain":
            patch.setattr(hosts_reduce, "CHAINED", 1)
            patch.setattr(hosts_reduce, "SEGMENT", 1024)
        yield


@pytest.mark.usefixtures("ways_of")
@settings(max_examples=60, deadline=None)
@given(
    names=st.lists(st.integers(0, 3), min_size=2, max_size=6).filter(lambda n: len(set(n)) > 1),
    kinds=st.lists(st.sampled_from(sorted(MAKERS)), min_size=2, max_size=5),
    counts=st.lists(st.sampled_from([0, 1, 3, 130, 700, 1500]), min_size=5, max_size=5),
    seed=st.integers(0, 2**31),
)
def test_programs_mix_back_to_back_in_any_interleaving(
    names: list[int], kinds: list[str], counts: list[int], seed: int
) -> None:
    hosts = grouped(names)
    cases = [
        MAKERS[kind](world(hosts), count, seed % 100 + i)
        for i, (kind, count) in enumerate(zip(kinds, counts, strict=False))
    ]
    play(hosts, cases, SLOT, seed)


@pytest.mark.parametrize("name", ["all_reduce", "fused", "broadcast", "all_gather", "barrier"])
def test_removing_any_wait_inside_a_host_is_caught(name: str) -> None:
    hosts = grouped("0011")

    def mix(victim: int, index: int) -> list[Case]:
        around = [
            MAKERS[kind](world(hosts, 1024, 256), 90, 2) for kind in ("all_reduce", "barrier")
        ]
        case = MAKERS[name](world(hosts, 1024, 256), 90, 1)
        case.programs[victim] = without(case.programs[victim], index)
        return [around[0], case, *around]

    for victim in (0, 1):
        program = MAKERS[name](world(hosts, 1024, 256), 90, 1).programs[victim]
        waits = [i for i, step in enumerate(program.steps) if step.kind in WAITS]
        for index in waits:
            runs = (functools.partial(play, hosts, mix(victim, index), SLOT, n) for n in range(40))
            assert any(map(caught, runs)), (victim, index, program.steps[index])


@pytest.mark.parametrize("shape", ["0011", "000111"])
@pytest.mark.parametrize("name", LARGE)
def test_removing_any_wait_of_ranks_that_read_in_place_is_caught(name: str, shape: str) -> None:
    hosts = grouped(shape)

    def mix(victim: int, index: int) -> list[Case]:
        cases = [MAKERS[name](direct(hosts), 500, seed) for seed in (1, 5, 1)]
        cases[0].programs[victim] = without(cases[0].programs[victim], index)
        return cases

    programs = MAKERS[name](direct(hosts), 500, 1).programs
    for victim in (0, 1, hosts.size - 1):
        steps = programs[victim].steps
        way = next(i for i, step in enumerate(steps) if step.kind is StepKind.JUMP)
        for index, step in enumerate(steps[:way]):
            met = step.kind is StepKind.WAIT and step.tick == 2  # the test below is about that wait
            if step.kind in WAITS and step.kind is not StepKind.FREE and not met:
                cases = functools.partial(mix, victim, index)
                runs = (functools.partial(play, hosts, cases(), SLOT, n) for n in range(40))
                assert any(map(caught, runs)), (victim, index, step)


@pytest.mark.parametrize("name", LARGE)
def test_no_array_changes_before_all_hosts_have_arrived(name: str) -> None:
    hosts = grouped("0011")
    for seed in range(20):
        cluster = Cluster(hosts, SLOT)
        case, odd = MAKERS[name](direct(hosts), 500, 1), MAKERS["barrier"](direct(hosts), 1, 1)
        before = copy.deepcopy(case.arrays)
        for rank in range(hosts.size):
            mine = case if rank < 2 else odd
            users = [a.view(np.uint8) for a in mine.arrays[rank]]
            cluster.submit(rank, mine.programs[rank], users)
        with pytest.raises(Disagreement):
            cluster.run(random.Random(seed).randrange)
        for now, then in zip(case.arrays[:2], before, strict=False):
            for x, y in zip(now, then, strict=True):
                np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("shape", ["01", "0011", "012", "0123", "00112"])
@pytest.mark.parametrize("odd", [0, -1])
def test_calls_that_disagree_never_end_on_any_rank(shape: str, odd: int) -> None:
    hosts = grouped(shape)
    right = MAKERS["all_reduce"](world(hosts), 3, 1)
    other = MAKERS["broadcast"](world(hosts), 3, 1)
    for seed in range(20):
        cluster = Cluster(hosts, SLOT)
        for rank in range(hosts.size):
            case = other if rank == odd % hosts.size else right
            users = [a.copy().view(np.uint8) for a in case.arrays[rank]]
            cluster.submit(rank, case.programs[rank], users)
        with pytest.raises(Disagreement):
            cluster.run(random.Random(seed).randrange)
        # The simulator ends at the first rank that notices; no rank may have ended by then.
        assert not any(rank.idle() for rank in cluster.ranks)
