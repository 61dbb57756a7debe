"""Arrays read in place: programs with two branches, in the simulator and in the engine."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import pytest
from algorithm_cases import (
    MAKERS,
    WAITS,
    Case,
    caught,
    data,
    fold,
    layouts,
    program,
    reduction,
    without,
)
from algorithm_cases import messages as messages_of
from algorithm_cases import play as play_in
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_readers import left, reading, released, slow_reader

import nc10d
from nc10d.backend.cpu.algorithms import gather
from nc10d.backend.cpu.algorithms.group_shape import GroupShape, Thresholds
from nc10d.backend.cpu.failure import cause
from nc10d.backend.cpu.lowering.lower import ProgramCache
from nc10d.backend.cpu.memory.group_memory import GroupMemory
from nc10d.backend.cpu.native import entry_points
from nc10d.backend.cpu.native import offsets as at
from nc10d.backend.cpu.program.program import StepKind, user
from nc10d.base import error_wire
from nc10d.errors import Aborted, DistError
from nc10d.group.process_group import ProcessGroup
from nc10d.ops import SUM
from nc10d.testing import Ranks, run_ranks
from simulation.race_simulator.simulator import SimulatedWorld

SLOT, SMALL, PAGE = 2048, 256, 128


def even_reduce_scatter(world: list[GroupShape], count: int, seed: int, lists: int = -1) -> Case:
    """Rank `lists`, if any, has its chunks in several arrays."""
    size = len(world)
    arrays = [data(seed, r, count * size) for r in range(size)]
    programs, users = [], []
    for r, layout in enumerate(world):
        places = [user(1 + p) if r == lists else user(1, 8 * count * p) for p in range(size)]
        how = reduction(SUM, size)
        steps = gather.reduce_scatter(layout, [8 * count] * size, user(0), places, how)
        mine = [a.copy() for a in np.split(arrays[r], size)] if r == lists else [arrays[r]]
        programs.append(program("reduce_scatter", steps, 1 + len(mine)))
        users.append([np.full(count, -1), *mine])
    chunks = np.split(fold([a.copy() for a in arrays], SUM), size)
    expected = [[chunks[r], *(a.copy() for a in users[r][1:])] for r in range(size)]
    return Case("reduce_scatter", programs, users, expected)


def even_all_gather(world: list[GroupShape], count: int, seed: int) -> Case:
    size = len(world)
    arrays = [data(seed, r, count) for r in range(size)]
    places = [user(1, 8 * count * r) for r in range(size)]
    sizes = [8 * count] * size
    programs = [
        program("all_gather", gather.all_gather(w, sizes, user(0), places), 2) for w in world
    ]
    users = [[a, np.full(count * size, -1)] for a in arrays]
    expected = [[a.copy(), np.concatenate(arrays)] for a in arrays]
    return Case("all_gather", programs, users, expected)


MADE: dict[str, Callable[[list[GroupShape], int, int], Case]] = {
    "all_reduce": MAKERS["all_reduce"],
    "all_reduce_avg": MAKERS["all_reduce_avg"],
    "broadcast": MAKERS["broadcast"],
    "all_gather": even_all_gather,
    "all_to_all": MAKERS["even_all_to_all"],
    "reduce_scatter": even_reduce_scatter,
}
OTHERS = {
    "reduce_scatter of a list": partial(even_reduce_scatter, lists=0),
    "ragged all_gather": MAKERS["all_gather"],
}
NAMES = sorted(MADE)


def direct(size: int) -> list[GroupShape]:
    world = layouts(size, SLOT, SMALL)
    return [replace(shape, direct=512, window=512, page=PAGE) for shape in world]


def play(cases: list[Case], size: int, seed: int, unreadable: list[int]) -> None:
    """Run cases back to back and compare every array with its expected contents.

    `seed` decides in which order ranks go on, and which of them expose their arrays for writing.
    """
    chance = random.Random(seed)
    keeping = [rank for rank in range(size) if chance.randrange(2)]
    play_in(SimulatedWorld(size, SLOT, unreadable, keeping), cases, chance.randrange)


def test_programs_of_large_arrays_read_peers_arrays() -> None:
    for name in NAMES:
        for planned in MADE[name](direct(3), 300, 0).programs:
            assert StepKind.BRANCH_IF_FLAGGED in {step.kind for step in planned.steps}, name


@pytest.mark.parametrize("name", ["all_gather", "all_to_all"])
def test_an_array_is_read_in_place_if_each_peer_takes_much_of_it(name: str) -> None:
    for count, large in ((63, False), (64, True)):  # of 8 bytes; 512 are much
        for planned in MADE[name](direct(9), count, 0).programs:
            assert (StepKind.FETCH in {step.kind for step in planned.steps}) == large


@pytest.mark.parametrize("count", [64, 79, 80, 300])
@pytest.mark.parametrize(
    ("name", "size", "writers", "share"),
    [
        ("broadcast", 2, [1], 2),
        ("broadcast", 4, [1, 2, 3], 4),
        ("all_gather", 2, [0, 1], 1),
        ("all_to_all", 2, [0, 1], 1),
    ],
)
def test_whole_pages_are_exposed_for_writing(
    name: str, size: int, writers: list[int], share: int, count: int
) -> None:
    """Of a broadcast that is each rank's share of the work, of two ranks' swap all."""
    for rank, planned in enumerate(MADE[name](direct(size), count, 0).programs):
        exposed = [s.writable for s in planned.steps if s.kind is StepKind.EXPOSE and not s.flag]
        assert exposed == [8 * count // share // PAGE * PAGE] * (rank in writers)


@settings(max_examples=80, deadline=None)
@given(
    size=st.integers(2, 5),
    names=st.lists(st.sampled_from([*NAMES, *OTHERS]), min_size=1, max_size=5),
    counts=st.lists(st.sampled_from([0, 1, 63, 64, 65, 200, 700]), min_size=5, max_size=5),
    seed=st.integers(0, 2**31),
    unreadable=st.lists(st.integers(0, 4), max_size=2),
)
def test_both_ways_mix_in_any_interleaving(
    size: int, names: list[str], counts: list[int], seed: int, unreadable: list[int]
) -> None:
    world = direct(size)
    cases = [
        {**MADE, **OTHERS}[n](world, c, seed % 100 + i)
        for i, (n, c) in enumerate(zip(names, counts, strict=False))
    ]
    play(cases, size, seed, unreadable)


@pytest.mark.parametrize("size", [2, 3, 8, 13])
@pytest.mark.parametrize("name", NAMES)
def test_every_world_size_agrees_with_the_oracle(name: str, size: int) -> None:
    play([MADE[name](direct(size), 400, 1)], size, 1, [])


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_removing_any_single_wait_for_peers_arrays_is_caught(name: str, size: int) -> None:
    def broken(victim: int, index: int, seed: int, unreadable: list[int]) -> None:
        # A second call of the same kind with other arrays, and a third in the first's slot.
        cases = [MADE[name](direct(size), 300, seed + i) for i in range(3)]
        cases[1].programs[victim] = without(cases[1].programs[victim], index)
        play(cases, size, seed, unreadable)

    programs = MADE[name](direct(size), 300, 0).programs
    for victim, planned in enumerate(programs):
        way = next(i for i, step in enumerate(planned.steps) if step.kind is StepKind.JUMP)
        for index, step in enumerate(planned.steps[:way]):
            waits = step.kind in WAITS or step.kind is StepKind.BRANCH_IF_FLAGGED
            if waits and step.kind is not StepKind.FREE:
                # The second call has the root of the programs looked at.
                tries = product(range(size - 1, 25 * size, size), ([], [0]))
                runs = (partial(broken, victim, index, *given) for given in tries)
                assert any(map(caught, runs)), (victim, step)


def messages(counts: list[int]) -> list[Case]:
    """Messages over a link; the receiver reads large messages from the sender's array."""
    return messages_of(counts, 512)


