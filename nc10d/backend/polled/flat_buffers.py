"""An operation's arrays as a library takes them: contiguous memory by address.

A strided array goes through a contiguous copy, a list through a flat copy. Copies that the library
has written are copied back when the operation ends.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nc10d.arrays.buffer import Buffer, as_buffer
from nc10d.arrays.dtypes import ElementType, reduced_element
from nc10d.arrays.fields import Fields
from nc10d.kernels.reduce import address
from nc10d.ops import SUM, Array, ReduceOp
from nc10d.ops.operations import Arrays

_KERNEL = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)


def keep(thing: object) -> None:
    """Keep `thing` alive for good, even past the interpreter's end, when libraries are ended."""
    # For memory that a library may still read or write, because an operation can't be cancelled.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


@functools.cache
def kernel(address: int) -> Any:
    """Return the kernel at `address` as a function, which runs without the GIL."""
    return _KERNEL(address)


@dataclass(frozen=True, slots=True)
class FlatBuffer:
    """`count` contiguous elements at `address`; `owner` keeps them alive."""

    address: int
    count: int
    dtype: ElementType
    device: str
    owner: object

    @property
    def nbytes(self) -> int:
        """The bytes of all elements."""
        return self.count * self.dtype.itemsize

    def slice(self, first: int, count: int) -> FlatBuffer:
        """Return `count` elements from index `first` on."""
        address = self.address + first * self.dtype.itemsize
        return FlatBuffer(address, count, self.dtype, self.device, self.owner)


Chunks = tuple[FlatBuffer, Sequence[int]]
"""Memory, and the elements in each rank's chunk, one after the other."""


def is_chunk_of(piece: FlatBuffer, chunks: Chunks | None, rank: int) -> bool:
    """Return whether `piece` is a rank's chunk of memory; False if empty."""
    if chunks is None or not piece.count:
        return False
    whole, counts = chunks
    return piece.address == whole.slice(sum(counts[:rank]), 0).address


class OpBuffers:
    """An operation's memory, from the beginning to `finish`.

    Copies and scratch memory live as long as this object, because a library has only addresses.
    """

    __slots__ = ("_copies_back", "_owned")

    def __init__(self) -> None:
        self._copies_back: list[Callable[[], None]] = []
        self._owned: list[np.ndarray[Any, Any]] = []

    def contiguous(self, x: Array, written: bool, op: ReduceOp = SUM) -> FlatBuffer:
        """Return an array's memory, or a copy that `finish` copies back if `written`.

        The elements are those that `op` reduces.
        """
        buffer = as_buffer(x)
        if buffer.contiguous:
            return _flat_buffer(buffer, op)
        if isinstance(x, Fields):
            records = x.records()
            if written:
                self._copies_back.append(lambda: x.assign(records))
            return self._own(records)
        view = buffer.as_numpy()
        copy = np.ascontiguousarray(view)
        if written:
            self._copies_back.append(lambda: np.copyto(view, copy))
        return self._own(copy, op)

    def chunks(self, arrays: Arrays, size: int, written: bool, op: ReduceOp = SUM) -> Chunks:
        """Return the memory for an array or a list, as a single piece, in chunks."""
        if not isinstance(arrays, (list, tuple)):
            flat = self.contiguous(arrays, written, op)
            return flat, [flat.count // size] * size
        buffers = [as_buffer(x) for x in arrays]
        views = [
            x.records() if isinstance(x, Fields) else buffer.as_numpy()
            for x, buffer in zip(arrays, buffers, strict=True)
        ]
        # np.concatenate would drop the bytes between a record's fields.
        whole = np.empty(sum(view.size for view in views), views[0].dtype)
        _copy_chunks(whole, views, back=False)
        if written:
            self._copies_back.append(lambda: _copy_chunks(whole, views, back=True))
        first = buffers[0]
        element = reduced_element(first.dtype, op, first.shape[-1] if first.shape else 1)
        own = self._own(whole.view(element.numpy))
        return own, [buffer.nbytes // element.itemsize for buffer in buffers]

    def scratch(self, count: int, dtype: ElementType) -> FlatBuffer:
        """Return uninitialised memory for `count` elements."""
        return self._own(np.empty(count, dtype.numpy))

    def _own(self, array: np.ndarray[Any, Any], op: ReduceOp = SUM) -> FlatBuffer:
        self._owned.append(array)
        return _flat_buffer(as_buffer(array), op)

    def finish(self) -> None:
        """Copy written copies back to the caller's arrays."""
        for copy_back in self._copies_back:
            copy_back()


def _flat_buffer(buffer: Buffer, op: ReduceOp) -> FlatBuffer:
    element = reduced_element(buffer.dtype, op, buffer.shape[-1] if buffer.shape else 1)
    count = buffer.nbytes // element.itemsize
    return FlatBuffer(buffer.address, count, element, buffer.device, buffer.owner)


def _copy_chunks(
    whole: np.ndarray[Any, Any], views: Sequence[np.ndarray[Any, Any]], back: bool
) -> None:
    """Copy arrays to consecutive chunks, or the chunks back to them."""
    first = 0
    for view in views:
        chunk = whole[first : first + view.size].reshape(view.shape)
        np.copyto(*((view, chunk) if back else (chunk, view)))
        first += view.size


def fold(into: FlatBuffer, rows: FlatBuffer, size: int, op: ReduceOp) -> None:
    """into := op over the `size` rows, first to last; the rows are scratch memory."""
    prepare(rows, rows, op)
    combine = kernel(address(op.pairwise.name, into.dtype))
    row = [rows.slice(r * into.count, into.count).address for r in range(size)]
    total = row[0]
    for part in row[1:]:
        combine(into.address, total, part, into.nbytes)
        total = into.address
    if size == 1:
        copy(into, rows)
    finish(into, size, op)


def prepare(into: FlatBuffer, x: FlatBuffer, op: ReduceOp) -> None:
    """into := the operand that this reduction makes from x; PREMUL_SUM scales. May be in place."""
    if op.kind.prepares:
        factor = ctypes.c_double(op.factor or 0)
        scale = kernel(address(op.kind.prepares, x.dtype))
        scale(into.address, x.address, ctypes.addressof(factor), x.nbytes)
    elif into.address != x.address:
        copy(into, x)


def finish(total: FlatBuffer, size: int, op: ReduceOp) -> None:
    """Turn a sum into the result: AVG divides."""
    if op.kind.finishes:
        last = kernel(address(op.kind.finishes, total.dtype))
        last(total.address, total.address, size, total.nbytes)


def copy(into: FlatBuffer, x: FlatBuffer) -> None:
    """into := x"""
    ctypes.memmove(into.address, x.address, x.nbytes)


def even_counts(count: int, size: int) -> list[int]:
    """Return the elements in each rank's chunk: no two differ by more than 1."""
    return [count // size + (rank < count % size) for rank in range(size)]


def row_counts(count: int, splits: Sequence[int] | None, counts: Sequence[int]) -> Sequence[int]:
    """Return each chunk's elements, for `count` elements in rows; without splits, `counts`."""
    if splits is None:
        return counts
    rows = sum(splits)
    return [n * (count // rows) if rows else 0 for n in splits]
