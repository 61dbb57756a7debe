"""The layout of staged arrays on the host: as on the device, at other addresses.

Contract: pure. Arrays that share memory on the device share it on the host, at the same distances,
so the inner backend finds the same overlaps and keeps the same order among a block's operations.
The gaps between the elements of a strided array are not copied, in either direction.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nc10d.arrays import intervals as spans
from nc10d.arrays.buffer import Buffer

_ALIGNMENT = 64  # an array is as far from a cache line's start on the host as on the device


@dataclass(frozen=True, slots=True)
class StridedRows:
    """`height` rows of `width` bytes, `pitch` bytes apart; the first is at `address`."""

    address: int
    width: int
    height: int
    pitch: int


def rows(buffer: Buffer) -> Iterator[StridedRows]:
    """Cut an array's elements into rows, for the least number of copies.

    An array whose elements share bytes, which can only be read, is a single row.
    """
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
    return any(spans.intersect(buffer.span, other) for buffer in buffers for other in found)