@settings(max_examples=60, deadline=None)
@given(
    counts=st.lists(st.sampled_from([0, 1, 40, 63, 64, 127, 129, 700]), min_size=1, max_size=8),
    seed=st.integers(0, 2**31),
    readable=st.booleans(),
)
def test_messages_pass_in_order_by_both_ways(counts: list[int], seed: int, readable: bool) -> None:
    play(messages(counts), 2, seed, [] if readable else [0])


@pytest.mark.parametrize("unreadable", [[], [0]])
def test_removing_any_wait_of_a_large_message_is_caught(unreadable: list[int]) -> None:
    def broken(rank: int, index: int, seed: int) -> None:
        cases = messages([40, 50, 400, 20, 500])
        cases[2].programs[rank] = without(cases[2].programs[rank], index)
        play(cases, 2, seed, unreadable)

    for rank, whole in enumerate(messages([300, 400])[1].programs):
        way = next(i for i, step in enumerate(whole.steps) if step.kind is StepKind.JUMP)
        steps = range(way, len(whole.steps)) if unreadable else range(way)
        for index in steps:
            if whole.steps[index].kind is StepKind.WAIT:
                runs = (partial(broken, rank, index, seed) for seed in range(25))
                assert any(map(caught, runs)), (rank, index)


def gives_up_while_read(group: ProcessGroup, call: str) -> None:
    x = nc10d.from_numpy(np.full(200_000, 1.0 + group.rank), group)

    def run() -> None:
        group.all_reduce(x) if call == "all_reduce" else group.broadcast(x, int(call[-1]))

    def give_up() -> None:
        assert reading.wait(30)
        group.abort("enough")

    if group.rank == 0:
        other = threading.Thread(target=give_up)
        other.start()
        try:
            with pytest.raises(Aborted):
                run()
            x[...] = 666  # the caller's again
        finally:
            released.set()
            other.join()
        assert left.wait(30)
        assert (x == 666).all(), "a late peer wrote into an array that was its caller's again"
    else:
        # A root is done once the peer has fetched its part; filling this part changes nothing.
        with contextlib.suppress(Aborted) if call[-1] == "1" else pytest.raises(Aborted):
            run()
        left.set()


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        ("broadcast from 0", "FETCH"),
        ("broadcast from 1", "FILL_EXPOSED"),
        ("all_reduce", "FOLD_EXPOSED"),
    ],
)
def test_data_of_a_rank_that_has_given_up_is_not_mistaken_for_a_result(
    monkeypatch: pytest.MonkeyPatch, call: str, kind: str
) -> None:
    for event in (released, reading, left):
        event.clear()
    monkeypatch.setattr(ProgramCache, "linked", slow_reader(kind))
    run_ranks(partial(gives_up_while_read, call=call), 2)


