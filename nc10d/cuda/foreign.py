"""Resolve arrays of Numba and CuPy by their attributes, which is faster than a dictionary.

Contract: the Buffer is the same as from `__cuda_array_interface__`. Neither library is imported.
Both types are registered as CUDA arrays, so a coalescing block need not query each array's device.
"""

from __future__ import annotations

from typing import Any

from nc10d.arrays.buffer import Buffer, register_named
from nc10d.arrays.dtypes import dtype_of


def of_numba(x: Any) -> Buffer:
    """Read a numba.cuda DeviceNDArray."""
    address = x.device_ctypes_pointer.value or 0  # ctypes reads a null pointer as None
    contiguous = x.flags["C_CONTIGUOUS"] or not x.size
    dtype = dtype_of(x.dtype)
    return Buffer(address, x.size, dtype, "cuda", x, True, contiguous, x.shape, x.strides)


def of_cupy(x: Any) -> Buffer:
    """Read a cupy.ndarray."""
    contiguous, dtype = x.flags.c_contiguous, dtype_of(x.dtype)
    return Buffer(x.data.ptr, x.size, dtype, "cuda", x, True, contiguous, x.shape, x.strides)


register_named("numba", "DeviceNDArray", of_numba)
register_named("cupy", "ndarray", of_cupy)
