"""Refuse device arrays that MPI can't take, before anything is sent.

A CUDA-aware MPI reads and writes device memory by its address. It knows no streams: kernels that
compute an array must have ended before the call (`synchronize` first). Arrays must be contiguous,
and not in lists. Reductions are limited to MPI's own, in MPI's own order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nc10d.arrays.buffer import as_buffer, device_type
from nc10d.backend.mpi.datatypes import native
from nc10d.backend.mpi.library import cuda_aware
from nc10d.errors import UnsupportedPlatform
from nc10d.ops import OP_NAMES, Op, RedOp


def check_devices(ops: Sequence[Op]) -> None:
    """Raise UnsupportedPlatform or TypeError where an operation's device arrays are not for MPI."""
    for op in ops:
        for array in _arrays(op):
            device = device_type(array)
            if device != "cpu":
                _check(op, array, device)


def _arrays(op: Op) -> list[Any]:
    found = (getattr(op, name, None) for name in ("x", "out", "inp"))
    return [array for array in found if array is not None]


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
