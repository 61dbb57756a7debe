"""An operation's arrays, and whether the operation reads or writes them.

    access(Broadcast(x, root=0), rank=1)     # reads nothing, writes x

Contract: pure. The functions read operations' fields, flatten lists, and access no array.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nc10d import ops
from nc10d.arrays.fields import Fields
from nc10d.ops.facts import facts_of, rank_is_in


def access(op: ops.Op, rank: int) -> tuple[list[ops.Array], list[ops.Array]]:
    """Return the arrays that `rank` reads, and the arrays that it writes."""
    facts = facts_of(op)
    return _used(op, facts.reads, rank), _used(op, facts.writes, rank)


def touched(op: ops.Op) -> list[tuple[ops.Array, bool]]:
    """Return (array, written) for all arrays in an operation; written on at least one rank."""
    facts = facts_of(op)
    return [(x, name in facts.writes) for name in facts.arrays for x in _flat(getattr(op, name))]


def arrays_of(op: ops.Op) -> list[ops.Array]:
    """Return an operation's arrays."""
    return [x for name in facts_of(op).arrays for x in _flat(getattr(op, name))]


def outputs(batch: Iterable[ops.Op]) -> list[ops.Array]:
    """Return the arrays that operations write on at least one rank, in order."""
    return [x for op in batch for name in facts_of(op).writes for x in _flat(getattr(op, name))]


def first_array(batch: Sequence[ops.Op]) -> Any:
    """Return a launch's first array, or None; creates none of the operations in AllReduces."""
    if type(batch) is ops.AllReduces:
        return batch.arrays[0]
    return next((x for op in batch for x in arrays_of(op)), None)


def _used(op: ops.Op, where: Mapping[str, str], rank: int) -> list[ops.Array]:
    return [
        x
        for f, ranks in where.items()
        if rank_is_in(ranks, op, rank)
        for x in _flat(getattr(op, f))
    ]


def _flat(value: object) -> Sequence[ops.Array]:
    values = value if isinstance(value, (list, tuple)) else () if value is None else (value,)
    if values and type(values[0]) is Fields:
        return [x for fields in values for x in fields.arrays]
    return values
