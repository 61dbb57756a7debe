"""Copy, cast, scale and divide CPU arrays by compiled kernels.

Contract: arrays are contiguous, and calls block until all elements are copied, without the GIL.
Rounding follows `nc10d.arrays.dtypes`: the factor is rounded to the wider of the two types, the
product once to the target's type.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

import numpy as np

from nc10d.arrays.buffer import Buffer, as_buffer
from nc10d.arrays.dtypes import DType, ElementKind, scalar
from nc10d.kernels.pack import cast_address, copy_address, move_all, row_mover
from nc10d.kernels.reduce import divide_address, scale_address
from nc10d.kernels.streaming import (
    SCALED,
    STREAM_BYTES,
    stream_copy_address,
    stream_divide_address,
    stream_scale_address,
)
from nc10d.ops import AVG, SUM, Array, ReduceOp, premul_sum
from nc10d.reducer.plan import Slot

Row = tuple[int, int, int]
"""A copy: the target's and the source's address, and the source's bytes."""
LARGE = 1 << 16
"""A gradient of so many bytes or more is divided while it is copied to the bucket. Dividing many
small gradients on their own costs more than another walk over the bucket's memory."""
FRACTIONAL = frozenset({ElementKind.FLOAT, ElementKind.COMPLEX})


def cast(source: Array, target: Array, scale: float = 1.0) -> None:
    """Write `source * scale` to `target`, which has as many elements, in the target's dtype."""
    # ValueError for an array that is not contiguous or does not fit. TypeError for dtypes that
    # differ and are not both floating. Both are raised before the first write.
    read, written = _memory_of(source, False), _memory_of(target, True)
    if read.count != written.count:
        raise ValueError(f"{read.count} elements can't be cast to {written.count}")
    table = np.array([written.address, read.address, read.nbytes], np.int64)
    factor = np.array(scale, np.float64)
    kernel = _kernel(scalar(read.dtype), scalar(written.dtype), scale, read.nbytes)
    move_all(table.ctypes.data, 1, kernel, factor.ctypes.data)


def divide(read: Buffer, written: Buffer, count: int) -> None:
    """Write the elements in `read`, divided by `count` and rounded once, to `written`."""
    # Both are contiguous, on the CPU, equally long, and have one dtype of real or complex floats.
    table = np.array([written.address, read.address, read.nbytes], np.int64)
    move_all(table.ctypes.data, 1, divide_address(scalar(read.dtype)), count)


class DividedCopy:
    """Writes arrays to a fixed contiguous place in CPU memory, divided and rounded once.

    With `past`, the copies bypass the CPU caches, if there is such a kernel for the dtype.
    """

    # `written` has a dtype of real or complex floats. Not for several threads at once.

    __slots__ = ("_address", "_kernel", "_move", "_row")

    def __init__(self, written: Buffer, past: bool) -> None:
        self._move = row_mover()
        self._row = np.array([written.address, 0, written.nbytes], np.int64)
        self._address: int = self._row.ctypes.data
        find = stream_divide_address if past and written.dtype in SCALED else divide_address
        self._kernel = find(scalar(written.dtype))

    def write(self, address: int, count: int) -> None:
        """Write the contiguous array at `address`, with the place's length and dtype, divided."""
        self._row[1] = address
        self._move(self._address, 1, self._kernel, count)


class Divider:
    """Divides the contiguous array `x` before it is summed; finds its memory and kernel only once.

    `slots` are all pieces of the array, which must not be resized.
    """

    # A sum of divided numbers does not overflow, unlike a sum that is divided at the end. On a
    # device the reduction itself multiplies first. Ints stay unchanged, since each would be
    # truncated. Not done: dividing each view when its gradient comes, which took longer than
    # dividing the whole bucket at its launch; dividing amid the sum of two ranks, a separate
    # operation.

    __slots__ = ("_address", "_buffer", "_done", "_kernel", "_slots", "_table", "x")

    def __init__(self, x: Array, slots: Sequence[Slot] = ()) -> None:
        self.x, self._slots = x, slots
        self._buffer = buffer = as_buffer(x)
        divides = buffer.dtype.family in FRACTIONAL and buffer.device == "cpu"
        self._kernel = divide_address(scalar(buffer.dtype)) if divides else 0
        self._leave_out(set())

    def reduction(self, count: int, size: int, done: Set[int] = frozenset()) -> ReduceOp:
        """Divide the array by `count`; return the reduction over `size` ranks for the mean.

        The slots of parameters in `done` have been divided already.
        """
        if not self._kernel:
            truncates = self._buffer.dtype.family not in FRACTIONAL
            return AVG if truncates and count == size else premul_sum(1 / count)
        if done != self._done:
            self._leave_out(set(done))
        if count > 1:
            move_all(self._address, len(self._table), self._kernel, count)
        return SUM

    def _leave_out(self, done: set[int]) -> None:
        address, size = self._buffer.address, self._buffer.dtype.itemsize
        pieces = [(0, self._buffer.count)]
        if done:
            pieces = [(s.offset, s.count) for s in self._slots if s.param not in done]
        rows = [(address + at * size, address + at * size, count * size) for at, count in pieces]
        self._table = np.array(rows, np.int64)
        self._address: int = self._table.ctypes.data
        self._done = done


def divided(x: Array, count: int, size: int) -> ReduceOp:
    """Divide a contiguous `x` by `count`; return the reduction over `size` ranks for the mean."""
    return Divider(x).reduction(count, size)


def copy_all(rows: Sequence[Row]) -> None:
    """Copy rows of (target, source, bytes); many bytes in all bypass the CPU caches."""
    large = sum(nbytes for _, _, nbytes in rows) >= STREAM_BYTES
    table = np.array(rows, np.int64)
    kernel = stream_copy_address() if large else copy_address()
    move_all(table.ctypes.data, len(rows), kernel, 0)


def _memory_of(x: Array, written: bool) -> Buffer:
    """Return a contiguous CPU array's memory; TypeError or ValueError for other arrays."""
    buffer = as_buffer(x)
    if buffer.device != "cpu":
        raise TypeError(f"packing is for CPU arrays, got one on {buffer.device}")
    if not buffer.contiguous or (written and not buffer.writable):
        kind = "contiguous" if not buffer.contiguous else "writable"
        raise ValueError(f"an array of shape {tuple(buffer.shape)} is not {kind}")
    return buffer


def _kernel(src: DType, dst: DType, scale: float, nbytes: int) -> int:
    """Return the address of a cast's kernel; large copies bypass the CPU caches."""
    if src is not dst:
        return cast_address(src, dst)
    if nbytes >= STREAM_BYTES and scale == 1:
        return stream_copy_address()
    if nbytes >= STREAM_BYTES and src in SCALED:
        return stream_scale_address(src)
    return copy_address() if scale == 1 else scale_address(src)
