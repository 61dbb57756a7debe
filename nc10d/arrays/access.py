"""The arrays of an operation, and whether it reads or writes them.

    access(Broadcast(x, root=0), rank=1)     # reads nothing, writes x

Contract: pure. The functions read the fields of operations, flatten lists, and access no array.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from nc10d.ops import (
    AllGather,
    AllReduce,
    AllReduces,
    AllToAll,
    Array,
    Barrier,
    Broadcast,
    Gather,
    Op,
    Recv,
    Reduce,
    ReduceScatter,
    Scatter,
    Send,
)

_ARRAYS = ("x", "out", "inp")
_WRITTEN: dict[type[Any], str] = {
    AllReduce: "x",
    Reduce: "x",
    Broadcast: "x",
    Recv: "x",
    AllGather: "out",
    ReduceScatter: "out",
    AllToAll: "out",
    Gather: "out",
    Scatter: "out",
}
_RULES: dict[type[Any], Callable[[Any, int], tuple[Sequence[Any], Sequence[Any]]]] = {
    AllReduce: lambda op, rank: ([op.x], [op.x]),
    Reduce: lambda op, rank: ([op.x], [op.x] if rank == op.root else []),
    Broadcast: lambda op, rank: ([op.x], []) if rank == op.root else ([], [op.x]),
    AllGather: lambda op, rank: ([op.inp], [op.out]),
    ReduceScatter: lambda op, rank: ([op.inp], [op.out]),
    AllToAll: lambda op, rank: ([op.inp], [op.out]),
    Gather: lambda op, rank: ([op.inp], [op.out]),
    Scatter: lambda op, rank: ([op.inp], [op.out]),
    Send: lambda op, rank: ([op.x], []),
    Recv: lambda op, rank: ([], [op.x]),
    Barrier: lambda op, rank: ([], []),
}


def access(op: Op, rank: int) -> tuple[list[Array], list[Array]]:
    """Return the arrays that `rank` reads, and the arrays that it writes."""
    reads, writes = _RULES[type(op)](op, rank)
    return _flat(reads), _flat(writes)


def touched(op: Op) -> list[tuple[Array, bool]]:
    """Return (array, written) for all arrays of an operation; written on at least one rank."""
    written = _WRITTEN.get(type(op))
    return [(x, name == written) for name in _ARRAYS for x in _flat([getattr(op, name, None)])]


def arrays_of(op: Op) -> list[Array]:
    """Return all arrays of an operation."""
    return _flat([getattr(op, name, None) for name in _ARRAYS])


def outputs(ops: Iterable[Op]) -> list[Array]:
    """Return the arrays that operations write on at least one rank, in order."""
    return _flat([getattr(op, _WRITTEN.get(type(op), ""), None) for op in ops])


def first_array(ops: Sequence[Op]) -> Any:
    """Return the first array of a launch, or None; creates no operation of AllReduces."""
    if type(ops) is AllReduces:
        return ops.arrays[0]
    return next((x for op in ops for x in arrays_of(op)), None)


def _flat(values: Sequence[Any]) -> list[Array]:
    found: list[Array] = []
    for value in values:
        found += value if isinstance(value, (list, tuple)) else [] if value is None else [value]
    return found
