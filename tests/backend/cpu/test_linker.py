"""The linker packs the numbers that the engine reads."""

from __future__ import annotations

import dataclasses

import pytest

from nc10d.arrays.call_info import CallInfo
from nc10d.arrays.dtypes import DType
from nc10d.backend.cpu.algorithms import broadcast, gather
from nc10d.backend.cpu.algorithms.all_reduce import all_reduce
from nc10d.backend.cpu.algorithms.group_shape import GroupShape
from nc10d.backend.cpu.algorithms.reduction import Reduction
from nc10d.backend.cpu.native import offsets as at
from nc10d.backend.cpu.native import step_format
from nc10d.backend.cpu.program import linker, steps
from nc10d.backend.cpu.program.linker import link
from nc10d.backend.cpu.program.program import (
    Combine,
    Kernel,
    Program,
    Space,
    Step,
    StepKind,
    earlier,
    staging,
    user,
)
from nc10d.backend.cpu.program.steps import copy, end_round, expose, signal
from nc10d.kernels import copy as copying
from nc10d.ops import SUM

KERNEL, LAST, BOTH = (Kernel(name, "int64") for name in ("SUM", "DIVIDE", "BOTH_SUM"))
ADDRESSES = {KERNEL: 101, LAST: 102, BOTH: 103}
HOW = Combine(KERNEL, LAST, 5, BOTH)
ONE_OF_EACH = [
    steps.copy(user(0), user(1), 8, 16),
    steps.apply(user(0), user(1), 8, KERNEL, 3, 16),
    steps.fold_staged(staging(0), staging(0), user(0), 8, HOW, total=16),
    steps.pair(user(0), user(1), user(0), 8, KERNEL),
    signal(1),
    steps.wait(1, 2),
    steps.wait_all(2),
    steps.free(),
    steps.enter(flag=True),
    steps.meet_all(),
    end_round(3, 4, 5, 1),
    steps.loop_agreed(3, 4, 1),
    steps.loop([signal(1)], 2)[-1],
    steps.agree(7, 8),
    steps.branch_if_flagged(1),
    steps.branch_if_unreadable(1, 1),
    steps.jump(1),
    expose(1, user(0), at.WRITES, writable=4096),
    steps.fetch(user(0), 1, 9, 8),
    steps.fold_exposed(user(0), user(0), 9, 8, HOW, staging(0), 6, 4096),
    steps.fill_exposed(user(0), 8),
    *steps.flow([steps.give(1, user(0), 8)]),
    steps.check_header(user(0), 1),
]
KERNELS = ("kernel", "last", "both")
FLAG_OF_A_CALL = ("flag", StepKind.ENTER)
"""Travels in the fingerprint."""


