"""Mixed traffic at full speed, every element checked; and proof that the checks would notice."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from algorithm_cases import without
from numba import cfunc, types
from traffic import COLLECTIVES, Traffic

import nc10d as dist
from nc10d.arrays.dtypes import DType
from nc10d.backend.cpu import context
from nc10d.backend.cpu.engine.cpu_policy import WaitPolicy
from nc10d.backend.cpu.lowering.lower import LoweredOp, ProgramCache, resolve
from nc10d.backend.cpu.lowering.prepared_cache import PreparedCache
from nc10d.backend.cpu.membership import formation
from nc10d.backend.cpu.native import offsets as at
from nc10d.backend.cpu.program.linker import Linked, link
from nc10d.backend.cpu.program.program import Kernel, Program, Step, StepKind, staging
from nc10d.errors import DistError
from nc10d.testing.ranks import Ranks

WAITING = {"spin": WaitPolicy(2000, 0), "yield": WaitPolicy(0, 1000), "sleep": WaitPolicy(0, 0)}


def wait_by(group: Any, waiting: WaitPolicy) -> None:
    """Change how this rank waits, in channels that exist and in later ones."""
    backend = group.backend("cpu")
    backend.group.context.waiting = waiting
    for channel in (backend.group.channel, *backend.group.links.channels()):
        channel.words[at.C_SPIN // 8] = waiting.spin
        channel.words[at.C_YIELD // 8] = waiting.yields


def campaign(group: Any, seed: int, steps: int, waiting: str) -> None:
    """Traffic on the whole group, on a part of it, and on a group in another order."""
    wait_by(group, WAITING[waiting])
    some = dist.new_group(range(group.size - 1)) if group.size > 2 else None
    other = dist.new_group(range(group.size)[::-1], sort_ranks=False)
    groups = [g if isinstance(g, dist.ProcessGroup) else None for g in (group, group, some, other)]
    Traffic(groups, seed, group.rank).run(steps)
    for made in groups[2:]:
        if made is not None:
            dist.destroy_process_group(made)


@pytest.fixture(scope="module", params=[("threads", 2), ("threads", 3), ("processes", 4)])
def stressed(request: Any) -> Iterator[Ranks]:
    kind, size = request.param
    with Ranks(size, kind) as ranks:
        yield ranks


@pytest.mark.timeout(1500)  # ranks that spin take minutes beside eight busy processes
@pytest.mark.parametrize("waiting", WAITING)
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.long)])
def test_mixed_traffic_is_right_in_every_element(stressed: Ranks, seed: int, waiting: str) -> None:
    size = stressed.world_size
    stressed.run(campaign, [seed] * size, [150] * size, [waiting] * size)


def each_collective(group: Any) -> None:
    for number, name in enumerate(COLLECTIVES):
        call = COLLECTIVES[name](group, number, 70, number)
        call.launch(False)
        call.check((name, group.rank))
    last = dist.new_group([0, group.size - 1])
    if isinstance(last, dist.ProcessGroup):
        last.barrier()


@pytest.mark.slow
def test_as_many_ranks_as_a_host_takes_stay_right() -> None:
    with Ranks(64, timeout=60.0) as ranks:
        ranks.run(each_collective)


@pytest.mark.long
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("waiting", WAITING)
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_mixed_traffic_stays_right_for_long(kind: Any, size: int, waiting: str) -> None:
    with Ranks(size, kind, timeout=60.0) as ranks:
        for seed in range(100, 130):
            ranks.run(campaign, [seed] * size, [200] * size, [waiting] * size)


# -- removed waits: without a wait, a rank reads too early or writes too soon ----------------------

_usleep = types.ExternalFunction("usleep", types.int32(types.uint32))


@cfunc("void(int64, int64, int64, int64)")
def rest(dst: int, src: int, microseconds: int, nbytes: int) -> None:
    _usleep(microseconds)


PAUSE = Kernel("PAUSE", DType.UINT8)


def address_of(kernel: Kernel) -> int:
    return int(rest.address) if kernel is PAUSE else resolve(kernel)


class Tampering(threading.local):
    """The change of this thread's programs: a wait taken out, pauses put in."""

    without: int | None = None
    slow: random.Random | None = None
    waits: Sequence[int] = ()


tampering = Tampering()


def with_pauses(program: Program, rng: random.Random) -> Program:
    """The program with a rest before most of its steps; loops take theirs along."""
    steps: list[Step] = []
    places: list[int] = []
    for step in program.steps:
        places.append(len(steps))
        if rng.random() < 0.7:
            here, rest_for = staging(0), rng.choice((50, 500, 1500))
            steps.append(Step(StepKind.APPLY, dst=here, src=here, kernel=PAUSE, arg=rest_for))
        back = len(steps) - places[len(places) - 1 - step.back] if step.back else 0
        steps.append(replace(step, back=back))
    places.append(len(steps))
    for number, step in enumerate(program.steps):
        if step.skip:
            here = places[number + 1] - 1
            skip = places[number + 1 + step.skip] - here - 1
            steps[here] = replace(steps[here], skip=skip)
    return replace(program, steps=tuple(steps))


