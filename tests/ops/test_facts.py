"""Every kind of operation and of reduction has its row in every table, or a stated refusal.

Each table is named by its file: a kind without a row is a failed test that shows the file to edit.
"""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

import nc10d
from nc10d import ops as O
from nc10d.arrays.dtypes import DType, ElementKind, allows, identity
from nc10d.group.process_group import ProcessGroup
from nc10d.ops import operations
from nc10d.ops.facts import COLLECTIVE_KINDS, FACTS, OperationFacts, facts_of
from nc10d.ops.reductions import EXAMPLES, KINDS, PAIRWISE, REDUCE_OPS, kind_named
from nc10d.testing import reference
from nc10d.testing.strategies import special_values

ROOT = Path(nc10d.__file__).parents[1]


def table(module: str, name: str) -> Callable[[OperationFacts], bool]:
    """Return whether a table of a module has a row for a kind."""
    return lambda facts: facts.kind in getattr(import_module(f"nc10d.{module}"), name)


def page(path: str, line: str) -> Callable[[OperationFacts], bool]:
    """Return whether a page has a line for each public name of a kind."""
    lines = (ROOT / path).read_text().splitlines()
    return lambda facts: all(line.format(name) in lines for name in names(facts))


def names(facts: OperationFacts) -> list[str]:
    return [name for name in (facts.name, facts.flat_name) if name]


def defines(path: str) -> Callable[[OperationFacts], bool]:
    """Return whether a file defines a function for each public name of a kind."""
    text = (ROOT / path).read_text()
    return lambda facts: all(f"def {name}(" in text for name in names(facts))


def has_oracle(facts: OperationFacts) -> bool:
    return not facts.arrays or hasattr(reference, facts.name)


COLLECTIVE = {
    "nc10d/arrays/validate.py": table("arrays.validate", "RULES"),
    "nc10d/group/collectives.py": lambda facts: all(
        hasattr(ProcessGroup, name) for name in names(facts)
    ),
    "nc10d/group/typed_calls.pyi": defines("nc10d/group/typed_calls.pyi"),
    "nc10d/api/calls.py": defines("nc10d/api/calls.py"),
    "nc10d/__init__.py": lambda facts: set(names(facts)) <= set(nc10d.__all__),
    "nc10d/backend/cpu/lowering/lower.py": table("backend.cpu.lowering.lower", "LOWERINGS"),
    "nc10d/backend/polled/": table("backend.polled.polled_collectives", "STEPS"),
    "nc10d/backend/nccl/launch/nccl_calls.py": table("backend.nccl.launch.nccl_calls", "CALLS"),
    "nc10d/testing/reference.py": has_oracle,
    "nc10d/bench/workloads.py": lambda facts: (
        facts.name in import_module("nc10d.bench.workloads").COLLECTIVES
    ),
    "nc10d/bench/workloads.py, FACTORS": lambda facts: (
        facts.name in import_module("nc10d.bench.workloads").FACTORS
    ),
    "docs/collectives.md": lambda facts: (
        f"## {facts.name}" in (ROOT / "docs/collectives.md").read_text()
    ),
    "docs/reference/calls.md": page("docs/reference/calls.md", "::: nc10d.{}"),
}
"""By file: whether the file has what a collective needs there."""
MESSAGE = {
    "nc10d/arrays/validate.py": table("arrays.validate", "RULES"),
    "nc10d/backend/nccl/launch/nccl_calls.py": table("backend.nccl.launch.nccl_calls", "CALLS"),
    "nc10d/api/": lambda facts: facts.name in nc10d.__all__,
    "docs/reference/messages.md": page("docs/reference/messages.md", "::: nc10d.{}"),
}
REFUSED: Mapping[tuple[str, str], str] = dict.fromkeys(
    product(("scan", "exscan"), ["nc10d/backend/nccl/launch/nccl_calls.py"]),
    "NCCL has no scan: calls_of raises a TypeError",
) | {("barrier", "nc10d/backend/polled/"): "all ranks have come once they have agreed on the call"}
"""By kind and file: why there is no row."""


def lacking(kind: type[Any], files: Mapping[str, Callable[[OperationFacts], bool]]) -> list[str]:
    facts = FACTS[kind]
    return [
        path for path, has in files.items() if not has(facts) and (facts.name, path) not in REFUSED
    ]


def test_every_operation_has_its_facts() -> None:
    classes = {
        each
        for each in vars(operations).values()
        if inspect.isclass(each) and dataclasses.is_dataclass(each)
    }
    assert classes == set(FACTS) == set(get_args(O.Op))


@pytest.mark.parametrize("kind", COLLECTIVE_KINDS, ids=lambda kind: kind.__name__)
def test_a_collective_has_a_row_in_every_table(kind: type[Any]) -> None:
    assert lacking(kind, COLLECTIVE) == [], "these files lack the collective, or a stated refusal"


@pytest.mark.parametrize("kind", [O.Send, O.Recv], ids=lambda kind: kind.__name__)
def test_a_message_has_a_row_in_every_table(kind: type[Any]) -> None:
    assert lacking(kind, MESSAGE) == [], "these files lack the message"


def test_a_missing_row_is_found() -> None:
    @dataclasses.dataclass
    class Shift:
        x: Any

    facts = dataclasses.replace(FACTS[O.AllReduce], kind=Shift, name="shift")
    for path, has in (COLLECTIVE | MESSAGE).items():
        assert not has(facts), path


