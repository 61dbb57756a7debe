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
    _COMPUTE[type(ops[0])](ops)


def assign(out: Any, value: Any) -> None:
    """Write `value` into `out`; shapes may differ, element counts must agree."""
    np.copyto(out, np.asarray(value).reshape(out.shape))


def _assign_all(outs: Any, values: Sequence[Any]) -> None:
    """Write a value per rank into a list of arrays, or in sequence into a flat array."""
    if isinstance(outs, (list, tuple)):
        for out, value in zip(outs, values, strict=True):
            assign(out, value)
    elif outs is not None:
        assign(outs, np.concatenate([np.ravel(value) for value in values]))


def _chunks(xs: Any, size: int) -> list[Any]:
    return list(xs) if isinstance(xs, (list, tuple)) else np.split(np.ravel(xs), size)


def _all_reduce(ops: Sequence[O.AllReduce]) -> None:
    for op, value in zip(ops, reference.all_reduce([op.x for op in ops], ops[0].op), strict=True):
        assign(op.x, value)


def _reduce(ops: Sequence[O.Reduce]) -> None:
    root = ops[0].root
    assign(ops[root].x, reference.reduce([op.x for op in ops], root, ops[0].op)[root])


def _broadcast(ops: Sequence[O.Broadcast]) -> None:
    values = reference.broadcast([op.x for op in ops], ops[0].root)
    for rank, op in enumerate(ops):
        if rank != op.root:
            assign(op.x, values[rank])


def _all_gather(ops: Sequence[O.AllGather]) -> None:
    for op, values in zip(ops, reference.all_gather([op.inp for op in ops]), strict=True):
        _assign_all(op.out, values)


def _reduce_scatter(ops: Sequence[O.ReduceScatter]) -> None:
    lists = [_chunks(op.inp, len(ops)) for op in ops]
    for op, value in zip(ops, reference.reduce_scatter(lists, ops[0].op), strict=True):
        assign(op.out, value)


def _all_to_all(ops: Sequence[O.AllToAll]) -> None:
    lists = [_sent(op, len(ops)) for op in ops]
    for op, values in zip(ops, reference.all_to_all(lists), strict=True):
        _assign_all(op.out, values)


def _sent(op: O.AllToAll, size: int) -> list[Any]:
    if op.in_splits is None:
        return _chunks(op.inp, size)
    return np.split(op.inp, np.cumsum(op.in_splits)[:-1].tolist())


def _gather(ops: Sequence[O.Gather]) -> None:
    root = ops[0].root
    _assign_all(ops[root].out, [op.inp.copy() for op in ops])


def _scatter(ops: Sequence[O.Scatter]) -> None:
    values = reference.scatter(_chunks(ops[ops[0].root].inp, len(ops)))
    for op, value in zip(ops, values, strict=True):
        assign(op.out, value)


_COMPUTE: dict[type[Any], Callable[[Any], None]] = {
    O.AllReduce: _all_reduce,
    O.Reduce: _reduce,
    O.Broadcast: _broadcast,
    O.AllGather: _all_gather,
    O.ReduceScatter: _reduce_scatter,
    O.AllToAll: _all_to_all,
    O.Gather: _gather,
    O.Scatter: _scatter,
    O.Barrier: lambda ops: None,
}
