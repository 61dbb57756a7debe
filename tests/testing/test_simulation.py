"""Protocols in virtual time: laws hold under any delays, and runs find planted bugs."""

import math
import os
import time

import pytest

import simulation
from nc10d.base.deadline import NEVER
from nc10d.base.signal_errors import Condition
from nc10d.testing.simulated.virtual_time import RankTask
from simulation.__main__ import main
from simulation.bugs import BUGS, BrokenBug, Bug, BugTargetMissing, hunt
from simulation.clock import NoProgress, Simulation
from simulation.network import Network, Weather

MILLION = int(os.environ.get("NC10D_SCHEDULES", "1000000"))
SLICES = 20


def play_all(seeds: range) -> None:
    for seed in seeds:
        simulation.run(seed)


@pytest.mark.parametrize(
    ("begin", "end"), [(0, 250), pytest.param(250, 2000, marks=pytest.mark.slow)]
)
def test_every_schedule_keeps_its_laws(begin: int, end: int) -> None:
    play_all(range(begin, end))


@pytest.mark.long
@pytest.mark.parametrize("part", range(SLICES))
def test_a_million_schedules_keep_their_laws(part: int) -> None:
    count = MILLION // SLICES
    play_all(range(10_000 + part * count, 10_000 + (part + 1) * count))


@pytest.mark.parametrize("seed", range(len(simulation.SCENARIOS)))
def test_a_seed_plays_the_same_every_time(seed: int) -> None:
    first, second = (simulation.run(seed, verbose=True).trace for _ in range(2))
    assert first == second


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "missing wake-up",
        "skipped HMAC of frames",
        "own list of survivors",
        "first coordinator decides alone",
        "names not compared",
    ],
)
def test_a_bug_is_found_and_its_seed_finds_it_again(name: str) -> None:
    found = hunt(BUGS[name], 12_000)
    assert found is not None, f"nothing found {name!r}"
    assert str(found.seed) in str(found)
    with BUGS[name].present(), pytest.raises(simulation.Failure, match=str(found.seed)):
        simulation.run(found.seed)
    simulation.run(found.seed)  # without the bug, the law holds


@pytest.mark.long
def test_all_seeded_bugs_are_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(BUGS) >= 30
    begin = time.process_time()
    assert main(["--bugs", "--count", "50000"]) == 0
    with capsys.disabled():
        print(capsys.readouterr().out, f"{time.process_time() - begin:.0f} s of CPU in all")


def test_a_seed_is_replayed_with_its_trace(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["7"]) == 0
    output = capsys.readouterr().out
    assert output.startswith("seed 7: group formation")
    assert "rank 0: COMPARE_SET" in output or "rank 0: ADD" in output
    assert main(["0", "--bug", "missing wake-up"]) == 1
    assert "python -m simulation 0" in capsys.readouterr().out


def test_a_wait_that_nothing_ends_is_no_progress() -> None:
    sim = Simulation(1)
    sim.start("rank 0", lambda: Condition().until(lambda: None, NEVER))
    with pytest.raises(NoProgress, match="nothing will ever come"):
        sim.run()


def test_a_wait_beyond_the_bound_of_virtual_time_is_no_progress() -> None:
    sim = Simulation(1, bound=2.0)
    sim.start("rank 0", lambda: sim.sleep(1.0))
    late = sim.start("rank 1", lambda: sim.sleep(3.0))
    with pytest.raises(NoProgress, match=r"\['rank 1'\] still wait after 2 virtual seconds"):
        sim.run()
    assert late.ended_at == 2.0


def test_an_event_that_raises_ends_the_run() -> None:
    def happen() -> None:
        raise ValueError("an event")

    sim = Simulation(1)
    asleep: list[RankTask] = []
    rank = sim.start("rank 0", lambda: sim.wait(lambda: False, math.inf, asleep))
    sim.after(1.0, happen)
    with pytest.raises(ValueError, match="an event"):
        sim.run()
    assert rank.ended_at == 1.0


def test_a_rank_that_is_killed_ends_where_it_waits_also_if_it_is_stopped() -> None:
    ended: list[float] = []

    def body() -> None:
        try:
            sim.sleep(10.0)
        finally:
            ended.append(sim.now)

    sim = Simulation(1)
    actor = sim.start("rank 0", body)
    sim.after(1.0, lambda: actor.pause(100.0))
    sim.after(2.0, actor.kill)
    sim.run()
    assert ended == [2.0]
    assert actor.dead
    assert actor.error is None


def test_a_stream_brings_everything_once_and_in_order() -> None:
    sim = Simulation(5)
    net = Network(sim, Weather(delay=0.01, lost=0.1, pieces=True, room=600))
    near, far = net.stream("a", "b")
    sent, got = bytes(range(256)) * 40, bytearray()

    def send() -> None:
        rest = sent
        while rest:
            try:
                rest = rest[near.send(rest) :]
            except BlockingIOError:
                sim.wait(near.writable, sim.end, near.changed)
        near.close()

    def take() -> None:
        while True:
            try:
                data = far.recv(1000)
            except BlockingIOError:
                sim.wait(far.readable, sim.end, far.changed)
                continue
            if not data:
                return
            got.extend(data)

    sim.start("a", send)
    sim.start("b", take)
    sim.run()
    assert bytes(got) == sent


def test_every_seeded_bug_has_a_target_in_the_product() -> None:
    for bug in BUGS.values():
        bug.resolve()


@pytest.mark.parametrize(
    "target", ["store.no_module:Table._set", "store.table:NoTable._set", "store.table:Table.none"]
)
def test_a_bug_without_a_target_is_an_error(target: str) -> None:
    with (
        pytest.raises(BugTargetMissing, match=target),
        Bug(target, lambda real: real, ()).present(),
    ):
        pass


@pytest.mark.slow
def test_every_seeded_bug_fits_the_product() -> None:
    for bug in BUGS.values():
        hunt(bug, 130)  # BrokenBug if it does not; few schedules do not find every bug


def test_a_bug_that_raises_an_error_of_its_own_is_not_found() -> None:
    wrong_arity = Bug("store.table:Table._set", lambda real: lambda: None, ("store calls",))
    with pytest.raises(BrokenBug, match="raises TypeError"):
        hunt(wrong_arity, 100)


def test_a_bug_is_removed_from_the_product_afterwards() -> None:
    from nc10d.store.table import Table

    before = Table._set
    with Bug("store.table:Table._set", lambda real: None, ()).present():
        assert Table._set is not before
    assert Table._set is before
