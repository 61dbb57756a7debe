"""The arrays of an operation, and whether it reads or writes them.

    access(Broadcast(x, root=0), rank=1)     # reads nothing, writes x

Contract: pure. The functions read the fields of operations, flatten lists, and access no array.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from nc10d import ops

_ARRAYS = ("x", "out", "inp")
_FROM_INP_TO_OUT = (ops.AllGather, ops.ReduceScatter, ops.AllToAll, ops.Gather, ops.Scatter)
_WRITTEN: dict[type[Any], str] = {
    **dict.fromkeys((ops.AllReduce, ops.Reduce, ops.Broadcast, ops.Recv), "x"),
    **dict.fromkeys(_FROM_INP_TO_OUT, "out"),
}
_RULES: dict[type[Any], Callable[[Any, int], tuple[Sequence[Any], Sequence[Any]]]] = {
    ops.AllReduce: lambda op, rank: ([op.x], [op.x]),
    ops.Reduce: lambda op, rank: ([op.x], [op.x] if rank == op.root else []),
    ops.Broadcast: lambda op, rank: ([op.x], []) if rank == op.root else ([], [op.x]),
    **dict.fromkeys(_FROM_INP_TO_OUT, lambda op, rank: ([op.inp], [op.out])),
    ops.Send: lambda op, rank: ([op.x], []),
    ops.Recv: lambda op, rank: ([], [op.x]),
    ops.Barrier: lambda op, rank: ([], []),
}


def access(op: ops.Op, rank: int) -> tuple[list[ops.Array], list[ops.Array]]:
    """Return the arrays that `rank` reads, and the arrays that it writes."""
    reads, writes = _RULES[type(op)](op, rank)
    return _flat(reads), _flat(writes)


def touched(op: ops.Op) -> list[tuple[ops.Array, bool]]:
    """Return (array, written) for all arrays of an operation; written on at least one rank."""
    written = _WRITTEN.get(type(op))
    return [(x, name == written) for name in _ARRAYS for x in _flat([getattr(op, name, None)])]


def arrays_of(op: ops.Op) -> list[ops.Array]:
    """Return all arrays of an operation."""
    return _flat([getattr(op, name, None) for name in _ARRAYS])


def outputs(batch: Iterable[ops.Op]) -> list[ops.Array]:
    """Return the arrays that operations write on at least one rank, in order."""
    return _flat([getattr(op, _WRITTEN.get(type(op), ""), None) for op in batch])


def first_array(batch: Sequence[ops.Op]) -> Any:
    """Return the first array of a launch, or None; creates no operation of AllReduces."""
    if type(batch) is ops.AllReduces:
        return batch.arrays[0]
    return next((x for op in batch for x in arrays_of(op)), None)


def _flat(values: Sequence[Any]) -> list[ops.Array]:
    found: list[ops.Array] = []
    for value in values:
        found += value if isinstance(value, (list, tuple)) else [] if value is None else [value]
    return found