def guards(program: Program) -> list[int]:
    """The steps that wait for more than to compare calls."""
    kinds = {StepKind.WAIT, StepKind.WAIT_ALL, StepKind.FREE}
    if (program.call.op, program.call.root) != ("broadcast", VICTIM):
        kinds.add(StepKind.MEET_ALL)  # a broadcasting root only waits there to compare
    found = [index for index, step in enumerate(program.steps) if step.kind in kinds]
    ways = [index for index, step in enumerate(program.steps) if step.kind is StepKind.JUMP]
    if ways:
        # These arrays are not registered: they go over staging, which are free, as all ranks
        # have met in this program.
        later = [i for i in found if i > ways[0] and program.steps[i].kind is not StepKind.FREE]
        found = [0, *later]
    if program.call.op == "scatter":
        # A receiver needs the root; words of the other ranks are of no use to it, and harmless.
        steps = program.steps
        found = [
            i
            for i in found
            if steps[i].kind is not StepKind.WAIT or steps[i + 1].kind is StepKind.COPY
        ]
    return found


def linked(programs: ProgramCache, request: LoweredOp) -> Linked:
    """Stand in for ProgramCache.linked: tamper with this thread's programs, and remember none."""
    program = request.build()
    tampering.waits = guards(program)
    if tampering.without is not None:
        program = without(program, tampering.without)
    if tampering.slow is not None:
        program = with_pauses(program, tampering.slow)
    return link(program, programs.shape.size, at.C_TABLES, address_of)


VICTIM = 1
COUNT = 12_000  # several rounds of a small group's staging buffer


arrived: Counter[tuple[str, int, int]] = Counter()


def mixture(group: Any, name: str, root: int, index: int | None, seed: int) -> Sequence[int]:
    """A call of `name`, on the victim without a wait, among others, with a slow rank.

    Returns the waits of the victim's program.
    """
    others = [rank for rank in range(group.size) if rank != VICTIM]
    tampering.slow = random.Random(seed) if group.rank == others[seed % len(others)] else None
    # A broadcast of two rounds: its slowest leaf may still be in the first when the others
    # begin the next program. The first FREE of a program prevents that.
    away = (VICTIM + 1) % group.size
    before = [("all_gather", 300, 0), ("broadcast", 5000, VICTIM if seed % 4 < 2 else away)]
    after = [(name, COUNT, root), ("broadcast", 300, away), ("all_gather", 300, 0)]
    plan = enumerate([*before, (name, COUNT, root), *after])
    made = [COLLECTIVES[call](group, 100 * seed + i, count, to) for i, (call, count, to) in plan]
    waits: Sequence[int] = ()
    for place, call in enumerate(made):
        victim = place == len(before) and group.rank == VICTIM
        tampering.without = index if victim else None
        arrived[group.name, seed, place] += 1
        call.launch(False)
        waits = tampering.waits if victim else waits
        call.check((name, place, seed))
        if name == "barrier" and place == len(before):
            assert arrived[group.name, seed, place] == group.size, "left before all had come"
    return waits


def trial(
    world: Any, name: str, root: int, index: int | None, seeds: int
) -> tuple[str | None, Sequence[int]]:
    """Run mixtures on three ranks until a result is wrong; return it and the victim's waits."""
    group = dist.new_group(range(world.size - 1), timeout=2.0)
    if not isinstance(group, dist.ProcessGroup):
        return None, ()
    waits: Sequence[int] = ()
    try:
        for seed in range(seeds):
            waits = mixture(group, name, root, index, seed)
    except (AssertionError, DistError) as error:
        group.abort("noticed")
        return f"{type(error).__name__}: {error}", waits
    finally:
        tampering.without = tampering.slow = None
        dist.destroy_process_group(group)
    return None, waits


@pytest.fixture(scope="module")
def world() -> Iterator[Ranks]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProgramCache, "linked", linked)
        patch.setattr(formation, "LARGE_STAGING_GROUPS", 1)  # the world's: trials are on small ones
        patch.setattr(PreparedCache, "remember", lambda *_: None)
        patch.setattr(context, "access_to", lambda _: 0)  # the staging buffers are tampered with
        with Ranks(4) as ranks:
            yield ranks


@pytest.mark.parametrize("root", [0, pytest.param(VICTIM, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_removing_any_single_wait_makes_results_wrong(world: Ranks, name: str, root: int) -> None:
    def tried(index: int | None, seeds: int) -> list[tuple[str | None, Sequence[int]]]:
        return world.run(trial, *([value] * 4 for value in (name, root, index, seeds)))

    whole = tried(None, 4)
    assert not any(noticed for noticed, _ in whole), whole
    for index in whole[VICTIM][1]:
        outcomes = tried(index, 40)
        assert any(noticed for noticed, _ in outcomes), f"nobody noticed step {index}"
