"""From many arrays to one flat array and back: all tensors of a bucket in one compiled call.

Contract: `pack` and `unpack` copy, cast between floating types, and scale, in one pass over the
memory. Arrays are contiguous CPU arrays; each has its place in the flat one, in elements. They
block until all is copied, without the GIL. Results are those of `nc10d.dtypes`: the factor is
rounded to the wider of the two types, the product once to the target's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from nc10d.buffer import Buffer, as_buffer
from nc10d.dtypes import DType
from nc10d.kernels.pack import cast_address, copy_address, move_all
from nc10d.kernels.reduce import scale_address
from nc10d.ops import Array

Row = tuple[int, int, int]


def pack(arrays: Sequence[Array], flat: Array, offsets: Sequence[int], scale: float = 1.0) -> None:
    """Write `arrays[i] * scale` to `flat` from element `offsets[i]` on, in the dtype of `flat`.

    ValueError for an array that is not contiguous or does not fit, TypeError for dtypes that
    differ and are not both floating, before anything is written.
    """
    whole, sources = _memory(flat, True), [_memory(x, False) for x in arrays]
    places = _places(whole, sources, offsets)
    rows = [(to, x.address, x.nbytes) for to, x in zip(places, sources, strict=True)]
    _move(rows, _only([x.dtype for x in sources]), whole.dtype, scale)


def unpack(
    flat: Array, arrays: Sequence[Array], offsets: Sequence[int], scale: float = 1.0
) -> None:
    """Write `flat * scale`, from element `offsets[i]` on, to `arrays[i]`; errors as for `pack`."""
    whole, targets = _memory(flat, False), [_memory(x, True) for x in arrays]
    places = _places(whole, targets, offsets)
    size = whole.dtype.itemsize
    rows = [(x.address, at, x.count * size) for at, x in zip(places, targets, strict=True)]
    _move(rows, whole.dtype, _only([x.dtype for x in targets]), scale)


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


def _places(whole: Buffer, arrays: Sequence[Buffer], offsets: Sequence[int]) -> list[int]:
    """Return the address of each array's place in the flat one."""
    for x, offset in zip(arrays, offsets, strict=True):
        if not 0 <= offset <= whole.count - x.count:
            end = offset + x.count
            raise ValueError(f"elements {offset} to {end} are not all inside of {whole.count}")
    return [whole.address + offset * whole.dtype.itemsize for offset in offsets]


def _only(dtypes: Iterable[DType]) -> DType | None:
    """Return the one dtype of all arrays; None where there are none."""
    found = set(dtypes)
    if len(found) > 1:
        names = ", ".join(sorted(dtype.label for dtype in found))
        raise TypeError(f"arrays of one bucket must have one dtype, got {names}")
    return found.pop() if found else None


def _move(rows: Sequence[Row], src: DType | None, dst: DType | None, scale: float) -> None:
    if src is None or dst is None:
        return
    kernel = _kernel(src, dst, scale)
    table = np.array(rows, np.int64)
    factor = np.array(scale, np.float64)
    move_all(table.ctypes.data, len(rows), kernel, factor.ctypes.data)


def _kernel(src: DType, dst: DType, scale: float) -> int:
    if src is not dst:
        return cast_address(src, dst)
    return copy_address() if scale == 1 else scale_address(src)
