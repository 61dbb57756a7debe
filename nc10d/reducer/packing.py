"""Copy many arrays to a flat array and back: all tensors of a bucket in a single compiled call.

Contract: `pack` and `unpack` copy, cast between floating types and scale, in a single pass over the
memory. Arrays are contiguous CPU arrays, and each has an offset in the flat array, in elements. The
calls block until all elements are copied, without the GIL. Rounding is that of
`nc10d.arrays.dtypes`: the factor is rounded to the wider of the two types, the product once to the
target's type.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from nc10d.arrays.buffer import Buffer, as_buffer
from nc10d.arrays.dtypes import DType
from nc10d.kernels.pack import cast_address, copy_address, move_all
from nc10d.kernels.reduce import scale_address
from nc10d.kernels.streaming import SCALED, STREAM_BYTES, stream_copy_address, stream_scale_address
from nc10d.ops import Array

Row = tuple[int, int, int]


def pack(arrays: Sequence[Array], flat: Array, offsets: Sequence[int], scale: float = 1.0) -> None:
    """Write `arrays[i] * scale` to `flat` from element `offsets[i]` on, in the dtype of `flat`.

    ValueError for an array that is not contiguous or does not fit. TypeError for dtypes that differ
    and are not both floating. Both are raised before the first write.
    """
    whole, sources = memory_of(flat, True), [memory_of(x, False) for x in arrays]
    places = places_in(whole, sources, offsets)
    rows = [(place, x.address, x.nbytes) for place, x in zip(places, sources, strict=True)]
    _move(rows, only_dtype([x.dtype for x in sources]), whole.dtype, scale)


def unpack(
    flat: Array, arrays: Sequence[Array], offsets: Sequence[int], scale: float = 1.0
) -> None:
    """Write `flat * scale`, from element `offsets[i]` on, to `arrays[i]`; errors as for `pack`."""
    whole, targets = memory_of(flat, False), [memory_of(x, True) for x in arrays]
    places = places_in(whole, targets, offsets)
    size = whole.dtype.itemsize
    rows = [(x.address, place, x.count * size) for place, x in zip(places, targets, strict=True)]
    _move(rows, whole.dtype, only_dtype([x.dtype for x in targets]), scale)


def cast(source: Array, target: Array, scale: float = 1.0) -> None:
    """Write `source * scale` to `target`, which has as many elements; errors as for `pack`."""
    pack([source], target, [0], scale)


def memory_of(x: Array, written: bool) -> Buffer:
    """Return a contiguous CPU array's memory; TypeError or ValueError for other arrays."""
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
    kernel = kernel_for(src, dst, scale, sum(nbytes for _, _, nbytes in rows))
    table = np.array(rows, np.int64)
    factor = np.array(scale, np.float64)
    move_all(table.ctypes.data, len(rows), kernel, factor.ctypes.data)


def kernel_for(src: DType, dst: DType, scale: float, nbytes: int) -> int:
    """Return the address of the kernel; large copies bypass the CPU caches."""
    if src is not dst:
        return cast_address(src, dst)
    if nbytes >= STREAM_BYTES and scale == 1:
        return stream_copy_address()
    if nbytes >= STREAM_BYTES and src in SCALED:
        return stream_scale_address(src)
    return copy_address() if scale == 1 else scale_address(src)
