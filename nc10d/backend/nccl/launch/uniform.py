"""A uniform block: many all_reduces by the same reduction, checked and laid out in a single pass.

Contract: `rows_of` returns the rows of ncclAllReduce if all arrays are on the device, of the same
dtype that NCCL reduces, writable, contiguous, aligned, not empty, and without shared memory. It
returns None for any other block, also for mistakes, which the general path handles.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from operator import attrgetter
from typing import TypeAlias

from nc10d.arrays.buffer import as_buffer
from nc10d.arrays.dtypes import DType, allows
from nc10d.backend.nccl.bindings import native
from nc10d.backend.nccl.bindings.native import GROUPED
from nc10d.backend.nccl.launch.datatypes import FP8, reduction
from nc10d.cuda.memory import device_of
from nc10d.kernels.cache import entry_point
from nc10d.ops import AllReduces, Array

_fill_rows = entry_point(native.nc10d_nccl_uniform)
_look = attrgetter("address", "count", "dtype", "contiguous", "writable", "device")
Words: TypeAlias = "array[int]"


def rows_of(ops: AllReduces, device: int, fp8: bool, ends: tuple[int, int, int]) -> Words | None:
    """Return a row for each array, None if they are not uniform.

    `ends` are the addresses of the function, the communicator and the stream.
    """
    if len(ops) < 2 or ops.op.factor is not None:
        return None
    found = _places(ops.arrays, device)
    if found is None:
        return None
    dtype, places = found
    if not allows(dtype, ops.op) or (dtype in FP8 and not fp8):
        return None
    datatype, elements, op, _ = reduction(dtype, ops.op)
    assert op is not None, "only PREMUL_SUM has an operator of its own"
    function, comm, stream = ends
    row = array("q", (function, 7, GROUPED, 0, 0, 0, datatype, op, comm, stream, 0))
    rows = row * len(ops)
    (at, _), (table, _) = places.buffer_info(), rows.buffer_info()
    return rows if _fill_rows(at, table, len(ops), dtype.itemsize, elements) else None


def _places(arrays: Sequence[Array], device: int) -> tuple[DType, Words] | None:
    """Return the dtype of all arrays; their addresses, counts, and a scratch word for each.

    None if dtypes or devices differ, or an array is strided or read-only.
    """
    addresses, counts, dtypes, contiguous, writable, kinds = zip(
        *map(_look, map(as_buffer, arrays)), strict=True
    )
    many = len(arrays)
    if dtypes.count(dtypes[0]) < many or kinds.count("cuda") < many:
        return None
    if not (all(contiguous) and all(writable)):
        return None
    if [device_of(x) for x in arrays].count(device) < many:
        return None
    return dtypes[0], array("q", addresses + counts + addresses)
