"""What Python packs and what the engine reads are the same numbers."""

from __future__ import annotations

import pytest

from nc10d.backend.cpu import linking
from nc10d.backend.cpu.linking import link
from nc10d.backend.cpu.native import interpreter, operands
from nc10d.backend.cpu.native import layout as at
from nc10d.backend.cpu.program import Call, Kind, Program, Step, user
from nc10d.backend.cpu.steps import copy, signal


def test_the_engine_knows_every_kind_of_step_by_its_number() -> None:
    known = {**vars(operands), **vars(interpreter)}
    assert {kind.name: int(kind) for kind in Kind} == {k.name: known[k.name] for k in Kind}


def test_a_step_has_the_size_that_the_engine_expects() -> None:
    assert 8 * linking.FIELDS == operands.STEP
    places = (operands.KERNEL, operands.LAST, operands.ARG, operands.TOTAL)
    fields = (linking.KERNEL, linking.LAST, linking.ARG, linking.TOTAL)
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
