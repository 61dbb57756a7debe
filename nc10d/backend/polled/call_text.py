"""A call's description: everything that must be equal on all ranks, and no more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nc10d import ops
from nc10d.arrays.buffer import as_buffer
from nc10d.errors import CollectiveMismatch


def describe(calls: Sequence[ops.Op]) -> str:
    """Return the text of calls, for ranks to compare and for errors to show."""
    return "; ".join(map(_describe, calls))


def _describe(op: ops.Op) -> str:
    name = ops.OP_NAMES[type(op)]
    if isinstance(op, (ops.Barrier, ops.Send, ops.Recv)):
        return name
    reduces = isinstance(op, (ops.AllReduce, ops.Reduce, ops.ReduceScatter))
    operator = f", op={_reduction(op)}" if reduces else ""
    root = getattr(op, "root", None)
    root_text = "" if root is None else f", root={root}"
    return f"{name}(dtype={_dtype(op)}, {_sizes(op)}{operator}{root_text})"


def _reduction(op: Any) -> str:
    factor: float | None = op.op.factor
    return str(op.op.name) if factor is None else f"{op.op.name}({factor})"


def _dtype(op: Any) -> str:
    array = op.x if hasattr(op, "x") else op.out if isinstance(op, ops.Scatter) else op.inp
    first = array[0] if isinstance(array, (list, tuple)) else array
    return as_buffer(first).dtype.label


def _sizes(op: Any) -> str:
    if exchanges_sizes(op):
        return "announced sizes"
    if isinstance(op, (ops.AllGather, ops.ReduceScatter)):
        whole = op.out if isinstance(op, ops.AllGather) else op.inp
        if isinstance(whole, (list, tuple)):
            counts = [as_buffer(x).count for x in whole]
            even = len(set(counts)) == 1
            return f"count={sum(counts)}" if even else f"counts={counts}"
        return f"count={as_buffer(whole).count}"
    return f"count={as_buffer(op.inp if isinstance(op, ops.AllToAll) else op.x).count}"


def exchanges_sizes(op: ops.Op) -> bool:
    """Return whether ranks must exchange sizes, because the call check can't compare them."""
    if isinstance(op, ops.AllToAll):
        splits = (op.in_splits, op.out_splits)
        return isinstance(op.inp, (list, tuple)) or splits != (None, None)
    return isinstance(op, (ops.Gather, ops.Scatter))


def raise_if_sizes_differ(
    op: ops.Op, first: int, rank: int, sizes: Sequence[Sequence[int]], size: int
) -> None:
    """Raise on all ranks if `first`, the lowest rank that expects other sizes, is one of the group.

    `sizes` are those that this rank sends, takes, and is sent.
    """
    if first < size:
        name = ops.OP_NAMES[type(op)]
        text = f"{name}: rank {first} expects other sizes than its peers send"
        sends, takes, coming = map(list, sizes)
        detail = f" (it sends {sends}, takes {takes}, and is sent {coming})"
        raise CollectiveMismatch(text + detail * (first == rank), rank=first, op=name)
