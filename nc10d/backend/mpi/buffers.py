"""An operation's arrays as MPI takes them: contiguous memory by address, one piece an argument.

A strided array goes through a contiguous copy, a list of arrays through one flat copy; what is
written is copied back when the operation is over. Device arrays are taken as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nc10d.arrays.buffer import Buffer, as_buffer
from nc10d.arrays.dtypes import DType
from nc10d.backend.mpi.datatypes import carrier
from nc10d.backend.mpi.library import MPI


@dataclass(frozen=True, slots=True)
class FlatBuffer:
    """`count` elements one after another at `address`; `owner` keeps them alive."""

    address: int
    count: int
    dtype: DType
    device: str
    owner: Any

    @property
    def nbytes(self) -> int:
        """The bytes of all elements."""
        return self.count * self.dtype.itemsize

    def part(self, first: int, count: int) -> FlatBuffer:
        """Return `count` elements from number `first` on."""
        address = self.address + first * self.dtype.itemsize
        return FlatBuffer(address, count, self.dtype, self.device, self.owner)

    def memory(self) -> Any:
        """Return the bytes as mpi4py takes them."""
        return MPI.buffer.fromaddress(self.address, self.nbytes)

    def all(self) -> list[Any]:
        """Return mpi4py's description of all elements."""
        return [self.memory(), self.count, carrier(self.dtype)]

    def cut(self, counts: Sequence[int]) -> list[Any]:
        """Return mpi4py's description of chunks that follow one another."""
        return [self.memory(), (counts, None), carrier(self.dtype)]


class OpBuffers:
    """The memory of one operation, from its beginning to `finish`."""

    __slots__ = ("_after",)

    def __init__(self) -> None:
        self._after: list[Callable[[], None]] = []

    def flat(self, x: Any, written: bool) -> FlatBuffer:
        """Return the memory of an array, or of a copy that `finish` copies back if `written`."""
        buffer = as_buffer(x)
        if buffer.contiguous:
            return _as_is(buffer)
        view = buffer.as_numpy()
        copy = np.ascontiguousarray(view)
        if written:
            self._after.append(lambda: np.copyto(view, copy))
        return _as_is(as_buffer(copy))

    def chunks(self, arrays: Any, size: int, written: bool) -> tuple[FlatBuffer, list[int]]:
        """Return one piece of memory for a flat array or a list, and the count of each chunk."""
        if not isinstance(arrays, (list, tuple)):
            flat = self.flat(arrays, written)
            return flat, [flat.count // size] * size
        buffers = [as_buffer(x) for x in arrays]
        views = [buffer.as_numpy() for buffer in buffers]
        counts = [buffer.count for buffer in buffers]
        whole = np.concatenate([view.reshape(-1) for view in views])
        if written:
            self._after.append(lambda: _cut_back(whole, views))
        return _as_is(as_buffer(whole)), counts

    def scratch(self, count: int, dtype: DType) -> FlatBuffer:
        """Return memory for `count` elements that nobody has seen."""
        return _as_is(as_buffer(np.empty(count, dtype.numpy)))

    def finish(self) -> None:
        """Copy back what was written into copies."""
        for step in self._after:
            step()


def _as_is(buffer: Buffer) -> FlatBuffer:
    return FlatBuffer(buffer.address, buffer.count, buffer.dtype, buffer.device, buffer.owner)


def _cut_back(whole: np.ndarray[Any, Any], views: Sequence[np.ndarray[Any, Any]]) -> None:
    first = 0
    for view in views:
        np.copyto(view, whole[first : first + view.size].reshape(view.shape))
        first += view.size