X, Y, CHUNKS = np.zeros(2), np.zeros(4), (np.zeros(2), np.zeros(2))
OPERATIONS = [
    O.AllReduce(X, O.MAX),
    O.Reduce(X, 1, O.MIN),
    O.Broadcast(X, 1),
    O.AllGather(Y, X),
    O.AllGather(CHUNKS, X),
    O.ReduceScatter(X, Y, O.BOR),
    O.ReduceScatter(X, CHUNKS, O.premul_sum(2.0)),
    O.AllToAll(Y, Y),
    O.AllToAll(CHUNKS, CHUNKS),
    O.AllToAll(Y, Y, (1, 3), (3, 1)),
    O.Gather(Y, X, 1, True),
    O.Gather(None, X, 0),
    O.Scatter(X, CHUNKS, 1),
    O.Scatter(X, None, 0, True),
    O.Scan(X, O.PRODUCT),
    O.ExScan(X, O.SUM, True),
    O.Barrier(),
    O.Send(X, 1, 3),
    O.Recv(X, None, 4),
]


@pytest.mark.parametrize("op", OPERATIONS, ids=lambda op: facts_of(op).name)
def test_an_operation_made_of_its_parts_is_the_same(op: Any) -> None:
    facts = facts_of(op)
    for made in (facts.make(*facts.split(op)), facts.replace(op)):
        assert type(made) is type(op)
        for name in facts.fields:
            assert getattr(made, name) is getattr(op, name) or getattr(made, name) == getattr(
                op, name
            )


def test_the_operations_of_the_tests_are_of_every_kind() -> None:
    assert {type(op) for op in OPERATIONS} == set(FACTS)


# Reductions


def test_a_kinds_place_is_its_number_and_its_name_is_public() -> None:
    assert [kind.number for kind in KINDS] == list(range(len(KINDS)))
    assert [op.kind for op in EXAMPLES] == list(KINDS)
    for op in REDUCE_OPS:
        assert getattr(nc10d, op.name) is op is getattr(O.ReduceOp, op.name)
        assert op.name in nc10d.__all__


@pytest.mark.parametrize("step", PAIRWISE)
def test_a_step_has_a_row_in_every_table(step: str) -> None:
    combine = import_module("nc10d.kernels.combine")
    mpi, ucc = (import_module(f"nc10d.backend.{name}.datatypes") for name in ("mpi", "ucc"))
    assert step in reference.RULES, "nc10d/testing/reference.py"
    assert PAIRWISE[step].of_truth in reference.LOGICAL, "nc10d/testing/reference.py"
    assert step in mpi.OPERATORS, "nc10d/backend/mpi/datatypes.py"
    assert step in ucc.OPERATORS, "nc10d/backend/ucc/datatypes.py"
    for dtype in DType:
        if allows(dtype, O.ReduceOp(kind_named(step))):
            same, stored = combine.canonical(PAIRWISE[step], dtype)
            assert same in combine.RULES[stored.family], "nc10d/kernels/combine.py"


@pytest.mark.parametrize("op", EXAMPLES, ids=lambda op: op.kind.name)
def test_every_reduction_is_on_the_pages_and_known_to_nccl_or_refused(op: O.ReduceOp) -> None:
    text = (ROOT / "docs/collectives.md").read_text()
    assert (f"`{op.name}`" in text) or f"`{op.name.lower()}(" in text, "docs/collectives.md"
    nccl = import_module("nc10d.backend.nccl.launch.datatypes")
    if op.kind.name not in nccl.OPERATORS:
        assert op.pairwise.bitwise, "NCCL has no bitwise operators"
        with pytest.raises(TypeError, match=f"NCCL has no {op.name}"):
            nccl.reduction(DType.INT32, op)


@pytest.mark.parametrize("kind", KINDS, ids=repr)
def test_reasons_are_given_for_families_of_types(kind: O.ReductionKind) -> None:
    assert set(kind.refuses) <= {family.name for family in ElementKind}
    assert kind.pairwise.of_truth in PAIRWISE


@pytest.mark.parametrize("step", [name for name, step in PAIRWISE.items() if step.exact])
def test_an_exact_step_gives_the_same_bits_in_any_order(step: str) -> None:
    rng = np.random.default_rng(7)
    kind = "u1" if PAIRWISE[step].bitwise else "f4"
    rows = list(rng.integers(0, 255, (5, 64)).astype(kind))
    op = O.ReduceOp(kind_named(step))
    wanted = reference.fold(rows, op)
    for _ in range(5):
        rng.shuffle(rows)
        assert reference.same_bits(reference.fold(rows, op), wanted)


@pytest.mark.parametrize("op", EXAMPLES, ids=lambda op: op.kind.name)
def test_the_identity_of_a_step_changes_no_element(op: O.ReduceOp) -> None:
    for dtype in DType:
        if not allows(dtype, op):
            continue
        x = special_values(dtype)
        if dtype.family is ElementKind.COMPLEX:  # inf * (1 + 0j) has a NaN as its imaginary part
            x = x[np.isfinite(x)]
        same = np.full_like(x, identity(dtype, op))
        for pair in ((x, same), (same, x)):
            found = reference.pairwise(*pair, op.pairwise)
            # -0.0 + 0.0 is 0.0: equal, though not the same bits.
            equal = np.array_equal(found.astype(complex), x.astype(complex), equal_nan=True)
            assert reference.same_bits(found, x) or equal, (dtype, found, x)
