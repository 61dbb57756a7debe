"""Strided arrays: NCCL gets contiguous copies, made and written back on NCCL's stream.

Contract: elements go in C order, as with every backend, for any strides on this rank or another.
The copies are rows in a launch table: part of the order on the device, and of graphs. A driver's
copy takes rows with the same width and pitch, so an array may need several; ValueError for more
than MOST. Records whose fields lie in arrays of their own are copied alike, field by field.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

from nc10d.arrays.access import access, arrays_of
from nc10d.arrays.buffer import Buffer, as_buffer
from nc10d.arrays.dtypes import ElementType
from nc10d.arrays.fields import Fields
from nc10d.cuda.driver import address, driver
from nc10d.cuda.memory import DeviceArray, reserve
from nc10d.ops import Op
from nc10d.ops.facts import facts_of, name_of

MOST = 4096
"""Copies of an array; queueing more would cost more than a kernel by the caller."""
_FARTHEST = 2**31 - 1  # CU_DEVICE_ATTRIBUTE_MAX_PITCH of all devices


class Piece(NamedTuple):
    """`height` rows of `width` bytes: offset and pitch in an array, and in the copy, in bytes."""

    at: int
    pitch: int
    to: int
    to_pitch: int
    width: int
    height: int


class _Side(NamedTuple):
    """A dimension: the length, and the strides in the array and the copy, in bytes."""

    length: int
    step: int
    to_step: int


def pieces(x: Buffer) -> Iterator[Piece]:
    """Cut an array into pieces for a copy in C order; the first element is at 0 in both."""
    if not x.count:
        return
    width, sides = _sides(x)
    best = max((side for side in sides if _fits(side, width)), default=None)
    rest = list(sides)
    if best is not None:
        rest.remove(best)
    tall = best or _Side(1, width, width)
    for places in itertools.product(*(range(side.length) for side in rest)):
        at = sum(place * side.step for place, side in zip(places, rest, strict=True))
        to = sum(place * side.to_step for place, side in zip(places, rest, strict=True))
        yield Piece(at, tall.step, to, tall.to_step, width, tall.length)


def piece_count(x: Buffer) -> int:
    """Return how many pieces an array has."""
    if not x.count:
        return 0
    width, sides = _sides(x)
    fit = [side.length for side in sides if _fits(side, width)]
    return prod(side.length for side in sides) // max(fit, default=1)


def _sides(x: Buffer) -> tuple[int, list[_Side]]:
    """Return the bytes that are contiguous in array and copy, and the dimensions around them."""
    sides: list[_Side] = []
    width, to_step = x.dtype.itemsize, x.dtype.itemsize
    for count, step in reversed(list(zip(x.shape, x.strides, strict=True))):
        inner = sides[-1] if sides else _Side(width, 1, 1)
        if count == 1:
            continue
        if step == inner.length * inner.step:  # continues the inner dimension
            if sides:
                sides[-1] = _Side(inner.length * count, inner.step, inner.to_step)
            else:
                width *= count
        else:
            sides.append(_Side(count, step, to_step))
        to_step *= count
    return width, sides


def _fits(side: _Side, width: int) -> bool:
    return width <= side.step <= _FARTHEST and side.to_step <= _FARTHEST


Row = tuple[int, int]
"""A copy by the driver, without its stream: the function, and the argument's address."""


class ContiguousCopies:
    """A launch on contiguous arrays: `ops` has copies in place of strided arrays."""

    # `kept` must live as long as the launch; it never refers to the caller's arrays.

    def __init__(self, ops: Sequence[Op], rank: int, device: int) -> None:
        self._rank = rank
        self._device = device
        self._copies: dict[tuple[object, ...], DeviceArray] = {}
        self._given = ops
        self._rectangles: list[Any] = []
        self.kept: object = (self._copies, self._rectangles)
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
        if piece_count(x) > MOST:
            raise ValueError(
                f"an array of shape {x.shape} and strides {x.strides} lies in "
                f"{piece_count(x)} pieces, more than {MOST}: copy it, and copy back what comes"
            )
        return self._made(x.shape, x.dtype, x.address, x.strides)

    def _made(self, shape: tuple[int, ...], element: ElementType, *places: object) -> DeviceArray:
        """Return the copy of what lies at these places."""
        key = (shape, element, *places)
        if key not in self._copies:
            self._copies[key] = reserve(shape, element, self._device)
        return self._copies[key]

    def rows(self, places: Sequence[int], side: int) -> list[Row]:
        """Return calls that copy what operations read (0), or write back what they write (1)."""
        made: list[Row] = []
        for place in places if self._copies else ():
            for array, copy, piece in self._pieces(self._given[place], side):
                rectangle = _rectangle(piece, array, copy, back=side == 1)
                self._rectangles.append(rectangle)
                made.append((address("cuMemcpy2DAsync_v2"), int(rectangle.getPtr())))
        return made

    def _pieces(self, op: Op, side: int) -> Iterator[tuple[int, int, Piece]]:
        """Yield the address of an array, that of its copy, and a piece of both."""
        found = [*map(as_buffer, access(op, self._rank)[side])]
        for x in found:
            if not x.contiguous:
                yield from ((x.address, self._copy(x).address, piece) for piece in pieces(x))
        touched = {x.address for x in found}
        for fields in _fields_of(op):
            copy, item = self._records(fields), fields.element.itemsize
            for field, x in zip(fields.element.fields, fields.buffers, strict=True):
                width = field.dtype.itemsize * field.count
                if x.count and x.address in touched:
                    piece = Piece(0, width, field.offset, item, width, len(copy))
                    yield x.address, copy.address, piece


def _fields_of(op: Op) -> list[Fields]:
    """Return an operation's records whose fields lie in arrays of their own."""
    values = [getattr(op, name) for name in facts_of(op).arrays]
    flat = [x for value in values for x in (value if isinstance(value, list) else [value])]
    return [x for x in flat if isinstance(x, Fields)]


def _rectangle(piece: Piece, array: int, copy: int, back: bool) -> Any:
    """Describe one copy for the driver."""
    sides = (array + piece.at, piece.pitch), (copy + piece.to, piece.to_pitch)
    made = driver().CUDA_MEMCPY2D()
    made.srcMemoryType = made.dstMemoryType = driver().CUmemorytype.CU_MEMORYTYPE_DEVICE
    (made.srcDevice, made.srcPitch), (made.dstDevice, made.dstPitch) = (
        sides[::-1] if back else sides
    )
    made.WidthInBytes, made.Height = piece.width, piece.height
    return made
