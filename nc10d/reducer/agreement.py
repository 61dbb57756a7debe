"""What ranks make sure of before they share buckets: the same parameters, in the same order.

Contract: collective calls, by small arrays; every rank calls, and blocks until all have. A
difference is the same error on every rank, not a hang later on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from nc10d.dtypes import DType
from nc10d.ops import MIN
from nc10d.reducer.plan import Spec

if TYPE_CHECKING:
    from nc10d.group import ProcessGroup

Rows = np.ndarray[Any, np.dtype[np.int64]]

_SIDES = 16
_DTYPES = {dtype.code: dtype for dtype in DType}


def verify_parameters(group: ProcessGroup, specs: Sequence[Spec], names: Sequence[str]) -> None:
    """Raise the ValueError that names the first parameter that is not the same on all ranks.

    Compared are the number of parameters, then dtype and shape of each, with those of rank 0.
    """
    _verify_count(group, len(specs))
    mine = np.array([_row(spec) for spec in specs], np.int64)
    first = mine.copy()
    group.broadcast(first, 0)
    differing = np.flatnonzero((mine != first).any(axis=1))
    param = _least(group, int(differing[0]) if len(differing) else len(specs))
    if param == len(specs):
        return
    rank = _least(group, group.rank if (mine[param] != first[param]).any() else group.size)
    theirs = mine[param].copy()
    group.broadcast(theirs, rank)
    raise ValueError(
        f"parameter {names[param]!r} (index {param}) is not the same on all ranks: rank 0 has "
        f"{_text(first[param])}, rank {rank} has {_text(theirs)}"
    )


def agree_on_order(group: ProcessGroup, order: Sequence[int]) -> list[int]:
    """Return rank 0's order; what the other ranks pass has the same length only."""
    theirs = np.array(order, np.int64)
    group.broadcast(theirs, 0)
    return [int(param) for param in theirs]


def _verify_count(group: ProcessGroup, count: int) -> None:
    counts = np.zeros(group.size, np.int64)
    group.all_gather_into_tensor(counts, np.array([count], np.int64))
    for rank, other in enumerate(counts):
        if other != counts[0]:
            raise ValueError(
                f"ranks have different numbers of parameters: rank 0 has {counts[0]}, "
                f"rank {rank} has {other}"
            )


def _least(group: ProcessGroup, number: int) -> int:
    least = np.array([number], np.int64)
    group.all_reduce(least, MIN)
    return int(least[0])


def _row(spec: Spec) -> list[int]:
    """Return a spec as numbers; NumPy's arrays have at most 64 dimensions, sane ones 16."""
    if len(spec.shape) > _SIDES:
        raise ValueError(f"parameters have at most {_SIDES} dimensions, not {len(spec.shape)}")
    padding = [-1] * (_SIDES - len(spec.shape))
    return [spec.dtype.code, *spec.shape, *padding]


def _text(row: Rows) -> str:
    code, *sides = (int(number) for number in row)
    shape = tuple(side for side in sides if side >= 0)
    return f"{_DTYPES[code].label} of shape {shape}"
