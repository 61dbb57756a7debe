"""From many arrays to one flat array and back on a GPU: all tensors of a bucket in one launch.

Contract: as `packing.Packer`, on one device. What to move is put into tables on the device once;
a call enqueues one kernel on the current stream (of `nc10d.cuda`) and does not block. Casts are
between real floats of at most 32 bits. Who makes a DevicePacker leaves the arrays where they are.
"""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from nc10d.buffer import Buffer, as_buffer
from nc10d.cuda.driver import call, driver, on_device
from nc10d.cuda.memory import DeviceArray, device_of, to_device
from nc10d.cuda.streams import stream_of
from nc10d.dtypes import DType
from nc10d.errors import CudaError
from nc10d.kernels.blocks import THREADS, chunks_of, supports
from nc10d.kernels.blocks_cuda import kernel_ptx
from nc10d.ops import Array
from nc10d.reducer.packing import Row, only_dtype, places_in

_UNSUPPORTED_PTX = 222
"""CUDA_ERROR_UNSUPPORTED_PTX_VERSION (cuda.h)."""
_VERSIONS = [f"{major}.{minor}" for major in (9, 8, 7) for minor in range(9, -1, -1)]
_ARGUMENTS = (ctypes.c_int64, ctypes.c_int64, ctypes.c_double, ctypes.c_int64)


class DevicePacker:
    """`pack` and `unpack` between the same device arrays and one flat one, time after time.

    ValueError for an array that is not contiguous or does not fit, TypeError for other devices and
    for dtypes that differ and can't be cast; UnsupportedPlatform without a compiler for kernels.
    """

    def __init__(self, arrays: Sequence[Array], flat: Array, offsets: Sequence[int]) -> None:
        whole, parts = as_buffer(flat), [as_buffer(x) for x in arrays]
        self._keep = [flat, *arrays]
        self._flat = flat
        self._device = device_of(flat)
        self._inner = only_dtype(x.dtype for x in parts) or whole.dtype
        self._outer = whole.dtype
        if not supports(self._inner, self._outer):
            raise TypeError(f"arrays of {self._inner.label} can't be cast to {self._outer.label}")
        self._check([whole, *parts])
        places = places_in(whole, parts, offsets)
        there = [(to, x.address, x.nbytes) for to, x in zip(places, parts, strict=True)]
        size = whole.dtype.itemsize
        back = [(x.address, at, x.count * size) for at, x in zip(places, parts, strict=True)]
        self._there, self._back = _Tables(there, self._device), _Tables(back, self._device)

    def _check(self, buffers: Sequence[Buffer]) -> None:
        for x, array in zip(buffers, self._keep, strict=True):
            if x.device != "cuda" or device_of(array) != self._device:
                raise TypeError(f"all arrays must be on cuda:{self._device}")
            if not x.contiguous or not x.writable:
                raise ValueError(f"an array of shape {x.shape} is not contiguous and writable")

    def pack(self, scale: float = 1.0) -> None:
        """Enqueue: write the arrays, times `scale`, to the flat one."""
        self._launch(self._there, self._inner, self._outer, scale)

    def unpack(self, scale: float = 1.0) -> None:
        """Enqueue: write the flat array, times `scale`, to the arrays."""
        self._launch(self._back, self._outer, self._inner, scale)

    def _launch(self, tables: _Tables, src: DType, dst: DType, scale: float) -> None:
        if not tables.blocks:
            return
        kernel = _kernel(self._device, src, dst, scale != 1)
        values = tables.rows.address, tables.chunks.address, scale, 0
        shape = tables.blocks, 1, 1, THREADS, 1, 1, 0
        with on_device(self._device):
            call("cuLaunchKernel", kernel, *shape, stream_of(self._flat), (values, _ARGUMENTS), 0)


class _Tables:
    """Rows and their chunks on a device, for one direction."""

    def __init__(self, rows: Sequence[Row], device: int) -> None:
        chunks = chunks_of([nbytes for _, _, nbytes in rows])
        self.blocks = len(chunks)
        self.rows: DeviceArray = to_device(np.array(rows, np.int64).reshape(-1, 3), device)
        self.chunks: DeviceArray = to_device(chunks, device)


@functools.cache
def _kernel(device: int, src: DType, dst: DType, scaled: bool) -> Any:
    """Return the driver's handle of a kernel; it stays loaded. May block to compile."""
    ptx = kernel_ptx(src, dst, scaled, _capability(device))
    name = re.search(r"\.visible \.entry (\w+)\(", ptx)
    assert name, "NVVM made no kernel"
    with on_device(device):
        return call("cuModuleGetFunction", _loaded(ptx), name[1].encode())


def _loaded(ptx: str) -> Any:
    """Return the driver's module. A compiler may be newer than the driver, and say so in the PTX.

    What these kernels are made of has been in PTX for long, so an earlier version is said then.
    """
    found = re.search(r"\.version (\d\.\d)", ptx)
    assert found, "PTX begins with its version (PTX ISA, .version)"
    refused: CudaError | None = None
    for version in [found[1], *(one for one in _VERSIONS if one < found[1])]:
        text = ptx.replace(found[0], f".version {version}", 1)
        try:
            return call("cuModuleLoadData", text.encode() + b"\0")
        except CudaError as error:
            refused = refused or error
            if error.code != _UNSUPPORTED_PTX:
                break
    assert refused is not None, "at least one version has been tried"
    raise refused


def _capability(device: int) -> tuple[int, int]:
    kinds = driver().CUdevice_attribute
    major, minor = (
        int(call("cuDeviceGetAttribute", kind, call("cuDeviceGet", device)))
        for kind in (
            kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
            kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
        )
    )
    return major, minor