@pytest.mark.parametrize("step", ONE_OF_EACH, ids=lambda step: step.kind.name)
def test_the_engine_finds_each_field_of_a_step_by_its_name(step: Step) -> None:
    spare = [signal(1)] * 3
    program = Program(CallInfo("x"), (*spare, step, *spare), 2)
    row = link(program, 2, at.C_TABLES, ADDRESSES.__getitem__).code[3]
    operands = {"kind", "dst", "src", "own", "also"}
    for field in dataclasses.fields(Step):
        value = getattr(step, field.name)
        if field.name not in operands and value and (field.name, step.kind) != FLAG_OF_A_CALL:
            word = row[getattr(step_format, field.name.upper()) // 8]
            assert word == (ADDRESSES[value] if field.name in KERNELS else value), field.name
    assert row[0] == step.kind
    assert len(row) * 8 == step_format.STEP


def no_kernel(_: object) -> int:
    raise AssertionError("no kernel is needed")


@pytest.mark.parametrize(
    "step",
    [
        copy(user(1), user(0), 8),  # one array only
        copy(user(0), user(0, -8), 8),
        Step(StepKind.WAIT, peer=2),  # of two ranks
        Step(StepKind.ROUND, back=3),  # before the program's start
        copy(user(0), earlier(1), 8),  # the slot of another program's round
    ],
)
def test_a_program_that_points_outside_is_refused(step: Step) -> None:
    with pytest.raises(AssertionError):
        link(Program(CallInfo("x"), (signal(1), step), 1), 2, at.C_TABLES, no_kernel)


def test_a_program_only_reads_the_previous_rounds_slot() -> None:
    rounds = [signal(1), end_round(1, 2)]
    link(
        Program(CallInfo("x"), (*rounds, copy(user(0), earlier(1), 8)), 1),
        2,
        at.C_TABLES,
        no_kernel,
    )
    wrong = Program(CallInfo("x"), (*rounds, copy(earlier(0), user(0), 8)), 1)
    with pytest.raises(AssertionError):
        link(wrong, 2, at.C_TABLES, no_kernel)


def test_calls_that_differ_anywhere_have_different_fingerprints() -> None:
    calls = [
        CallInfo("a"),
        CallInfo("b"),
        CallInfo("a", dtype="f"),
        CallInfo("a", count=1),
        CallInfo("a", reduce="SUM"),
        CallInfo("a", root=0),
        CallInfo("a", detail="sizes=[1]"),
    ]
    assert len({call.fingerprint() for call in calls}) == len(calls)


LIBRARY, VECTOR, PAST = 0, 1, 2


@pytest.fixture
def fake_copiers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The C library copies slowly; functions of nc10d's have these numbers for addresses."""
    monkeypatch.setattr(copying, "quick_copy_address", lambda: VECTOR)
    monkeypatch.setattr(copying, "stream_copy_address", lambda: PAST)


def chosen(steps: list[Step], users: int) -> list[int]:
    """Return by which function each step copies."""
    return linker.copiers(Program(CallInfo("x"), tuple(steps), users))


def copies(steps: list[Step], users: int) -> set[tuple[StepKind, Space, Space, int]]:
    """Return from where to where a program copies, and by which function."""
    return {
        (step.kind, step.src.space, step.dst.space, copier)
        for step, copier in zip(steps, chosen(steps, users), strict=True)
        if step.kind in linker.COPIES
    }


MUCH, SLOT = copying.STREAM_BYTES, 256 * 1024
SHAPE = GroupShape(2, 0, SLOT, 64 * 1024, direct=64 * 1024)
FETCHED = (StepKind.FETCH, Space.STAGING, Space.USER)
GOT = (StepKind.COPY, Space.STAGING, Space.USER)
PUT = (StepKind.COPY, Space.USER, Space.STAGING)
OWN = (StepKind.COPY, Space.USER, Space.USER)
FILLED = (StepKind.FILL_EXPOSED, Space.STAGING, Space.NONE)


@pytest.mark.usefixtures("fake_copiers")
def test_an_array_that_fills_a_cache_goes_past_it_unless_the_program_reads_it() -> None:
    got = copies(broadcast.broadcast(SHAPE, MUCH, 1), 1)
    assert got == {(*FETCHED, PAST), (*GOT, PAST)}
    sent = copies(broadcast.broadcast(SHAPE, MUCH, 0), 1)
    assert sent == {(*FILLED, VECTOR), (*PUT, VECTOR)}
    folded = copies(all_reduce(SHAPE, 4 * MUCH, Reduction(SUM, DType.FLOAT32, 2)), 1)
    assert PAST not in {copier for *_, copier in folded}


@pytest.mark.usefixtures("fake_copiers")
@pytest.mark.parametrize(("each", "kept"), [(MUCH // 2, PAST), (MUCH // 2 - 64, VECTOR)])
def test_an_array_counts_as_a_whole_and_once(each: int, kept: int) -> None:
    outs = [user(1), user(1, each)]
    # The kernel fetches half of a swap as a whole; through staging buffers it comes in pieces.
    assert copies(gather.all_gather(SHAPE, [each, each], user(0), outs), 2) == {
        (*FILLED, VECTOR),
        (*FETCHED, VECTOR),
        (*OWN, kept),
        (*PUT, VECTOR),
        (*GOT, kept),
    }


@pytest.mark.usefixtures("fake_copiers")
def test_how_much_goes_into_an_array_counts_in_all_rounds_and_segments() -> None:
    piece = copy(user(0), staging(1), SLOT)
    rounds = -(-MUCH // SLOT)
    loop, shorter = (Step(StepKind.ROUND, repeat=count, back=1) for count in (rounds, rounds - 1))
    agreed = Step(StepKind.LOOP_AGREED, back=1)
    assert chosen([piece, loop], 1) == [PAST, LIBRARY]
    assert chosen([piece, shorter], 1) == [VECTOR, LIBRARY]
    for total, copier in ((MUCH, PAST), (MUCH - 1, VECTOR)):
        once = copy(user(0), staging(1), SLOT, total=total)
        assert chosen([once], 1) == [VECTOR], "one piece is not the whole"
        assert chosen([once, loop], 1) == [copier, LIBRARY]
        assert chosen([once, agreed], 1) == [copier, LIBRARY]


@pytest.mark.usefixtures("fake_copiers")
def test_little_is_copied_by_the_c_library() -> None:
    small = copying.QUICK - 1
    steps = [
        copy(user(0), staging(1), small),
        copy(user(0), staging(1), SLOT, total=small),
        signal(1),
    ]
    assert chosen(steps, 1) == [LIBRARY] * 3


def test_a_program_is_short_by_the_bytes_that_it_moves() -> None:
    moves = copy(user(0), user(1), 2 * linker.SHORT, total=64)
    long = copy(user(0), user(1), 2 * linker.SHORT)
    looped = [copy(user(0), user(1), 1 << 16), end_round(1, 2, 9, 1)]
    found = [
        link(Program(CallInfo("x"), tuple(steps), 2), 2, 0, lambda _: 0).short
        for steps in ([moves], [long], looped, [expose(0, user(0), writable=1 << 30)])
    ]
    assert found == [1, 0, 0, 1]
