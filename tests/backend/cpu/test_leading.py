"""Small broadcasts: the root goes on before the others come, and mistakes still come to light."""

from __future__ import annotations

import random
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from algorithm_cases import all_reduce, barrier, broadcast, layouts

import nc10d as dist
from nc10d.backend.cpu.engine.call_sites import text_at
from nc10d.backend.cpu.native.offsets import AHEAD_RING, MOST_AHEAD, RECORD_RING
from nc10d.backend.cpu.program.program import Program, Step, StepKind
from nc10d.errors import CollectiveMismatch, DistError
from nc10d.testing.race_simulator.simulator import Disagreement, SimulatedWorld
from nc10d.testing.ranks import Ranks

LINE = re.escape(text_at(__file__, 0).removesuffix(":0")) + r":\d+"


def small(value: float, count: int = 2, dtype: Any = np.float64) -> Any:
    return np.full(count, value, dtype)


def test_a_call_that_a_root_is_ahead_of_is_still_on_record() -> None:
    assert 2 * MOST_AHEAD < RECORD_RING
    assert 2 * MOST_AHEAD <= AHEAD_RING


def lead_alone(group: Any, gates: list[threading.Event]) -> list[float]:
    """Rank 0 leads as far as it may before anybody else calls anything."""
    led, stuck = gates
    got = []
    if group.rank == 0:
        for number in range(MOST_AHEAD):
            group.broadcast(small(number), 0)
        led.set()
        work = group.broadcast(small(MOST_AHEAD), 0, async_op=True)
        assert not work.is_completed(), "so far ahead a root may not be"
        stuck.set()
        work.wait()
    else:
        assert led.wait(60)
        assert stuck.wait(60)
        for _ in range(MOST_AHEAD + 1):
            x = small(-1)
            group.broadcast(x, 0)
            got.append(float(x[0]))
    group.barrier()
    return got


@pytest.mark.parametrize("size", [2, 3])
def test_a_root_goes_on_before_the_others_come_but_not_too_far(size: int) -> None:
    with Ranks(size) as ranks:
        ranks.run(lambda group: group.barrier())
        gates = [threading.Event(), threading.Event()]
        got = ranks.run(lead_alone, [gates] * size)
    assert got[1:] == [list(range(MOST_AHEAD + 1))] * (size - 1)


def in_turns(group: Any, seed: int) -> None:
    """Broadcasts from changing roots among other calls; each has its own values."""
    rng = random.Random(seed)
    for number in range(400):
        root, count, what = rng.randrange(group.size), rng.randint(1, 4), rng.randrange(8)
        x = np.full(count, group.rank * 1000 + number, np.int32)
        group.broadcast(x, root)
        assert (x == root * 1000 + number).all(), (number, x)
        if what == 0:
            group.barrier()
        elif what == 1:
            y = np.full(3, group.rank)
            group.all_reduce(y)
            assert (y == sum(range(group.size))).all()
        elif what == 2:
            y = np.full(50, group.rank)
            group.broadcast(y, root, async_op=True).wait()
            assert (y == root).all()


@pytest.mark.parametrize("size", [2, 3, 5])
def test_led_calls_mix_with_all_others(size: int) -> None:
    with Ranks(size) as ranks:
        for seed in range(3):
            ranks.run(in_turns, [seed] * size)


Call = Callable[[Any, Any], object]
LED: Call = lambda g, x: g.broadcast(x, 0)  # noqa: E731
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


USUAL = "itself", 0  # what all others call


def mistaken(group: Any, name: str, odd: int, ahead: int) -> tuple[DistError, Any]:
    """After some good calls the `odd` rank makes another one than the others do."""
    x = small(group.rank)
    try:
        for number in range(ahead):
            group.broadcast(small(number), 0)
        (MISTAKES[name] if group.rank == odd else LED)(group, x)
        for _ in range(3):
            group.barrier()
    except DistError as error:
        return error, x
    raise AssertionError(f"rank {group.rank} noticed nothing")


CASES = [(name, odd, 0) for name in MISTAKES for odd in (0, 2) if (name, odd) != USUAL]
CASES += [(name, 2, 2 * MOST_AHEAD + 1) for name in ("root", "itself", "dtype", "operation")]


@pytest.mark.parametrize(("name", "odd", "ahead"), CASES)
def test_a_call_that_differs_from_a_led_one_is_an_error_on_every_rank(
    name: str, odd: int, ahead: int
) -> None:
    with Ranks(3, timeout=40.0) as ranks:
        ranks.run(lambda group: group.barrier())
        errors = ranks.run(mistaken, [name] * 3, [odd] * 3, [ahead] * 3)
    assert len({str(error) for error, _ in errors}) == 1, "one root cause everywhere"
    for error, _ in errors:
        assert isinstance(error, CollectiveMismatch), error
        assert error.seq == ahead + 2, error
        assert f"#{ahead + 2} of group" in str(error)
        assert len(set(re.findall(LINE, str(error)))) == 2, error
    for rank, (_, x) in enumerate(errors):
        followed = odd != 0 and rank not in (0, odd)
        assert (x == rank).all() or (followed and (x == 0).all()), "rank 1 followed rank 0"


