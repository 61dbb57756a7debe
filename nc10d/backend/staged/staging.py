"""One launch's arrays on the host: copies to it, the operations on it, and copies to the device.

Arrays lie there as on the device, at other addresses: arrays that share memory on the device share
it on the host, at the same distances. So the inner backend finds the same overlaps and keeps the
same order among a block's operations. The gaps between a strided array's elements are not copied,
in either direction.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nc10d.arrays import intervals
from nc10d.arrays.access import access, arrays_of
from nc10d.arrays.buffer import Buffer, as_buffer
from nc10d.arrays.interop import map_arrays
from nc10d.backend.staged.pinned import Pinned, PinnedPool
from nc10d.cuda.driver import call, driver
from nc10d.ops import Array, Op

_ALIGNMENT = 64  # an array is as far from a cache line's start on the host as on the device


@dataclass(frozen=True, slots=True)
class StridedRows:
    """`height` rows of `width` bytes, `pitch` bytes apart; the first is at `address`."""

    address: int
    width: int
    height: int
    pitch: int


def rows(buffer: Buffer) -> Iterator[StridedRows]:
    """Cut an array's elements into rows, for the least number of copies."""
    # An array whose elements share bytes, which can only be read, is a single row.
    low, high = buffer.span
    if high == low:
        return
    if buffer.contiguous or buffer.repeats:
        yield StridedRows(low, high - low, 1, high - low)
        return
    width = buffer.dtype.itemsize
    steps = zip(buffer.strides, buffer.shape, strict=True)
    dimensions = sorted((abs(step), n) for step, n in steps if n > 1)
    while dimensions and dimensions[0][0] == width:
        width *= dimensions.pop(0)[1]
    pitch, height = dimensions.pop(0) if dimensions else (width, 1)
    for places in itertools.product(*(range(n) for _, n in dimensions)):
        offset = sum(place * step for place, (step, _) in zip(places, dimensions, strict=True))
        yield StridedRows(low + offset, width, height, pitch)


class HostLayout:
    """The offset of each byte of some arrays' spans in a piece of host memory."""

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        """Lay out the spans of `buffers`; spans that overlap stay together."""
        self._regions = _merged([buffer.span for buffer in buffers])
        self._starts: list[int] = []
        self.nbytes = 0
        for low, high in self._regions:
            self.nbytes += low % _ALIGNMENT
            self._starts.append(self.nbytes)
            self.nbytes = -(-(self.nbytes + high - low) // _ALIGNMENT) * _ALIGNMENT

    def offset(self, address: int) -> int:
        """Return the offset of the byte at a device address."""
        index = bisect_right(self._regions, address, key=lambda region: region[0]) - 1
        return self._starts[index] + address - self._regions[index][0]


def _merged(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the fewest spans that cover the same bytes, in order."""
    found: list[tuple[int, int]] = []
    for low, high in sorted(span for span in spans if span[0] < span[1]):
        if found and low < found[-1][1]:
            found[-1] = found[-1][0], max(high, found[-1][1])
        else:
            found.append((low, high))
    return found


def overlap_any(buffers: Sequence[Buffer], others: Sequence[Buffer]) -> bool:
    """Return whether the span of any of `buffers` overlaps that of any of `others`."""
    found = [other.span for other in others]
    return any(intervals.intersect(buffer.span, other) for buffer in buffers for other in found)


class Staging:
    """The arrays in `ops`, as `rank` uses them. Copies are queued on a stream, not waited for."""

    def __init__(self, ops: Sequence[Op], rank: int) -> None:
        self._ops = ops
        self._buffers = [as_buffer(x) for op in ops for x in arrays_of(op)]
        reads, writes = zip(*(access(op, rank) for op in ops), strict=True)
        self._reads = [as_buffer(x) for arrays in reads for x in arrays]
        self._writes = [as_buffer(x) for arrays in writes for x in arrays]
        self._layout = HostLayout(self._buffers)
        self._pinned: Pinned | None = None

    @property
    def sample(self) -> Buffer | None:
        """An array that has elements, None if no array has."""
        return next((buffer for buffer in self._buffers if buffer.count), None)

    def follows(self, earlier: Staging) -> bool:
        """Return whether this launch must wait for an earlier launch that shares memory."""
        written = overlap_any(self._buffers, earlier._writes)
        return written or overlap_any(self._writes, earlier._buffers)

    def copy_down(self, pool: PinnedPool, stream: int) -> None:
        """Queue copies to the host, of the arrays that are read."""
        if self._layout.nbytes:
            self._pinned = pool.take(self._layout.nbytes)
        # These include arrays that an operation writes in part: their other bytes must stay.
        self._copy(self._reads, stream, to_device=False)

    def copy_up(self, stream: int) -> None:
        """Queue copies to the device, of the arrays that were written."""
        self._copy(self._writes, stream, to_device=True)

    def on_host(self) -> tuple[Op, ...]:
        """Return the operations on the arrays in host memory."""
        memory = None if self._pinned is None else self._pinned.as_bytes()
        return tuple(map_arrays(op, lambda x: self._view(memory, x)) for op in self._ops)

    def _view(self, memory: Array, x: Array) -> Array:
        buffer = as_buffer(x)
        dtype = buffer.dtype.numpy
        if not buffer.count:
            return np.empty(buffer.shape, dtype)
        offset = self._layout.offset(buffer.address)
        return np.ndarray(buffer.shape, dtype, memory, offset, buffer.strides)

    def _copy(self, buffers: Iterable[Buffer], stream: int, to_device: bool) -> None:
        for buffer in buffers:
            for piece in rows(buffer):
                assert self._pinned is not None
                host = self._pinned.address + self._layout.offset(piece.address)
                _copy_rows(piece, host, stream, to_device)


def _copy_rows(piece: StridedRows, host: int, stream: int, to_device: bool) -> None:
    if piece.height > 1:
        call("cuMemcpy2DAsync", _rectangle(piece, host, to_device), stream)
    elif to_device:
        call("cuMemcpyHtoDAsync", piece.address, host, piece.width, stream)
    else:
        call("cuMemcpyDtoHAsync", host, piece.address, piece.width, stream)


def _rectangle(piece: StridedRows, host: int, to_device: bool) -> Any:
    """Describe a copy of rows with the same pitch on both sides."""
    kinds = driver().CUmemorytype
    copy = driver().CUDA_MEMCPY2D()
    copy.srcPitch = copy.dstPitch = piece.pitch
    copy.WidthInBytes, copy.Height = piece.width, piece.height
    if to_device:
        copy.srcMemoryType, copy.srcHost = kinds.CU_MEMORYTYPE_HOST, host
        copy.dstMemoryType, copy.dstDevice = kinds.CU_MEMORYTYPE_DEVICE, piece.address
    else:
        copy.srcMemoryType, copy.srcDevice = kinds.CU_MEMORYTYPE_DEVICE, piece.address
        copy.dstMemoryType, copy.dstHost = kinds.CU_MEMORYTYPE_HOST, host
    return copy
