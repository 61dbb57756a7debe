"""The cost model agrees with the simulator, obeys its constants, and is restored from its file."""

from __future__ import annotations

import dataclasses
import json
import random
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from timed_simulator import simulated

from benchmarks.model import machine as machines
from benchmarks.model import predict
from benchmarks.model.calibrate import by_reach
from benchmarks.model.collective_programs import MAKERS, Collective, layout_of, spread
from benchmarks.model.machine import DEVELOPMENT, Machine, Uses, at_reach, changed
from benchmarks.model.measurements import Round, TimedCall, constants, typical
from benchmarks.model.memory_rates import Passes
from benchmarks.model.model import algorithm, seconds, standing_for, switches
from benchmarks.model.timed_walk import Walk
from nc10d.arrays.call_info import CallInfo
from nc10d.backend.cpu.algorithms.group_shape import DEFAULTS, NEVER, Thresholds, Topology, grouped
from nc10d.backend.cpu.engine.cpu_policy import FAST_STAGING
from nc10d.backend.cpu.native.offsets import READS
from nc10d.backend.cpu.program.program import Combine, Kernel, Program, Step, staging, user
from nc10d.backend.cpu.program.steps import copy, expose, fetch, flow, fold_staged, give, push, take
from nc10d.testing.hosts.namespaces import why_not

REASON = why_not()
PLAIN = dataclasses.replace(DEVELOPMENT, calls={"": 1e-6})
RICH = changed(changed(changed(PLAIN, "rooted=2e-10"), "third=3e-10"), "unread=4e-10")
PUTS = Uses(frozenset(), puts=True)
SMALL_SLOT = 4096


def walk_all(machine: Machine, op: str, nbytes: int, hosts: Topology, slot: int) -> float:
    """Return when the last rank has completed its call."""
    collective = Collective(op, nbytes, layout_of(hosts, slot))
    programs = {rank: collective.program(rank) for rank in range(hosts.size)}
    walk = Walk(machine, hosts, programs, collective.arrays)
    walk.run()
    return max(ends[-1] for ends in walk.ends.values())