def gives_up_first(group: ProcessGroup) -> None:
    """Rank 2 fails the group; rank 0 hears of it before rank 1, which reads its array."""
    x = nc10d.from_numpy(np.full(200_000, 1.0 + group.rank), group)
    if group.rank == 2:
        group.broadcast(x, 0)
        assert reading.wait(30)
        group.abort("enough")
        return
    try:
        with pytest.raises(Aborted):
            group.broadcast(x, 0)
        x[...] = 666
    finally:
        (left if group.rank == 1 else released).set()


def test_data_is_not_mistaken_if_the_rank_that_gave_up_learns_of_the_failure_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for event in (released, reading, left):
        event.clear()
    publish = cause.publish

    def slowly(areas: GroupMemory, error: DistError) -> None:
        areas.write_cause(error_wire.encode_error(error, at.CAUSE_BYTES))
        areas.reported = True
        entry_points.compare_and_swap(areas.address(0) + at.AREA_ABORT, 0, areas.rank + 1)
        left.wait(1)  # a rank that has read takes it for a result, or waits for the rest
        publish(areas, error)

    monkeypatch.setattr(cause, "publish", slowly)
    monkeypatch.setattr(ProgramCache, "linked", slow_reader("FETCH"))
    run_ranks(gives_up_first, 3)


kept: list[np.ndarray] = []


def fails_with_what_it_has_exposed(group: ProcessGroup) -> None:
    """Rank 1 never comes to the other group's call, which ends by its timeout."""
    other = group.split_group([[0, 1]])
    assert other is not None
    other.barrier()
    kept.append(nc10d.from_numpy(np.full(300_000, 1.0 + group.rank, np.float32), group))
    if group.rank == 0:
        with pytest.raises(DistError):
            other.all_reduce(kept[0][1024:250_000], timeout=0.3)
        assert (kept[0] == 1).all(), "nobody has come: it is as it was"
        kept[0][...] = 5


def reduces_it(group: ProcessGroup) -> None:
    for array in (kept[0], nc10d.from_numpy(np.full(300_000, 3.5), group)):
        group.all_reduce(array)
        assert (array == 7).all(), (
            "what was taken back is an ordinary array, and new ones are exposed"
        )


def test_a_withdrawn_array_is_reduced_like_any_other() -> None:
    with Ranks(2, "processes") as ranks:
        ranks.run(fails_with_what_it_has_exposed)
        ranks.run(reduces_it)


def test_plain_arrays_are_read_by_the_kernel_from_a_threshold_on() -> None:
    def asks(name: str, count: int, size: int) -> int:
        """Return the access for the first array that rank 0 exposes."""
        limits = Thresholds(read_from=2048, write_from=1536)
        world = [replace(shape, thresholds=limits) for shape in direct(size)]
        steps = MADE[name](world, count, 0).programs[0].steps
        return next((step.access for step in steps if step.kind is StepKind.EXPOSE), 0)

    some = [at.READS, at.WRITES, at.WRITES, 0]
    assert [asks("all_reduce", 256, size) for size in (2, 3)] == [at.READS, 0]
    assert [asks("all_reduce", count, 2) for count in (256, 255, 192, 191)] == some
    assert [asks("reduce_scatter", count, 2) for count in (128, 127)] == [at.READS, 0]
    assert [asks("reduce_scatter", count, 3) for count in (86, 85)] == [at.READS, 0]
    assert [asks("broadcast", count, 2) for count in (256, 255, 64, 63)] == some
    assert [asks("broadcast", count, 3) for count in (256, 255)] == [at.READS, 0]
    for name in ("all_gather", "all_to_all"):
        assert [asks(name, count, 2) for count in (128, 127, 96, 95)] == some
        assert [asks(name, count, 3) for count in (86, 85)] == [at.READS, 0]
