"""A block of many all_reduces by one reduction: checked, and laid out as rows, in one pass.

Contract: `rows_of` gives the rows of ncclAllReduce for arrays of which nothing has to be said: of
one dtype that NCCL reduces, writable, in one piece, aligned, not empty, apart from each other, and
on the device. None for all others, mistakes among them: the way of any operation knows those.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np

from nc10d.backend.nccl.datatypes import FP8, reduction
from nc10d.backend.nccl.native import GROUPED, WORDS
from nc10d.buffer import Buffer, as_buffer
from nc10d.cuda.memory import device_of
from nc10d.dtypes import DType, allows
from nc10d.ops import AllReduces, Array

Table = np.ndarray[Any, np.dtype[np.int64]]
_FROM, _TO, _COUNT = 3, 4, 5  # words of an ncclAllReduce's row


def rows_of(ops: AllReduces, device: int, fp8: bool, ends: tuple[int, int, int]) -> Table | None:
    """Return a row for each array; `ends` are function, communicator and stream."""
    if len(ops) < 2 or ops.op.factor is not None:
        return None
    dtype, places = _places(ops.arrays, device)
    if dtype is None or not allows(dtype, ops.op) or (dtype in FP8 and not fp8):
        return None
    if not _are_plain(places, dtype.itemsize):
        return None
    return _laid_out(places, *reduction(dtype, ops.op)[:3], ends)


def _places(arrays: Sequence[Array], device: int) -> tuple[DType | None, Table]:
    """Return the only dtype of all arrays (None: not so, or not to be written), and places."""
    buffers = [as_buffer(x) for x in arrays]
    dtype = buffers[0].dtype
    for x in buffers:
        if x.dtype is not dtype or not (x.contiguous and x.writable and x.device == "cuda"):
            return None, _NONE
    if [device_of(x) for x in arrays].count(device) < len(arrays):
        return None, _NONE
    return dtype, _table(buffers)


def _table(buffers: Sequence[Buffer]) -> Table:
    """Return a row of addresses and a row of counts."""
    words = array("q", [x.address for x in buffers])  # NumPy takes five times as long for the ints
    words.extend([x.count for x in buffers])
    return np.frombuffer(words, np.int64).reshape(2, -1)


_NONE = np.empty((2, 0), np.int64)


def _are_plain(places: Table, itemsize: int) -> bool:
    """Say whether arrays are aligned, have elements, and none touches another."""
    first, count = places[:, places[0].argsort()]
    apart = first[1:] - first[:-1] >= count[:-1] * itemsize
    aligned = np.bitwise_or.reduce(first) % min(itemsize, 8) == 0
    return bool(aligned and apart.all() and count.all())


def _laid_out(
    places: Table, datatype: int, elements: int, op: int | None, ends: tuple[int, int, int]
) -> Table:
    function, comm, stream = ends
    assert op is not None, "only PREMUL_SUM has an operator of its own"
    table = np.empty((places.shape[1], WORDS), np.int64)
    table[:] = function, 7, GROUPED, 0, 0, 0, datatype, op, comm, stream, 0
    table[:, _FROM] = table[:, _TO] = places[0]
    table[:, _COUNT] = places[1] * elements
    return table