def in_a_circle(group: Any) -> DistError:
    """Rank 1 follows rank 0, which waits for a message that rank 1 would send afterwards."""
    x = small(group.rank)
    try:
        if group.rank == 0:
            group.recv(x, 1)
        group.broadcast(x, 0)
        if group.rank == 1:
            group.send(x, 0)
        group.barrier()
    except DistError as error:
        return error
    raise AssertionError("there was no circle")


def test_who_waits_for_a_root_that_waits_for_it_is_told() -> None:
    with Ranks(2, kind="processes", timeout=40.0) as ranks:
        errors = ranks.run(in_a_circle)
    assert len({str(error) for error in errors}) == 1
    assert isinstance(errors[0], CollectiveMismatch), errors[0]
    assert "wait for each other in a circle" in str(errors[0])


def far_ahead(group: Any) -> float:
    """Rank 0 is held up at its limit when rank 1 begins, which then needs a message of it."""
    x, areas = small(group.rank), group.backend("cpu").group.memory
    begun, _ = areas.last_record(group.rank)
    calls = [lambda: group.broadcast(small(1), 0)] * (MOST_AHEAD + 1)
    if group.rank == 0:
        for call in calls:
            call()
        group.send(x + 5, 1)
    else:
        while areas.last_record(0)[0] <= begun + MOST_AHEAD:
            pass
        calls[0]()
        group.recv(x, 0)
        for call in calls[1:]:
            call()
    return float(x[0])


def test_a_root_at_its_limit_accuses_nobody_who_may_go_on() -> None:
    with Ranks(2, kind="processes", timeout=40.0) as ranks:
        ranks.run(met)
        for _ in range(5):
            assert ranks.run(far_ahead) == [0.0, 5.0]


def met(group: Any) -> None:
    group.barrier()


GOING = """
import os, sys
import numpy as np
import nc10d as dist

dist.init_process_group()
rank = dist.get_rank()
x = np.full(2, 7.0 if rank == 0 else 0.0)
dist.barrier()
while rank == 1 and os.path.exists(sys.argv[1]):
    pass
dist.broadcast(x, 0)
dist.destroy_process_group()
if rank == 0:
    os.remove(sys.argv[1])
assert (x == 7).all()
"""


def test_what_a_root_has_shown_outlives_its_group(tmp_path: Path) -> None:
    script, mark = tmp_path / "going.py", tmp_path / "mark"
    script.write_text(GOING)
    mark.touch()
    command = [sys.executable, "-m", "nc10d.run", "--nproc-per-node", "2", str(script), str(mark)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def without(program: Program, kind: StepKind) -> Program:
    """The program without its waits of a kind."""
    idle = Step(StepKind.WAIT, tick=-(10**9))
    steps = tuple(idle if step.kind is kind else step for step in program.steps)
    return Program(program.call, steps, program.users)


def play(size: int, seed: int, kind: StepKind | None, rank: int) -> None:
    """Many led rounds with one rank in no hurry; maybe with some of a rank's waits left out."""
    world = layouts(size, 1024, 256)
    sim = SimulatedWorld(size, 1024)
    cases = [broadcast(world, 1 + i % 2, 0) for i in range(3 * AHEAD_RING)]
    cases += [barrier(world, 0, 0), all_reduce(world, 3, 4)]
    for case in cases:
        for r in range(size):
            program = case.programs[r]
            if kind is not None and r == rank:
                program = without(program, kind)
            sim.submit(r, program, [a.view(np.uint8) for a in case.arrays[r]])
    rng = random.Random(seed)
    # Mostly the first that may go on does: who is last in the list falls far behind.
    sim.run(lambda count: 0 if rng.random() < 0.9 else rng.randrange(count))
    for case in cases:
        for got, want in zip(case.arrays, case.expected, strict=True):
            for one, other in zip(got, want, strict=True):
                np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(("kind", "rank"), [(StepKind.WAITALL, 0), (StepKind.WAIT, 1)])
def test_led_rounds_are_ordered_and_need_each_wait(size: int, kind: StepKind, rank: int) -> None:
    for seed in range(5):
        play(size, seed, None, 0)
    assert any(caught(size, seed, kind, rank) for seed in range(40))


def caught(size: int, seed: int, kind: StepKind, rank: int) -> bool:
    try:
        play(size, seed, kind, rank)
    except AssertionError:  # a race, a disagreement, or a wrong element
        return True
    return False


@pytest.mark.parametrize("roots", [(0, 1), (1, 2)])
def test_two_that_lead_in_one_round_notice_in_any_interleaving(roots: tuple[int, int]) -> None:
    for seed in range(10):
        world, sim = layouts(3, 1024, 256), SimulatedWorld(3, 1024)
        for _ in range(MOST_AHEAD):
            for case in (broadcast(world, 1, 0), broadcast(world, 2, 1)):
                for rank in range(3):
                    sim.submit(rank, case.programs[rank], [case.arrays[rank][0].view(np.uint8)])
        one, other = (broadcast(world, 1, root) for root in roots)
        last = barrier(world, 0, 0)
        for rank in range(3):
            case = other if rank == roots[1] else one
            sim.submit(rank, case.programs[rank], [case.arrays[rank][0].view(np.uint8)])
            sim.submit(rank, last.programs[rank], [])
        with pytest.raises(Disagreement, match="both led"):
            sim.run(random.Random(seed).randrange)


def test_dist_says_how_far_a_root_may_go() -> None:
    assert f"{MOST_AHEAD} calls before" in (dist.broadcast.__doc__ or "")
