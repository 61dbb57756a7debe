"""The effect of an operation on the arrays of all ranks of a process: NumPy assignments.

`compute(ops)` takes an operation of the same kind from each rank, in rank order, and writes the
results of `reference` into every rank's outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from nc10d import ops as O
from nc10d.testing import reference


def compute(ops: Sequence[Any]) -> None:
    """Run an operation, given as the operations of all ranks."""
    for op, value in zip(ops, _VALUES[type(ops[0])](ops), strict=True):
        if value is not None:
            _assign_all(op.x if hasattr(op, "x") else op.out, value)


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


def _inputs(ops: Sequence[Any]) -> list[Any]:
    return [op.x if hasattr(op, "x") else op.inp for op in ops]


def _chunks(xs: Any, size: int) -> list[Any]:
    return list(xs) if isinstance(xs, (list, tuple)) else np.split(np.ravel(xs), size)


def _sent(op: O.AllToAll, size: int) -> list[Any]:
    if op.in_splits is None:
        return _chunks(op.inp, size)
    return np.split(op.inp, np.cumsum(op.in_splits)[:-1].tolist())


def _reduce(ops: Sequence[O.Reduce]) -> list[Any]:
    root = ops[0].root
    values = reference.reduce(_inputs(ops), root, ops[0].op)
    return [value if rank == root else None for rank, value in enumerate(values)]


def _broadcast(ops: Sequence[O.Broadcast]) -> list[Any]:
    root = ops[0].root
    values = reference.broadcast(_inputs(ops), root)
    return [None if rank == root else value for rank, value in enumerate(values)]


# The value that each rank's output gets; None if the rank's arrays stay as they are.
_VALUES: dict[type[Any], Callable[[Any], Sequence[Any]]] = {
    O.AllReduce: lambda ops: reference.all_reduce(_inputs(ops), ops[0].op),
    O.Reduce: _reduce,
    O.Broadcast: _broadcast,
    O.AllGather: lambda ops: reference.all_gather(_inputs(ops)),
    O.ReduceScatter: lambda ops: reference.reduce_scatter(
        [_chunks(op.inp, len(ops)) for op in ops], ops[0].op
    ),
    O.AllToAll: lambda ops: reference.all_to_all([_sent(op, len(ops)) for op in ops]),
    O.Gather: lambda ops: reference.gather(_inputs(ops), ops[0].root),
    O.Scatter: lambda ops: reference.scatter(_chunks(ops[ops[0].root].inp, len(ops))),
    O.Barrier: lambda ops: [None] * len(ops),
}
