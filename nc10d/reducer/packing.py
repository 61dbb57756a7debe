"""From many arrays to one flat array and back: all tensors of a bucket in one compiled call.

Contract: `pack` and `unpack` copy, cast between floating types, and scale, in one pass over the
memory. Arrays are contiguous CPU arrays; each has its place in the flat one, in elements. They
block until all is copied, without the GIL. Results are those of `nc10d.arrays.dtypes`: the factor
is
rounded to the wider of the two types, the product once to the target's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from nc10d.arrays.buffer import Buffer, as_buffer
from nc10d.arrays.dtypes import DType
from nc10d.kernels.pack import cast_address, copy_address, move_all
from nc10d.kernels.reduce import scale_address
from nc10d.kernels.streaming import (
    SCALED,
    STREAM_BYTES,
    stream_copy_address,
    stream_scale_address,
)
from nc10d.ops import Array

Row = tuple[int, int, int]
Addresses = np.ndarray[Any, np.dtype[np.int64]]


def pack(arrays: Sequence[Array], flat: Array, offsets: Sequence[int], scale: float = 1.0) -> None:
    """Write `arrays[i] * scale` to `flat` from element `offsets[i]` on, in the dtype of `flat`.

    ValueError for an array that is not contiguous or does not fit, TypeError for dtypes that
    differ and are not both floating, before anything is written.
    """
    whole, sources = _memory(flat, True), [_memory(x, False) for x in arrays]
    places = places_in(whole, sources, offsets)
    rows = [(to, x.address, x.nbytes) for to, x in zip(places, sources, strict=True)]
    _move(rows, only_dtype([x.dtype for x in sources]), whole.dtype, scale)


def unpack(
    flat: Array, arrays: Sequence[Array], offsets: Sequence[int], scale: float = 1.0
) -> None:
    """Write `flat * scale`, from element `offsets[i]` on, to `arrays[i]`; errors as for `pack`."""
    whole, targets = _memory(flat, False), [_memory(x, True) for x in arrays]
    places = places_in(whole, targets, offsets)
    size = whole.dtype.itemsize
    rows = [(x.address, at, x.count * size) for at, x in zip(places, targets, strict=True)]
    _move(rows, whole.dtype, only_dtype([x.dtype for x in targets]), scale)


def cast(source: Array, target: Array, scale: float = 1.0) -> None:
    """Write `source * scale` to `target`, which has as many elements; errors as for `pack`."""
    pack([source], target, [0], scale)


def _memory(x: Array, written: bool) -> Buffer:
    found = as_buffer(x)
    if found.device != "cpu":
        raise TypeError(f"packing is for CPU arrays, got one on {found.device}")
    if not found.contiguous or (written and not found.writable):
        kind = "contiguous" if not found.contiguous else "writable"
        raise ValueError(f"an array of shape {tuple(found.shape)} is not {kind}")
    return found


def places_in(whole: Buffer, arrays: Sequence[Buffer], offsets: Sequence[int]) -> list[int]:
    """Return the address of each array's place in the flat one; ValueError if it is not inside."""
    for x, offset in zip(arrays, offsets, strict=True):
        if not 0 <= offset <= whole.count - x.count:
            end = offset + x.count
            raise ValueError(f"elements {offset} to {end} are not all inside of {whole.count}")
    return [whole.address + offset * whole.dtype.itemsize for offset in offsets]


def only_dtype(dtypes: Iterable[DType]) -> DType | None:
    """Return the one dtype of all arrays, None where there are none; TypeError for several."""
    found = set(dtypes)
    if len(found) > 1:
        names = ", ".join(sorted(dtype.label for dtype in found))
        raise TypeError(f"arrays of one bucket must have one dtype, got {names}")
    return found.pop() if found else None


def _move(rows: Sequence[Row], src: DType | None, dst: DType | None, scale: float) -> None:
    if src is None or dst is None:
        return
    kernel = _kernel(src, dst, scale, sum(nbytes for _, _, nbytes in rows))
    table = np.array(rows, np.int64)
    factor = np.array(scale, np.float64)
    move_all(table.ctypes.data, len(rows), kernel, factor.ctypes.data)


def _kernel(src: DType, dst: DType, scale: float, nbytes: int) -> int:
    """Return the kernel; what is more than a cache holds is moved past it."""
    if src is not dst:
        return cast_address(src, dst)
    if nbytes >= STREAM_BYTES and scale == 1:
        return stream_copy_address()
    if nbytes >= STREAM_BYTES and src in SCALED:
        return stream_scale_address(src)
    return copy_address() if scale == 1 else scale_address(src)


class Packer:
    """`pack` and `unpack` between the same NumPy arrays and one flat one, time after time.

    Everything is checked once. Where an array lies is read from the array object itself at each
    call, by compiled code: a resize may have moved it. Errors as for `pack`; ValueError at a call
    if an array has another number of bytes by then.
    """

    def __init__(self, arrays: Sequence[Array], flat: Array, offsets: Sequence[int]) -> None:
        if any(type(x) is not np.ndarray for x in (flat, *arrays)):
            raise TypeError("a Packer is for plain NumPy arrays")
        self._arrays, self._flat = list(arrays), flat
        whole, found = _memory(flat, True), [_memory(x, True) for x in arrays]
        places_in(whole, found, offsets)
        self._dtypes = only_dtype([x.dtype for x in found]), whole.dtype
        self._nbytes = [x.nbytes for x in (flat, *arrays)]
        sizes = [[x.nbytes, x.count * whole.dtype.itemsize] for x in found]
        self._sizes = np.array(sizes, np.int64).reshape(-1, 2)
        self._offsets = np.array(offsets, np.int64) * whole.dtype.itemsize
        self._addresses = np.zeros(1 + len(found), np.int64)
        to = self._addresses.ctypes.data
        rows = [(to + 8 * i, id(x) + _DATA, 8) for i, x in enumerate((flat, *arrays))]
        self._look = np.array(rows, np.int64)

    def pack(self, scale: float = 1.0) -> None:
        """Write the arrays, times `scale`, to the flat one."""
        arrays, places = self._now()
        src, dst = self._dtypes
        self._move(np.column_stack([places, arrays, self._sizes[:, 0]]), src, dst, scale)

    def unpack(self, scale: float = 1.0) -> None:
        """Write the flat array, times `scale`, to the arrays."""
        arrays, places = self._now()
        dst, src = self._dtypes
        self._move(np.column_stack([arrays, places, self._sizes[:, 1]]), src, dst, scale)

    def _now(self) -> tuple[Addresses, Addresses]:
        """Return where the arrays and their places in the flat one lie now."""
        if [x.nbytes for x in (self._flat, *self._arrays)] != self._nbytes:
            raise ValueError("an array was resized since the Packer was made")
        move_all(self._look.ctypes.data, len(self._look), copy_address(), 0)
        return self._addresses[1:], self._addresses[0] + self._offsets

    def _move(self, table: Addresses, src: DType | None, dst: DType | None, scale: float) -> None:
        if src is not None and dst is not None:
            factor = np.array(scale, np.float64)
            kernel = _kernel(src, dst, scale, int(table[:, 2].sum()))
            move_all(table.ctypes.data, len(table), kernel, factor.ctypes.data)


_DATA = object.__basicsize__
"""Where an ndarray keeps its address: right behind what every object has (NumPy's C API)."""
