"""An operation's arrays as MPI takes them: contiguous memory by address.

A strided array goes through a contiguous copy, a list of arrays through a flat copy. Copies that
MPI has written are copied back when the operation ends.

Device arrays are taken as they are. A CUDA-aware MPI reads and writes device memory by its address.
It knows no streams: kernels that compute an array must have ended before the call (`synchronize`
first). Arrays must be contiguous, and not in lists. Reductions are limited to MPI's own, in MPI's
own order.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nc10d.arrays.buffer import Buffer, as_buffer, device_type
from nc10d.arrays.dtypes import DType
from nc10d.backend.mpi.datatypes import carrier, kernel, native
from nc10d.backend.mpi.library import MPI, cuda_aware
from nc10d.errors import UnsupportedPlatform
from nc10d.kernels.reduce import divide_address, kernel_address, scale_address
from nc10d.ops import OP_NAMES, Op, RedOp, ReduceOp


@dataclass(frozen=True, slots=True)
class FlatBuffer:
    """`count` contiguous elements at `address`; `owner` keeps them alive."""

    address: int
    count: int
    dtype: DType
    device: str
    owner: Any

    @property
    def nbytes(self) -> int:
        """The bytes of all elements."""
        return self.count * self.dtype.itemsize

    def slice(self, first: int, count: int) -> FlatBuffer:
        """Return `count` elements from index `first` on."""
        address = self.address + first * self.dtype.itemsize
        return FlatBuffer(address, count, self.dtype, self.device, self.owner)

    def memory(self) -> Any:
        """Return the bytes as mpi4py takes them."""
        return MPI.buffer.fromaddress(self.address, self.nbytes)

    def whole(self) -> list[Any]:
        """Return mpi4py's description of all elements."""
        return [self.memory(), self.count, carrier(self.dtype)]

    def in_chunks(self, counts: Sequence[int]) -> list[Any]:
        """Return mpi4py's description of consecutive chunks."""
        return [self.memory(), (counts, None), carrier(self.dtype)]


class OpBuffers:
    """The memory of an operation, from its beginning to `finish`."""

    __slots__ = ("_copies_back",)

    def __init__(self) -> None:
        self._copies_back: list[Callable[[], None]] = []

    def contiguous(self, x: Any, written: bool) -> FlatBuffer:
        """Return the memory of an array, or of a copy that `finish` copies back if `written`."""
        buffer = as_buffer(x)
        if buffer.contiguous:
            return _flat_buffer(buffer)
        view = buffer.as_numpy()
        copy = np.ascontiguousarray(view)
        if written:
            self._copies_back.append(lambda: np.copyto(view, copy))
        return _flat_buffer(as_buffer(copy))

    def chunks(self, arrays: Any, size: int, written: bool) -> tuple[FlatBuffer, list[int]]:
        """Return the memory of a flat array, or of a list in one piece; and each chunk's count."""
        if not isinstance(arrays, (list, tuple)):
            flat = self.contiguous(arrays, written)
            return flat, [flat.count // size] * size
        buffers = [as_buffer(x) for x in arrays]
        views = [buffer.as_numpy() for buffer in buffers]
        counts = [buffer.count for buffer in buffers]
        whole = np.concatenate([view.reshape(-1) for view in views])
        if written:
            self._copies_back.append(lambda: _copy_chunks_back(whole, views))
        return _flat_buffer(as_buffer(whole)), counts

    def scratch(self, count: int, dtype: DType) -> FlatBuffer:
        """Return uninitialised memory for `count` elements."""
        return _flat_buffer(as_buffer(np.empty(count, dtype.numpy)))

    def finish(self) -> None:
        """Copy written copies back to the caller's arrays."""
        for copy_back in self._copies_back:
            copy_back()


def _flat_buffer(buffer: Buffer) -> FlatBuffer:
    return FlatBuffer(buffer.address, buffer.count, buffer.dtype, buffer.device, buffer.owner)


def _copy_chunks_back(whole: np.ndarray[Any, Any], views: Sequence[np.ndarray[Any, Any]]) -> None:
    first = 0
    for view in views:
        np.copyto(view, whole[first : first + view.size].reshape(view.shape))
        first += view.size


def fold(into: FlatBuffer, rows: FlatBuffer, size: int, op: ReduceOp) -> None:
    """into := op over the `size` rows, first to last; the rows are scratch memory."""
    prepare(rows, rows, op)
    combine = kernel(kernel_address(op.kind, into.dtype))
    row = [rows.slice(r * into.count, into.count).address for r in range(size)]
    total = row[0]
    for address in row[1:]:
        combine(into.address, total, address, into.nbytes)
        total = into.address
    if size == 1:
        copy(into, rows)
    finish(into, size, op)


def prepare(into: FlatBuffer, x: FlatBuffer, op: ReduceOp) -> None:
    """into := the operand that this reduction makes of x; PREMUL_SUM scales. May be in place."""
    if op.factor is not None:
        factor = ctypes.c_double(op.factor)
        scale = kernel(scale_address(x.dtype))
        scale(into.address, x.address, ctypes.addressof(factor), x.nbytes)
    elif into.address != x.address:
        copy(into, x)


def finish(total: FlatBuffer, size: int, op: ReduceOp) -> None:
    """Turn a sum into the result: AVG divides."""
    if op.kind is RedOp.AVG:
        kernel(divide_address(total.dtype))(total.address, total.address, size, total.nbytes)


def copy(into: FlatBuffer, x: FlatBuffer) -> None:
    """into := x"""
    ctypes.memmove(into.address, x.address, x.nbytes)


def check_devices(ops: Sequence[Op]) -> None:
    """Raise UnsupportedPlatform or TypeError where an operation's device arrays are not for MPI."""
    for op in ops:
        for array in (getattr(op, name, None) for name in ("x", "out", "inp")):
            device = "cpu" if array is None else device_type(array)
            if device != "cpu":
                _check(op, array, device)


def _check(op: Op, array: Any, device: str) -> None:
    name = OP_NAMES[type(op)]
    if not cuda_aware():
        raise UnsupportedPlatform(
            f"{name}: this MPI is not CUDA-aware, so it can't take arrays on {device}: copy them "
            "to the host, or use an MPI that was built with CUDA"
        )
    if isinstance(array, (list, tuple)) or not as_buffer(array).contiguous:
        raise TypeError(f"{name}: mpi takes arrays on {device} one by one and contiguous only")
    how, dtype = getattr(op, "op", None), as_buffer(array).dtype
    if how is None:
        return
    scaled = how.kind in (RedOp.AVG, RedOp.PREMUL_SUM)
    if scaled or native(how.kind, dtype) is None:
        raise TypeError(f"{name}: mpi has no {how.name} of {dtype.label} on {device}")
