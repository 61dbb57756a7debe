"""Copy many arrays to a flat array and back: all tensors of a bucket in a single compiled call.

Contract: `pack` and `unpack` copy, cast between floating types and scale, in a single pass over the
memory. Arrays are contiguous CPU arrays, and each has an offset in the flat array, in elements. The
calls block until all elements are copied, without the GIL. Rounding is that of
`nc10d.arrays.dtypes`: the factor is rounded to the wider of the two types, the product once to the
target's type.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from nc10d.arrays.buffer import Buffer, as_buffer
from nc10d.arrays.dtypes import DType
from nc10d.kernels.pack import cast_address, copy_address, move_all
from nc10d.kernels.reduce import scale_address
from nc10d.kernels.streaming import SCALED, STREAM_BYTES, stream_copy_address, stream_scale_address
from nc10d.ops import Array

Row = tuple[int, int, int]
Addresses = np.ndarray[Any, np.dtype[np.int64]]


def pack(arrays: Sequence[Array], flat: Array, offsets: Sequence[int], scale: float = 1.0) -> None:
    """Write `arrays[i] * scale` to `flat` from element `offsets[i]` on, in the dtype of `flat`.

    ValueError for an array that is not contiguous or does not fit. TypeError for dtypes that differ
    and are not both floating. Both are raised before the first write.
    """
    whole, sources = _memory(flat, True), [_memory(x, False) for x in arrays]
    places = places_in(whole, sources, offsets)
    rows = [(place, x.address, x.nbytes) for place, x in zip(places, sources, strict=True)]
    _move(rows, only_dtype([x.dtype for x in sources]), whole.dtype, scale)


def unpack(
    flat: Array, arrays: Sequence[Array], offsets: Sequence[int], scale: float = 1.0
) -> None:
    """Write `flat * scale`, from element `offsets[i]` on, to `arrays[i]`; errors as for `pack`."""
    whole, targets = _memory(flat, False), [_memory(x, True) for x in arrays]
    places = places_in(whole, targets, offsets)
    size = whole.dtype.itemsize
    rows = [(x.address, place, x.count * size) for place, x in zip(places, targets, strict=True)]
    _move(rows, whole.dtype, only_dtype([x.dtype for x in targets]), scale)


def cast(source: Array, target: Array, scale: float = 1.0) -> None:
    """Write `source * scale` to `target`, which has as many elements; errors as for `pack`."""
    pack([source], target, [0], scale)


def _memory(x: Array, written: bool) -> Buffer:
    buffer = as_buffer(x)
    if buffer.device != "cpu":
        raise TypeError(f"packing is for CPU arrays, got one on {buffer.device}")
    if not buffer.contiguous or (written and not buffer.writable):
        kind = "contiguous" if not buffer.contiguous else "writable"
        raise ValueError(f"an array of shape {tuple(buffer.shape)} is not {kind}")
    return buffer


def places_in(whole: Buffer, arrays: Sequence[Buffer], offsets: Sequence[int]) -> list[int]:
    """Return each array's address in the flat array; ValueError if it is not inside."""
    for x, offset in zip(arrays, offsets, strict=True):
        if not 0 <= offset <= whole.count - x.count:
            end = offset + x.count
            raise ValueError(f"elements {offset} to {end} are not all inside of {whole.count}")
    return [whole.address + offset * whole.dtype.itemsize for offset in offsets]


def only_dtype(dtypes: Iterable[DType]) -> DType | None:
    """Return the common dtype of all arrays, or None without arrays; TypeError if they differ."""
    distinct = set(dtypes)
    if len(distinct) > 1:
        names = ", ".join(sorted(dtype.label for dtype in distinct))
        raise TypeError(f"arrays of one bucket must have one dtype, got {names}")
    return distinct.pop() if distinct else None


def _move(rows: Sequence[Row], src: DType | None, dst: DType | None, scale: float) -> None:
    if src is None or dst is None:
        return
    kernel = _kernel(src, dst, scale, sum(nbytes for _, _, nbytes in rows))
    table = np.array(rows, np.int64)
    factor = np.array(scale, np.float64)
    move_all(table.ctypes.data, len(rows), kernel, factor.ctypes.data)


def _kernel(src: DType, dst: DType, scale: float, nbytes: int) -> int:
    """Return the address of the kernel; large copies bypass the CPU caches."""
    if src is not dst:
        return cast_address(src, dst)
    if nbytes >= STREAM_BYTES and scale == 1:
        return stream_copy_address()
    if nbytes >= STREAM_BYTES and src in SCALED:
        return stream_scale_address(src)
    return copy_address() if scale == 1 else scale_address(src)


class Packer:
    """Packs the same NumPy arrays into a flat array, and unpacks them, many times.

    The constructor checks the arrays; errors as for `pack`. Each call reads the addresses from the
    array objects by compiled code, since a resize may have moved an array. A call raises ValueError
    if the number of bytes of an array has changed.
    """

    def __init__(self, arrays: Sequence[Array], flat: Array, offsets: Sequence[int]) -> None:
        if any(type(x) is not np.ndarray for x in (flat, *arrays)):
            raise TypeError("a Packer is for plain NumPy arrays")
        self._arrays, self._flat = list(arrays), flat
        whole, buffers = _memory(flat, True), [_memory(x, True) for x in arrays]
        places_in(whole, buffers, offsets)
        self._dtypes = only_dtype([x.dtype for x in buffers]), whole.dtype
        self._nbytes = [x.nbytes for x in (flat, *arrays)]
        sizes = [[x.nbytes, x.count * whole.dtype.itemsize] for x in buffers]
        self._sizes = np.array(sizes, np.int64).reshape(-1, 2)
        self._offsets = np.array(offsets, np.int64) * whole.dtype.itemsize
        self._addresses = np.zeros(1 + len(buffers), np.int64)
        table = self._addresses.ctypes.data
        rows = [(table + 8 * i, id(x) + _DATA, 8) for i, x in enumerate((flat, *arrays))]
        self._address_rows = np.array(rows, np.int64)

    def pack(self, scale: float = 1.0) -> None:
        """Write the arrays, times `scale`, to the flat array."""
        arrays, places = self._current_addresses()
        src, dst = self._dtypes
        self._move(np.column_stack([places, arrays, self._sizes[:, 0]]), src, dst, scale)

    def unpack(self, scale: float = 1.0) -> None:
        """Write the flat array, times `scale`, to the arrays."""
        arrays, places = self._current_addresses()
        dst, src = self._dtypes
        self._move(np.column_stack([arrays, places, self._sizes[:, 1]]), src, dst, scale)

    def _current_addresses(self) -> tuple[Addresses, Addresses]:
        """Return the current addresses of the arrays, and of their places in the flat array."""
        if [x.nbytes for x in (self._flat, *self._arrays)] != self._nbytes:
            raise ValueError("an array was resized since the Packer was made")
        move_all(self._address_rows.ctypes.data, len(self._address_rows), copy_address(), 0)
        return self._addresses[1:], self._addresses[0] + self._offsets

    def _move(self, table: Addresses, src: DType | None, dst: DType | None, scale: float) -> None:
        if src is not None and dst is not None:
            factor = np.array(scale, np.float64)
            kernel = _kernel(src, dst, scale, int(table[:, 2].sum()))
            move_all(table.ctypes.data, len(table), kernel, factor.ctypes.data)


_DATA = object.__basicsize__
"""Offset of an ndarray's data pointer: right behind the object header (NumPy's C API)."""
