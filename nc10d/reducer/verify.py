"""What ranks make sure of before they share buckets: the same parameters, in the same order.

Contract: collective calls, by small arrays; every rank calls, and blocks until all have. A
difference is the same error, in the same words, on every rank, not a hang later on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np

from nc10d.arrays.buffer import as_buffer
from nc10d.ops import MIN, Array
from nc10d.reducer.plan import Spec
from nc10d.reducer.settings import Settings

if TYPE_CHECKING:
    from nc10d.group.process_group import ProcessGroup

_SIDES = 16
_TEXT = 256
"""Bytes that one side of a difference may take in an error."""


def verify_alike(
    group: ProcessGroup, params: Sequence[Array], specs: Sequence[Spec], settings: Settings
) -> None:
    """Raise the ValueError that names the first difference in parameters or options."""
    verify_parameters(group, specs, settings.names, [memory_order(x) for x in params])
    verify_numbers(group, settings.numbers())


def verify_parameters(
    group: ProcessGroup,
    specs: Sequence[Spec],
    names: Sequence[str],
    orders: Sequence[Sequence[int]] | None = None,
) -> None:
    """Raise the ValueError that names the first parameter that is not the same on all ranks.

    Compared are the number of parameters, then name, dtype, shape and order in memory of each, with
    rank 0's. `orders` are as `memory_order` has them; without, all are alike.
    """
    layouts = orders or [()] * len(specs)
    verify_numbers(group, {"numbers of parameters": len(specs)})
    rows = [_row(*each) for each in zip(specs, names, layouts, strict=True)]
    mine = np.array(rows, np.int64)
    first = mine.copy()
    group.broadcast(first, 0)
    differing = np.flatnonzero((mine != first).any(axis=1))
    param = _least(group, int(differing[0]) if len(differing) else len(specs))
    if param == len(specs):
        return
    rank = _least(group, group.rank if (mine[param] != first[param]).any() else group.size)
    mine_told = _told(specs[param], names[param], layouts[param])
    raise ValueError(
        f"parameter {param} is not the same on all ranks: rank 0 has "
        f"{_told_by(group, 0, mine_told)}, rank {rank} has {_told_by(group, rank, mine_told)}"
    )


def verify_numbers(group: ProcessGroup, numbers: Mapping[str, int]) -> None:
    """Raise the ValueError that names the first of `numbers` that differs between ranks.

    The mapping's keys, the same on all ranks, say in the plural what each number is.
    """
    mine = np.array(list(numbers.values()), np.int64)
    rows = np.zeros((group.size, mine.size), np.int64)
    group.all_gather_into_tensor(rows, mine)
    for what, column in zip(numbers, rows.T, strict=True):
        for rank, other in enumerate(column):
            if other != column[0]:
                raise ValueError(
                    f"ranks have different {what}: rank 0 has {column[0]}, rank {rank} has {other}"
                )


def agree_on_order(group: ProcessGroup, order: Sequence[int]) -> list[int]:
    """Return rank 0's order; what the other ranks pass has the same length only."""
    theirs = np.array(order, np.int64)
    group.broadcast(theirs, 0)
    return [int(param) for param in theirs]


def _least(group: ProcessGroup, number: int) -> int:
    least = np.array([number], np.int64)
    group.all_reduce(least, MIN)
    return int(least[0])


def _told_by(group: ProcessGroup, rank: int, text: str) -> str:
    """Return the text of `rank`, cut to what an error has room for."""
    row = np.frombuffer(text.encode()[:_TEXT].ljust(_TEXT), np.uint8).copy()
    group.broadcast(row, rank)
    return row.tobytes().decode(errors="replace").rstrip()


def memory_order(x: Any) -> tuple[int, ...]:
    """Return an array's dimensions from the outermost to the innermost in memory.

    Those of one element have no place; () for what lies nowhere, such as a Spec.
    """
    if isinstance(x, (Spec, tuple)):
        return ()
    found = as_buffer(x)
    axes = [axis for axis, side in enumerate(found.shape) if side > 1]
    return tuple(sorted(axes, key=lambda axis: -abs(found.strides[axis])))


def _told(spec: Spec, name: str, order: Sequence[int]) -> str:
    inward = list(order) == sorted(order)
    where = "" if inward else f" with dimensions in the order {tuple(order)}"
    return f"{name!r}, {spec.dtype.label} of shape {spec.shape}{where}"


def _row(spec: Spec, name: str, order: Sequence[int]) -> list[int]:
    """Return a parameter as numbers; NumPy's arrays have at most 64 dimensions, sane ones 16."""
    if len(spec.shape) > _SIDES:
        raise ValueError(f"parameters have at most {_SIDES} dimensions, not {len(spec.shape)}")
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    padding = [-1] * (_SIDES - len(spec.shape))
    called = int.from_bytes(digest, "little", signed=True)
    return [called, spec.dtype.code, crc32(bytes(order)), *spec.shape, *padding]
