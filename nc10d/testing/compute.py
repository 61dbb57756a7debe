"""The effect of an operation on the arrays of all ranks of a process: NumPy assignments.

`compute(ops)` takes an operation of the same kind from each rank, in rank order, and writes the
results of `reference` into every rank's outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nc10d.ops.facts import facts_of, rank_is_in
from nc10d.testing import reference


def compute(ops: Sequence[Any]) -> None:
    """Run an operation, given as the operations of all ranks."""
    facts = facts_of(ops[0])
    for name, ranks in facts.writes.items():
        for rank, (op, value) in enumerate(zip(ops, _results(ops), strict=True)):
            if value is not None and rank_is_in(ranks, op, rank):
                _assign_all(getattr(op, name), value)


def assign(out: Any, value: Any) -> None:
    """Write `value` into `out`; shapes may differ, element counts must agree."""
    np.copyto(out, np.asarray(value).reshape(out.shape))


def _assign_all(outs: Any, value: Any) -> None:
    """Write an array, or a list of an array per rank: into a list, or in sequence if flat."""
    if not isinstance(value, list):
        assign(outs, value)
    elif isinstance(outs, (list, tuple)):
        for out, part in zip(outs, value, strict=True):
            assign(out, part)
    else:
        assign(outs, np.concatenate([np.ravel(part) for part in value]))


def _results(ops: Sequence[Any]) -> Sequence[Any]:
    """Return the result of each rank by the function of `reference` of the operation's name."""
    facts, first, size = facts_of(ops[0]), ops[0], len(ops)
    by_reference: Any = getattr(reference, facts.name)
    if "inp" not in facts.per_rank:
        inputs = [getattr(op, next(iter(facts.reads))) for op in ops]
    elif facts.has_root:
        return list(by_reference(_sent(ops[first.root], size)))
    else:
        inputs = [_sent(op, size) for op in ops]
    options = [getattr(first, name) for name in ("root", "op") if name in facts.fields]
    return list(by_reference(inputs, *options))


def _chunks(xs: Any, size: int) -> list[Any]:
    return list(xs) if isinstance(xs, (list, tuple)) else np.split(np.ravel(xs), size)


def _sent(op: Any, size: int) -> list[Any]:
    """Return the chunks of an operation's input."""
    if getattr(op, "in_splits", None) is None:
        return _chunks(op.inp, size)
    return np.split(op.inp, np.cumsum(op.in_splits)[:-1].tolist())