@settings(max_examples=40, deadline=None)
@given(
    op=st.sampled_from(sorted(MAKERS)),
    nbytes=st.sampled_from([4, 64, 1000, 4096, 20000, 100_000]),
    names=st.lists(st.integers(0, 2), min_size=2, max_size=6),
)
@example(op="all_reduce", nbytes=100_000, names=[0, 0])  # arrays are read in place
@example(op="all_reduce", nbytes=1 << 20, names=[0, 0])  # arrays are exposed
@example(op="broadcast", nbytes=100_000, names=[0, 0])  # each rank exposes a part
@example(op="broadcast", nbytes=4 << 20, names=[0, 0, 0])  # the same with three ranks
@example(op="all_gather", nbytes=1 << 20, names=[0, 0])  # ranks write into each other's arrays
@example(op="all_reduce", nbytes=4 << 20, names=[0, 0, 1, 1])  # also inside hosts
@example(op="broadcast", nbytes=4 << 20, names=[0, 0, 1, 1])
@example(op="all_gather", nbytes=4 << 20, names=[0, 0, 1, 1])
@example(op="reduce_scatter", nbytes=4 << 20, names=[0, 0, 1, 1])
def test_clocks_and_the_simulator_tell_the_same_time(
    op: str, nbytes: int, names: list[int]
) -> None:
    hosts = grouped(names)
    collective = Collective(op, nbytes // 4 * 4, layout_of(hosts, SMALL_SLOT))
    walked = walk_all(RICH, op, nbytes // 4 * 4, hosts, SMALL_SLOT)
    assert walked == pytest.approx(simulated(RICH, collective), rel=1e-9)


@pytest.mark.parametrize("op", ["all_reduce", "reduce", "broadcast", "reduce_scatter"])
@pytest.mark.parametrize("names", ["ab", "abc"])
def test_clocks_and_the_simulator_agree_on_segmented_messages(op: str, names: str) -> None:
    hosts = grouped(names)
    collective = Collective(op, 3 << 20, layout_of(hosts))
    walked = walk_all(PLAIN, op, 3 << 20, hosts, collective.layout.slot_bytes)
    assert walked == pytest.approx(simulated(PLAIN, collective), rel=1e-9)


@pytest.mark.parametrize("op", ["all_reduce", "broadcast", "all_to_all"])
@pytest.mark.parametrize("nbytes", [4096, 1 << 20])
def test_model_and_simulator_agree_on_a_shared_network(op: str, nbytes: int) -> None:
    hosts = spread(6, 2)
    narrow = changed(PLAIN, "shared=3e-10")
    collective = Collective(op, nbytes, layout_of(hosts))
    walked = walk_all(narrow, op, nbytes, hosts, collective.layout.slot_bytes)
    assert walked == pytest.approx(simulated(narrow, collective), rel=1e-9)
    assert walked >= walk_all(PLAIN, op, nbytes, hosts, collective.layout.slot_bytes)


LARGE = [
    ("all_reduce", 256, 512),
    ("all_reduce", 64 << 10, 96),
    pytest.param("all_reduce", 64 << 10, 512, marks=pytest.mark.long),
    pytest.param("reduce_scatter", 64 << 10, 512, marks=pytest.mark.long),
    ("reduce_scatter", 64 << 10, 64),
    ("all_gather", 64 << 10, 64),
    ("all_to_all", 64 << 10, 64),
    ("broadcast", 256, 512),
    ("broadcast", 64 << 10, 512),
    ("broadcast", 512 << 10, 32),  # along a chain
    ("broadcast", 4 << 20, 32),  # and arrays are read in place
    ("all_reduce", 4 << 20, 32),
    ("barrier", 4, 512),
]


@pytest.mark.parametrize(("op", "nbytes", "size"), LARGE)
def test_a_few_ranks_stand_for_all(op: str, nbytes: int, size: int) -> None:
    hosts = spread(size)
    collective = Collective(op, nbytes, layout_of(hosts))
    programs = {rank: collective.program(rank) for rank in standing_for(op, nbytes, hosts)}
    walk = Walk(PLAIN, hosts, programs, collective.arrays)
    walk.run()
    predicted = max(ends[-1] for ends in walk.ends.values())
    assert predicted == pytest.approx(simulated(PLAIN, collective), rel=0.05)


def test_a_twice_as_slow_machine_takes_twice_as_long() -> None:
    numbers = ("step", "wait", "hop", "send")
    slow = dataclasses.replace(
        PLAIN,
        calls={"": 2e-6},
        **{name: 2 * getattr(PLAIN, name) for name in numbers},
        **{
            name: tuple((reach, 2 * rate) for reach, rate in getattr(PLAIN, name))
            for name in machines.CURVES
        },
    )
    for op in MAKERS:
        for hosts in (spread(2), spread(8), spread(12, 4)):
            one, two = (seconds(m, op, 1 << 16, hosts) for m in (PLAIN, slow))
            assert two == pytest.approx(2 * one)


@pytest.mark.parametrize("constant", ["call", "wait", "hop", "stream", "put", "get", "fold"])
def test_every_constant_counts(constant: str) -> None:
    hosts = spread(4, 2)
    dearer = changed(PLAIN, f"{constant}=0.1")
    assert seconds(dearer, "all_reduce", 1 << 20, hosts) > 10 * seconds(
        PLAIN, "all_reduce", 1 << 20, hosts
    )


def test_bytes_that_fill_an_exposed_array_have_a_separate_rate() -> None:
    dear = changed(PLAIN, "fill=0.1")
    for op, nbytes in (("all_gather", 1 << 20), ("broadcast", 100_000)):
        plain, filled = ([seconds(m, op, nbytes, spread(n)) for n in (2, 3)] for m in (PLAIN, dear))
        assert filled[0] > 10 * plain[0]
        assert filled[1] == plain[1]


def test_large_arrays_of_many_hosts_go_by_rails() -> None:
    staged = dataclasses.replace(PLAIN, kernel=(), written=())
    names = [algorithm(staged, "all_reduce", n, spread(128)) for n in (4096, 4 << 20)]
    assert names == ["leaders, in one shot", "rails between hosts"]


def test_plain_arrays_go_over_staging_buffers_up_to_the_thresholds() -> None:
    fast = dataclasses.replace(PLAIN, thresholds=FAST_STAGING)
    kernel = algorithm(PLAIN, "all_reduce", 1 << 20, spread(2))
    assert kernel == "peers' arrays, by the kernel"
    for op, ranks, staged, by_kernel in (
        ("all_reduce", 2, 16 << 20, 32 << 20),
        ("broadcast", 2, 64 << 20, NEVER),
        ("broadcast", 4, 64 << 20, NEVER),
        ("reduce_scatter", 2, 16 << 20, 32 << 20),
        ("reduce_scatter", 4, 16 << 20, 32 << 20),
        ("all_gather", 2, 16 << 20, 32 << 20),
        ("all_gather", 4, 64 << 20, NEVER),
        ("all_to_all", 4, 16 << 20, 32 << 20),
    ):
        host = spread(ranks)
        assert algorithm(PLAIN, op, staged, host) == kernel, (op, ranks)
        assert algorithm(fast, op, staged, host) != kernel, (op, ranks)
        if by_kernel != NEVER:
            assert algorithm(fast, op, by_kernel, host) == kernel, (op, ranks)
    apart = {algorithm(m, "all_reduce", 16 << 20, spread(16)) for m in (PLAIN, fast)}
    assert len(apart) == 1, "hosts must not differ"


def test_a_busy_core_does_not_send() -> None:
    """Rank 0 pushes 100 bytes, copies for 7 seconds, and gives; rank 1 takes them meanwhile."""
    place = user(0)
    steps = {
        0: [*flow([push(1, place, 100)]), copy(place, place, 100), *flow([give(1, place, 100)])],
        1: flow([take(0, place, 100)]),
    }
    programs = {rank: Program(CallInfo("x"), tuple(some), 1) for rank, some in steps.items()}
    flat = Machine({"": 0.0}, 0.0, 0.0, 0.0, 0.0, *(((1, rate),) for rate in (0, 0, 0, 0.07, 1)))
    walk = Walk(flat, spread(2, 1), programs, 1.0)
    walk.run()
    assert walk.ends == {0: [pytest.approx(107)], 1: [pytest.approx(107)]}


def test_bytes_in_a_single_direction_have_a_separate_rate() -> None:
    apart = changed(PLAIN, "one_way=0.1")
    times = {op: [seconds(m, op, 1 << 20, spread(4, 2)) for m in (PLAIN, apart)] for op in MAKERS}
    assert times["broadcast"][1] > 10 * times["broadcast"][0]
    assert times["all_reduce"][1] == times["all_reduce"][0]
    assert changed(apart, "stream=3e-9").one_way == ()


def test_transfers_through_a_shared_network_take_turns() -> None:
    """Two hosts send 100 bytes each, a second a byte; their shared network takes 0.8 s a byte."""
    rates = [((1, rate),) for rate in (0, 0, 0, 0, 1)]
    flat = Machine({"": 0.0}, 0.0, 0.0, 0.0, 0.0, *rates, shared=((1, 0.8),))
    steps = {
        rank: flow([give(1 - rank, user(0), 100), take(1 - rank, user(0), 100)]) for rank in (0, 1)
    }
    programs = {rank: Program(CallInfo("x"), tuple(some), 1) for rank, some in steps.items()}
    walk = Walk(flat, spread(2, 1), programs, 1.0)
    walk.run()
    assert walk.ends == {0: [pytest.approx(160)], 1: [pytest.approx(160)]}


def test_a_shared_network_needs_the_times_of_all_ranks() -> None:
    """In a chain of hosts all links are busy at once, though a single path represents all."""
    narrow = changed(PLAIN, "shared=1e-9")
    for op, links in (("broadcast", 7), ("reduce_scatter", 7)):
        shared = links * (1 << 20) * 1e-9
        assert (
            seconds(narrow, op, 1 << 20, spread(8, 1))
            > shared
            > seconds(PLAIN, op, 1 << 20, spread(8, 1))
        )


def test_folds_of_the_ranks_own_arrays_have_a_separate_rate() -> None:
    dear = changed(PLAIN, "pair=1e-6")
    across, inside = (
        [seconds(m, "reduce_scatter", 1 << 20, hosts) for m in (PLAIN, dear)]
        for hosts in (spread(2, 1), spread(2))
    )
    assert across[1] > 10 * across[0]
    assert inside[1] == inside[0]


@pytest.mark.parametrize("ranks", [3, 4, 8, 16, 64])
def test_the_one_shot_threshold_is_near_the_models_optimum(ranks: int) -> None:
    hosts = spread(ranks, ranks)
    (switch,) = (
        one
        for one in switches(DEVELOPMENT, "all_reduce", hosts, (64, 8192))
        if one.before == "staging"
    )
    assert 0.8 < switch.below / switch.above < 2.0


def test_two_ranks_take_the_time_computed_by_hand() -> None:
    rates = [((1, rate),) for rate in (2, 3, 5, 7, 11)]
    flat = Machine({"": 1.0}, 0.0, 0.5, 0.0, 0.0, *rates)
    # 1 for the call, 64 bytes put at 2 and folded at 5, and half a second for the signal.
    assert seconds(flat, "all_reduce", 64, spread(2)) == pytest.approx(1 + 128 + 320 + 0.5)


def test_a_long_step_goes_at_the_rate_of_a_long_reach() -> None:
    short, long = (changed(PLAIN, f"kernel={rate}") for rate in (4e-6, 1e-6))
    steep = dataclasses.replace(PLAIN, kernel=((1 << 14, 4e-6), (1 << 16, 1e-6)))
    step = fetch(user(0), 0, 0, 1 << 15)
    for reach in (0, 1 << 20):
        assert steep.price(step, 1 << 15, 0, 2, reach, PUTS) == long.price(
            step, 1 << 15, 0, 2, reach, PUTS
        )
    assert steep.price(step, 1 << 13, 0, 2, 0, PUTS) == short.price(step, 1 << 13, 0, 2, 0, PUTS)


@given(st.floats(1, 1e9), st.integers(1, 30), st.integers(0, 2**31))
def test_a_rate_lies_between_those_of_its_neighbours(reach: float, knots: int, seed: int) -> None:
    rng = random.Random(seed)
    places = sorted(rng.sample(range(1, 1000), knots))
    curve = tuple((place**3, rng.random()) for place in places)
    near = [rate for place, rate in curve if place >= reach][:1]
    near += [rate for place, rate in curve if place <= reach][-1:]
    assert min(near) - 1e-9 <= at_reach(curve, reach) <= max(near) + 1e-9


def test_constants_come_back_from_their_file(tmp_path: Path) -> None:
    given_ = changed(changed(DEVELOPMENT, "wait=3e-7"), "kernel=1e-10")
    given_ = dataclasses.replace(changed(given_, "also=2e-10"), thresholds=FAST_STAGING)
    machines.save(given_, tmp_path / "machine.json")
    found = machines.load(tmp_path / "machine.json")
    assert found == given_
    assert found.thresholds == FAST_STAGING


@pytest.mark.parametrize(
    ("older", "limits"),
    [
        ({}, DEFAULTS),
        ({"quick": False}, DEFAULTS),
        ({"quick": True}, FAST_STAGING),
        ({"boards": 0}, DEFAULTS),
        ({"boards": 1}, FAST_STAGING),
    ],
)
def test_files_of_older_versions_are_read(
    older: dict[str, int], limits: Thresholds, tmp_path: Path
) -> None:
    path = tmp_path / "machine.json"
    machines.save(DEVELOPMENT, path)
    fields = json.loads(path.read_text())
    del fields["thresholds"], fields["also"], fields["third"], fields["unread"], fields["rooted"]
    path.write_text(json.dumps({**fields, **older}))
    assert machines.load(path) == dataclasses.replace(DEVELOPMENT, thresholds=limits)


def test_a_second_destination_has_a_separate_rate() -> None:
    fold = fold_staged(user(0), staging(0), user(0), 1000, Combine(Kernel("SUM", "float32")))
    shown = dataclasses.replace(fold, also=staging(1))

    def more(machine: Machine) -> float:
        return machine.price(shown, 1000, 1, 2, 1000, PUTS) - machine.price(
            fold, 1000, 1, 2, 1000, PUTS
        )

    assert more(changed(PLAIN, "also=2e-9")) == pytest.approx(2e-6)
    unknown = dataclasses.replace(changed(PLAIN, "copy=3e-9"), also=())
    assert more(unknown) == pytest.approx(3e-6)
    on_staging = dataclasses.replace(shown, dst=staging(1, 1000), also=user(0))
    dear = changed(PLAIN, "also=2e-9")
    twice = dear.price(on_staging, 1000, 1, 2, 1000, PUTS) - dear.price(
        shown, 1000, 1, 2, 1000, PUTS
    )
    assert twice == pytest.approx(2e-6), "what goes into a staging buffer is folded elsewhere first"


def test_a_fold_to_a_third_array_has_a_separate_rate() -> None:
    fold = fold_staged(user(0), staging(0), user(0), 1000, Combine(Kernel("SUM", "float32")))
    third = dataclasses.replace(fold, dst=user(1))
    shown = dataclasses.replace(fold, dst=staging(1, 1000))
    dear = changed(changed(PLAIN, "fold=1e-9"), "third=4e-9")
    uses = Uses.of([fold])

    def more(machine: Machine, step: Step, size: int) -> float:
        price = partial(machine.price, nbytes=1000, rank=0, size=size, reach=1000, uses=uses)
        return price(step) - price(fold)

    # Only a step's first fold writes to the third array; the others find it in the L1 cache.
    assert [more(dear, third, size) for size in (2, 4)] == pytest.approx([3e-6, 3e-6])
    assert more(dataclasses.replace(dear, third=()), third, 2) == 0
    no_copies = changed(dear, "also=0")
    assert more(no_copies, shown, 2) == 0, (
        "what goes into a staging buffer is folded elsewhere first"
    )


def test_bytes_got_into_an_array_that_is_only_written_have_a_separate_rate() -> None:
    get = copy(user(1), staging(1), 1000)
    dear = changed(changed(PLAIN, "get=1e-9"), "unread=3e-9")

    def price(machine: Machine, read: int) -> float:
        uses = Uses(frozenset([read]), puts=True)
        return machine.price(get, 1000, 0, 2, 1000, uses) - machine.step

    assert price(dear, read=0) == pytest.approx(3e-6)
    assert price(dear, read=1) == pytest.approx(1e-6)
    assert price(dataclasses.replace(dear, unread=()), read=0) == pytest.approx(1e-6)


def test_a_rank_that_puts_nothing_gets_at_a_separate_rate() -> None:
    get, put = copy(user(0), staging(1), 1000), copy(staging(0), user(0), 1000)
    machine = changed(changed(PLAIN, "get=3e-9"), "rooted=1e-9")

    def price(machine: Machine, *, puts: bool) -> float:
        uses = Uses(read=frozenset(), puts=puts)
        return machine.price(get, 1000, 0, 2, 1000, uses) - machine.step

    assert price(machine, puts=True) == pytest.approx(3e-6)
    assert price(machine, puts=False) == pytest.approx(1e-6)
    assert price(dataclasses.replace(machine, rooted=()), puts=False) == pytest.approx(3e-6)
    assert Uses.of([get, expose(0, user(0), READS)]) == Uses(frozenset(), puts=False)
    assert Uses.of([get, put]) == Uses(frozenset([0]), puts=True)
    assert Uses.of([dataclasses.replace(get, also=staging(0))]).puts
    # This holds for a broadcast's other ranks, but not for an all_reduce's ranks.
    dear = changed(machine, "rooted=3e-9")
    for op, quicker in (("broadcast", True), ("all_reduce", False)):
        fast, slow = (seconds(one, op, 16 << 10, spread(2, 2)) for one in (machine, dear))
        assert (fast < slow) is quicker, op


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"put": 3}'])
def test_a_file_with_other_contents_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(ValueError, match=r"other\.json"):
        machines.load(tmp_path / "other.json")


@pytest.mark.parametrize("setting", ["wait", "wait=", "wait=-1", "wait=nan", "weight=1", "=1"])
def test_a_setting_that_makes_no_sense_is_refused(setting: str) -> None:
    with pytest.raises(ValueError, match="NAME=SECONDS"):
        changed(DEVELOPMENT, setting)


def test_the_algorithm_changes_at_each_switch() -> None:
    for hosts in (spread(8), spread(64)):
        found = list(switches(PLAIN, "all_reduce", hosts, (4, *predict.SIZES)))
        assert found
        for one in found:
            below = algorithm(PLAIN, "all_reduce", one.nbytes - 4, hosts)
            there = algorithm(PLAIN, "all_reduce", one.nbytes, hosts)
            assert (below, there) == (one.before, one.after)


def test_predictions_are_compared_within_each_round() -> None:
    cell = TimedCall("all_reduce", 4096)
    rounds = []
    for slower in (1.0, 5.0, 2.0):
        sample = sample_of(PLAIN, slower)
        predicted = seconds(constants([Round(sample, {})]), cell.op, cell.nbytes, spread(2))
        rounds.append(Round(sample, {cell: predicted / 1.25}))
    assert predict.prediction_errors(rounds, [cell])[0].error == pytest.approx(0.25)


def sample_of(machine: Machine, slower: float) -> dict[tuple[str, int], float]:
    """Return the sample of a machine that is `slower` times slower than `machine`."""
    flat = {(name, 0): getattr(machine, name) for name in ("step", "wait", "hop", "send")}
    ways = {(f"call {op}", 0): machine.call(op) for op in MAKERS}
    rates = {
        (name, 1): at_reach(getattr(machine, name), 1)
        for name in ("put", "get", "fold", "copy", "stream")
    }
    return {key: slower * value for key, value in {**flat, **ways, **rates}.items()}


def test_typical_is_a_quantile() -> None:
    assert typical([4.0, 1.0, 3.0, 2.0, 5.0]) == 2.0
    assert typical([7.0]) == 7.0


def test_every_call_is_measured_beside_a_single_reach() -> None:
    cells = [TimedCall("all_reduce", nbytes) for nbytes in (0, 8, 9, 1024, 1025, 1 << 30)]
    assert [beside for _, beside in by_reach(cells, [8, 1024, 4096])] == [
        cells[:2],
        cells[2:4],
        cells[4:],
    ]


@given(lines=st.integers(1, 3000), room=st.integers(1, 300), most=st.none() | st.integers(1, 5))
def test_passes_cover_an_array_and_stay_in_it(lines: int, room: int, most: int | None) -> None:
    part, room = 64 * lines, 64 * room
    through = Passes.of(part, room, most)
    pieces = [
        (start + through.stride * i, start + through.stride * i + through.segment)
        for start in through.starts
        for i in range(1 if through.single else through.count)
    ]
    end = 0
    for first, behind in sorted(pieces):
        assert first <= end, "nothing is left out"
        end = max(end, behind)
    assert end == part
    assert through.segment <= room
    assert through.single == (part <= room)
    assert through.single or most is None or through.count <= most


def test_worlds_are_read_from_ranks_and_hosts() -> None:
    options = predict.read("model", ["--ranks", "8..600"])
    assert [world.size for world in predict.worlds(options)] == [8, 64, 512, 600]
    (world,) = predict.worlds(predict.read("draw", ["broadcast", "--hosts", "2x3"]))
    assert world.hosts == ((0, 1, 2), (3, 4, 5))


@pytest.mark.parametrize(
    "words",
    [
        ["draw"],
        ["check-model", "--hosts", "2x2"],
        ["model", "--ranks", "0"],
        ["model", "--ranks", "9..8"],
        ["draw", "shout"],
    ]
    + [["model", "--hosts", text] for text in ("2", "x2", "2x0", "2xa")],
)
def test_options_that_make_no_sense_are_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit):
        predict.read(words[0], words[1:])


