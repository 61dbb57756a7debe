"""Verify that all ranks have the same parameters in the same order, before they share buckets.

Contract: collective calls that exchange small arrays; every rank calls, and blocks until all ranks
have called. A difference raises the same error with the same text on every rank, in place of a hang
later on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from zlib import crc32

import numpy as np

from nc10d.arrays.buffer import as_buffer
from nc10d.group.host_calls import on_host
from nc10d.group.process_group import ProcessGroup
from nc10d.ops import MIN, Array
from nc10d.reducer.plan import Spec
from nc10d.reducer.settings import Settings

_SIDES = 16
_TEXT = 256
"""The most bytes that an error shows for each side of a difference."""


def verify_alike(
    group: ProcessGroup, params: Sequence[Array], specs: Sequence[Spec], settings: Settings
) -> None:
    """Raise a ValueError that names the first difference in parameters or options, if any."""
    verify_parameters(group, specs, settings.names, [memory_order(x) for x in params])
    verify_numbers(group, settings.numbers())


def verify_parameters(
    group: ProcessGroup,
    specs: Sequence[Spec],
    names: Sequence[str],
    orders: Sequence[Sequence[int]] | None = None,
) -> None:
    """Raise a ValueError that names the first parameter that differs between ranks, if any."""
    # Each rank compares its number of parameters with rank 0's, then each parameter's name, dtype,
    # shape and memory order. `orders` are results of `memory_order`; without it, orders are
    # ignored.
    layouts = orders or [()] * len(specs)
    verify_numbers(group, {"numbers of parameters": len(specs)})
    if not specs:
        return
    rows = [_row(*described) for described in zip(specs, names, layouts, strict=True)]
    own = np.array(rows, np.int64)
    first = own.copy()
    on_host(group).broadcast(first, 0)
    differing = np.flatnonzero((own != first).any(axis=1))
    param = _least(group, int(differing[0]) if len(differing) else len(specs))
    if param == len(specs):
        return
    rank = _least(group, group.rank if (own[param] != first[param]).any() else group.size)
    text = _description(specs[param], names[param], layouts[param])
    raise ValueError(
        f"parameter {param} is not the same on all ranks: rank 0 has "
        f"{_text_of(group, 0, text)}, rank {rank} has {_text_of(group, rank, text)}"
    )


def verify_numbers(group: ProcessGroup, numbers: Mapping[str, int]) -> None:
    """Raise a ValueError that names the first of `numbers` that differs between ranks, if any."""
    # The keys describe the numbers in the plural, and are the same on all ranks.
    own = np.array(list(numbers.values()), np.int64)
    rows = np.zeros((group.size, own.size), np.int64)
    on_host(group).all_gather_into_tensor(rows, own)
    for name, column in zip(numbers, rows.T, strict=True):
        for rank, other in enumerate(column):
            if other != column[0]:
                sides = f"rank 0 has {column[0]}, rank {rank} has {other}"
                raise ValueError(f"ranks have different {name}: {sides}")


def agree_on_order(group: ProcessGroup, order: Sequence[int]) -> list[int]:
    """Return rank 0's order; for the other ranks' orders only the length matters."""
    agreed = np.array(order, np.int64)
    on_host(group).broadcast(agreed, 0)
    return [int(param) for param in agreed]


def _least(group: ProcessGroup, number: int) -> int:
    least = np.array([number], np.int64)
    on_host(group).all_reduce(least, MIN)
    return int(least[0])


def _text_of(group: ProcessGroup, rank: int, text: str) -> str:
    """Return the text from `rank`, truncated to `_TEXT` bytes; all ranks call."""
    row = np.frombuffer(text.encode()[:_TEXT].ljust(_TEXT), np.uint8).copy()
    on_host(group).broadcast(row, rank)
    return row.tobytes().decode(errors="replace").rstrip()


def memory_order(x: object) -> tuple[int, ...]:
    """Return an array's dimensions from the outermost to the innermost in memory."""
    # Dimensions with length 1 are left out. A Spec has no memory: the result is ().
    if isinstance(x, (Spec, tuple)):
        return ()
    buffer = as_buffer(x)
    axes = [axis for axis, side in enumerate(buffer.shape) if side > 1]
    return tuple(sorted(axes, key=lambda axis: -abs(buffer.strides[axis])))


def _description(spec: Spec, name: str, order: Sequence[int]) -> str:
    inward = list(order) == sorted(order)
    where = "" if inward else f" with dimensions in the order {tuple(order)}"
    return f"{name!r}, {spec.dtype.label} of shape {spec.shape}{where}"


def _row(spec: Spec, name: str, order: Sequence[int]) -> list[int]:
    """Return a parameter as a fixed count of numbers; ValueError for more than 16 dimensions."""
    if len(spec.shape) > _SIDES:
        raise ValueError(f"parameters have at most {_SIDES} dimensions, not {len(spec.shape)}")
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    padding = [-1] * (_SIDES - len(spec.shape))
    name_hash = int.from_bytes(digest, "little", signed=True)
    return [name_hash, spec.dtype.code, crc32(bytes(order)), *spec.shape, *padding]
