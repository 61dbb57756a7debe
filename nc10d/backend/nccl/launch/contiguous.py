"""Strided arrays: NCCL gets contiguous copies, made and written back on NCCL's stream.

Contract: elements go in C order, as with every backend, for any strides on this rank or another.
The copies are kernels in a launch table: part of the order on the device, and of graphs. An array
takes one kernel (see `gpu_strided` for arrays with many dimensions). Records whose fields lie in
arrays of their own are copied alike, field by field.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from nc10d.arrays.access import access, arrays_of
from nc10d.arrays.buffer import Buffer, as_buffer
from nc10d.arrays.dtypes import ElementType
from nc10d.arrays.fields import Fields
from nc10d.cuda.device_kernels import load_kernel
from nc10d.cuda.memory import DeviceArray, reserve
from nc10d.kernels.gpu.gpu_ptx import shipped_ptx
from nc10d.kernels.gpu.gpu_strided import Launch, Side, sides_of, strided_launches, strided_name
from nc10d.ops import Op
from nc10d.ops.facts import facts_of, name_of


class ContiguousCopies:
    """A launch on contiguous arrays: `ops` has copies in place of strided arrays."""

    # `kept` must live as long as the launch; it never refers to the caller's arrays.

    def __init__(self, ops: Sequence[Op], rank: int, device: int) -> None:
        self._rank = rank
        self._device = device
        self._copies: dict[tuple[object, ...], DeviceArray] = {}
        self._given = ops
        self.kept: object = self._copies
        self.ops: Sequence[Op] = ops
        strided = any(not as_buffer(x).contiguous for op in ops for x in arrays_of(op))
        if strided or any(map(_fields_of, ops)):
            self.ops = [self._on_copies(op) for op in ops]

    def _on_copies(self, op: Op) -> Op:
        facts = facts_of(op)
        try:
            copies = {name: self._on_copy(getattr(op, name)) for name in facts.arrays}
        except ValueError as error:
            raise ValueError(f"{name_of(op)}: {error}") from None
        return facts.replace(op, **copies)

    def _on_copy(self, xs: Any) -> Any:
        """Return an argument with copies in place of strided arrays, and records of fields."""
        if isinstance(xs, (list, tuple)):
            return [self._on_copy(x) for x in xs]
        if isinstance(xs, Fields):
            return self._records(xs)
        found = None if xs is None else as_buffer(xs)
        if found is None or found.contiguous or found.device != "cuda":
            return xs
        return self._copy(found)

    def _records(self, x: Fields) -> DeviceArray:
        if not all(part.contiguous and part.device == "cuda" for part in x.buffers):
            raise ValueError("fields lie in contiguous arrays on the device: pass copies")
        return self._made((x.count,), x.element, *(part.address for part in x.buffers))

    def _copy(self, x: Buffer) -> DeviceArray:
        return self._made(x.shape, x.dtype, x.address, x.strides)

    def _made(self, shape: tuple[int, ...], element: ElementType, *places: object) -> DeviceArray:
        """Return the copy of what lies at these places."""
        key = (shape, element, *places)
        if key not in self._copies:
            self._copies[key] = reserve(shape, element, self._device)
        return self._copies[key]

    def launches(self, place: int, side: int) -> Iterator[Launch]:
        """Yield kernels that copy what an operation reads (0), or write back what it writes (1)."""
        if not self._copies:
            return
        for array, copy, width, sides in self._pairs(self._given[place], side):
            if side == 0:
                yield from strided_launches(copy, array, width, sides, self._kernel)
            else:
                turned = [Side(length, step, in_copy) for length, in_copy, step in sides]
                yield from strided_launches(array, copy, width, turned, self._kernel)

    def _kernel(self, word: int) -> int:
        return load_kernel(self._device, shipped_ptx(strided_name(word)))

    def _pairs(self, op: Op, side: int) -> Iterator[tuple[int, int, int, list[Side]]]:
        """Yield the addresses of an array and its copy, and their common bytes and sides."""
        found = [*map(as_buffer, access(op, self._rank)[side])]
        for x in found:
            if x.count and not x.contiguous:
                yield x.address, self._copy(x).address, *sides_of(x)
        touched = {x.address for x in found}
        for fields in _fields_of(op):
            copy, item = self._records(fields), fields.element.itemsize
            for field, x in zip(fields.element.fields, fields.buffers, strict=True):
                width = field.dtype.itemsize * field.count
                if x.count and x.address in touched:
                    sides = [Side(len(copy), item, width)]
                    yield x.address, copy.address + field.offset, width, sides


def _fields_of(op: Op) -> list[Fields]:
    """Return an operation's records whose fields lie in arrays of their own."""
    values = [getattr(op, name) for name in facts_of(op).arrays]
    flat = [x for value in values for x in (value if isinstance(value, list) else [value])]
    return [x for x in flat if isinstance(x, Fields)]
