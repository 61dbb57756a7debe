"""A launch's device arrays, which a library takes by their addresses or not at all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nc10d.arrays.buffer import Buffer, as_buffer, device_type
from nc10d.ops import Array, Op
from nc10d.ops.facts import facts_of, name_of


def device_arrays(batch: Sequence[Op]) -> Iterator[tuple[Op, Array, str]]:
    """Yield (operation, array or list of arrays, device) for all arrays that are on a device."""
    for op in batch:
        for name in facts_of(op).arrays:
            array = getattr(op, name)
            device = "cpu" if array is None else device_type(array)
            if device != "cpu":
                yield op, array, device


def flat_on_device(library: str, op: Op, array: Array, device: str) -> Buffer:
    """Return a device array's memory; TypeError for a list, and unless contiguous."""
    if isinstance(array, (list, tuple)) or not as_buffer(array).contiguous:
        text = f"{library} takes arrays on {device} as a flat array, and contiguous, only"
        raise TypeError(f"{name_of(op)}: {text}")
    return as_buffer(array)