def test_the_table_names_sizes_times_and_switches(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "model.png"
    assert predict.main("model", ["--ranks", "8", "--out", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("# by the constants of the machine nc10d is developed on")
    assert "# all_reduce, 8 ranks" in printed
    assert "16 MiB" in printed
    assert "bytes: staging, a chunk a rank, before: staging" in printed
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_far_cells_are_compared_in_the_world_they_were_measured_in() -> None:
    cell, three = TimedCall("all_gather", 1 << 20, far=True), spread(3, 1)
    sample = sample_of(PLAIN, 1.0)
    predicted = seconds(constants([Round(sample, {})]), cell.op, cell.nbytes, three)
    rounds = [Round(sample, {cell: predicted})]
    assert predict.prediction_errors(rounds, [cell], three)[0].error == pytest.approx(0)
    assert predict.prediction_errors(rounds, [cell])[0].error < -0.1


@pytest.mark.long
@pytest.mark.skipif(REASON is not None, reason=REASON or "")
def test_hosts_of_their_own_are_measured_and_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--hosts", "3x1", "--rounds", "1", "--op", "broadcast"]
    assert predict.main("check-model", words) == 0
    shown = capsys.readouterr().out
    assert shown.count("3 ranks on 3 hosts") == len(predict.SIZES)
    assert f"of {len(predict.SIZES)} within 30%" in shown


@pytest.mark.long
def test_measured_constants_predict_the_calls_measured_beside_them() -> None:
    cells = [TimedCall(op, 4096) for op in predict.CHECKED]
    from benchmarks.model.calibrate import survey_here

    for one in predict.prediction_errors(survey_here(cells, 1, far=True), cells):
        assert one.predicted > 0
        assert np.isfinite(one.error)
