"""What Python packs and what the engine reads are the same numbers."""

from __future__ import annotations

import pytest

from nc10d.backend.cpu import linking
from nc10d.backend.cpu.algorithms import broadcast, gather
from nc10d.backend.cpu.algorithms.all_reduce import all_reduce
from nc10d.backend.cpu.algorithms.contribute import Reduction
from nc10d.backend.cpu.algorithms.layout import Layout
from nc10d.backend.cpu.linking import link
from nc10d.backend.cpu.native import interpreter, operands
from nc10d.backend.cpu.native import layout as at
from nc10d.backend.cpu.program import Call, Kind, Program, Space, Step, board, user
from nc10d.backend.cpu.steps import copy, signal
from nc10d.kernels import copying
from nc10d.ops import SUM


def test_the_engine_knows_every_kind_of_step_by_its_number() -> None:
    known = {**vars(operands), **vars(interpreter)}
    assert {kind.name: int(kind) for kind in Kind} == {k.name: known[k.name] for k in Kind}


def test_a_step_has_the_size_that_the_engine_expects() -> None:
    assert 8 * linking.FIELDS == operands.STEP
    places = (operands.KERNEL, operands.LAST, operands.ARG, operands.TOTAL, operands.BOTH)
    fields = (linking.KERNEL, linking.LAST, linking.ARG, linking.TOTAL, linking.BOTH)
    assert [8 * field for field in fields] == list(places)
    assert linking.NO_OPERAND == operands.NO_OPERAND


def no_kernel(_: object) -> int:
    raise AssertionError("no kernel is needed")


@pytest.mark.parametrize(
    "step",
    [
        copy(user(1), user(0), 8),  # one array only
        copy(user(0), user(0, -8), 8),
        Step(Kind.WAIT, peer=2),  # of two ranks
        Step(Kind.ROUND, back=3),  # before the program's start
    ],
)
def test_a_program_that_points_outside_is_refused(step: Step) -> None:
    with pytest.raises(AssertionError):
        link(Program(Call("x"), (signal(1), step), 1), 2, at.C_TABLES, no_kernel)


def test_calls_that_differ_anywhere_have_different_fingerprints() -> None:
    calls = [
        Call("a"),
        Call("b"),
        Call("a", dtype="f"),
        Call("a", count=1),
        Call("a", reduce="SUM"),
        Call("a", root=0),
        Call("a", detail="sizes=[1]"),
    ]
    assert len({call.fingerprint() for call in calls}) == len(calls)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where copies would be done by a function of nc10d's, its name stands for its address."""
    monkeypatch.setattr(copying, "quick_copy_address", lambda: 1)
    monkeypatch.setattr(copying, "stream_copy_address", lambda: 2)


def copies(steps: list[Step], users: int) -> dict[tuple[Kind, Space, Space], int]:
    """Return by which function a program copies from where to where: 0, 1 or 2."""
    found = linking.copiers(Program(Call("x"), tuple(steps), users))
    return {
        (step.kind, step.src.space, step.dst.space): copier
        for step, copier in zip(steps, found, strict=True)
        if step.kind in linking.COPIES
    }


MUCH, HALF = copying.STREAMED, 256 * 1024
SHAPE = Layout(2, 0, HALF, 64 * 1024, direct=64 * 1024)


@pytest.mark.usefixtures("told")
def test_an_array_that_fills_a_cache_goes_past_it_unless_the_program_reads_it() -> None:
    got = copies(broadcast.broadcast(SHAPE, MUCH, 1), 1)
    assert got == {
        (Kind.FETCH, Space.BOARD, Space.USER): 2,
        (Kind.COPY, Space.BOARD, Space.USER): 2,
    }
    sent = copies(broadcast.broadcast(SHAPE, MUCH, 0), 1)
    assert sent == {
        (Kind.FILL, Space.BOARD, Space.NONE): 1,
        (Kind.COPY, Space.USER, Space.BOARD): 1,
    }
    assert 2 not in copies(all_reduce(SHAPE, MUCH, Reduction(SUM, "float32", 2)), 1).values()
    outs = [user(1), user(1, MUCH)]
    assert copies(gather.all_gather(SHAPE, [MUCH, MUCH], user(0), outs), 2) == {
        (Kind.FILL, Space.BOARD, Space.NONE): 2,
        (Kind.FETCH, Space.BOARD, Space.USER): 2,
        (Kind.COPY, Space.USER, Space.USER): 2,
        (Kind.COPY, Space.USER, Space.BOARD): 1,
        (Kind.COPY, Space.BOARD, Space.USER): 2,
    }


@pytest.mark.usefixtures("told")
def test_how_much_goes_into_an_array_counts_in_all_rounds_and_segments() -> None:
    piece = copy(user(0), board(1), HALF)
    rounds = -(-MUCH // HALF)
    loop = Step(Kind.ROUND, repeat=rounds, back=1)
    assert linking.copiers(Program(Call("x"), (piece, loop), 1)) == [2, 0]
    fewer = Step(Kind.ROUND, repeat=rounds - 1, back=1)
    assert linking.copiers(Program(Call("x"), (piece, fewer), 1)) == [1, 0]
    once = copy(user(0), board(1), HALF, total=MUCH)
    assert linking.copiers(Program(Call("x"), (once,), 1)) == [2]


@pytest.mark.usefixtures("told")
def test_little_is_copied_by_the_c_library() -> None:
    small = copy(user(0), board(1), copying.QUICK - 1)
    assert linking.copiers(Program(Call("x"), (small, signal(1)), 1)) == [0, 0]
