"""Copy many arrays to a flat array and back on a GPU: all tensors in a bucket in a single launch.

Contract: as `packing`, for the same arrays on a single device, many times. Tables on the device
list the copies; they are written again only when an array has moved. A call enqueues a kernel on
the current stream (of `nc10d.cuda`) and does not block, except to allocate the tables the first
time. Casts are between real floats of at most 32 bits. The caller keeps the arrays alive and in
place.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from nc10d.arrays.buffer import Buffer, as_buffer
from nc10d.arrays.dtypes import DType, scalar
from nc10d.cuda import memory
from nc10d.cuda.device_kernels import load_kernel
from nc10d.cuda.driver import call, event_pool, on_device
from nc10d.kernels.gpu.gpu_pack import THREADS, chunks_of, packing_name, supports
from nc10d.kernels.gpu.gpu_ptx import shipped_ptx
from nc10d.ops import Array

_ARGUMENTS = (ctypes.c_int64, ctypes.c_int64, ctypes.c_double, ctypes.c_int64)
Rows = np.ndarray[Any, np.dtype[np.int64]]


class DevicePacker:
    """Packs the same device arrays into a flat array, and unpacks them, many times."""

    # ValueError for an array that is not contiguous or does not fit. TypeError for other devices,
    # and for dtypes that differ and can't be cast.

    def __init__(self, arrays: Sequence[Array], flat: Array, offsets: Sequence[int]) -> None:
        self.flat = flat
        self._device = memory.device_of(flat)
        pool = event_pool(self._device)
        self._launched = pool.take()
        weakref.finalize(self, pool.give, self._launched).atexit = False
        self._seen: list[Array] = []
        self._packing, self._unpacking = _Tables(self._device), _Tables(self._device)
        self._inner = self._outer = scalar(as_buffer(flat).dtype)
        self.take(arrays, offsets)

    def take(
        self, arrays: Sequence[Array], offsets: Sequence[int], flat: Array | None = None
    ) -> None:
        """Use these arrays, and `flat` if given, from now on; cheap if none has changed."""
        flat = self.flat if flat is None else flat
        whole, parts = as_buffer(flat), [as_buffer(x) for x in arrays]
        seen = [(x.address, x.shape, x.strides, x.dtype, x.writable) for x in (whole, *parts)]
        if [*seen, *offsets] != self._seen:
            self._check([whole, *parts], [flat, *arrays])
            self._lay_out(whole, parts, offsets)
            self._seen = [*seen, *offsets]
        self.flat = flat

    def _lay_out(self, whole: Buffer, parts: Sequence[Buffer], offsets: Sequence[int]) -> None:
        self._outer = scalar(whole.dtype)
        self._inner = _only_dtype(parts) or self._outer
        if not supports(self._inner, self._outer):
            raise TypeError(f"arrays of {self._inner.label} can't be cast to {self._outer.label}")
        places = _places_in(whole, parts, offsets)
        size = whole.dtype.itemsize
        pairs = list(zip(places, parts, strict=True))
        self._packing.rows = _rows([(place, x.address, x.nbytes) for place, x in pairs])
        self._unpacking.rows = _rows([(x.address, place, x.count * size) for place, x in pairs])

    def _check(self, buffers: Sequence[Buffer], arrays: Sequence[Array]) -> None:
        for x, array in zip(buffers, arrays, strict=True):
            if x.device != "cuda" or memory.device_of(array) != self._device:
                raise TypeError(f"all arrays must be on cuda:{self._device}")
            if not x.contiguous or not x.writable:
                raise ValueError(f"an array of shape {x.shape} is not contiguous and writable")

    def pack(self, scale: float = 1.0) -> None:
        """Enqueue writing the arrays, times `scale`, to the flat array."""
        self._launch(self._packing, self._inner, self._outer, scale)

    def unpack(self, scale: float = 1.0) -> None:
        """Enqueue writing the flat array, times `scale`, to the arrays."""
        self._launch(self._unpacking, self._outer, self._inner, scale)

    def _launch(self, tables: _Tables, src: DType, dst: DType, scale: float) -> None:
        if not tables.rows[:, 2].any():
            return
        here = memory.current_stream_key(self.flat, self._device)
        kernel = load_kernel(self._device, shipped_ptx(packing_name(src, dst, scale != 1)))
        with on_device(self._device):
            in_order = not memory.in_capture(here)
            if in_order:
                # The last launch may still read the tables, on a stream that may be gone.
                call("cuStreamWaitEvent", here.stream, self._launched, 0)
            rows, chunks, blocks = tables.on_device(here.stream)
            shape = blocks, 1, 1, THREADS, 1, 1, 0
            values = rows, chunks, scale, 0
            call("cuLaunchKernel", kernel, *shape, here.stream, (values, _ARGUMENTS), 0)
            if in_order:
                call("cuEventRecord", self._launched, here.stream)
        memory.order_others_after(here, set())


def _places_in(whole: Buffer, arrays: Sequence[Buffer], offsets: Sequence[int]) -> list[int]:
    """Return each array's address in the flat array; ValueError if it is not inside."""
    for x, offset in zip(arrays, offsets, strict=True):
        if not 0 <= offset <= whole.count - x.count:
            end = offset + x.count
            raise ValueError(f"elements {offset} to {end} are not all inside of {whole.count}")
    return [whole.address + offset * whole.dtype.itemsize for offset in offsets]


def _only_dtype(arrays: Sequence[Buffer]) -> DType | None:
    """Return the common dtype of all arrays, or None without arrays; TypeError if they differ."""
    distinct = {scalar(x.dtype) for x in arrays}
    if len(distinct) > 1:
        names = ", ".join(sorted(dtype.label for dtype in distinct))
        raise TypeError(f"arrays of one bucket must have one dtype, got {names}")
    return distinct.pop() if distinct else None


class _Tables:
    """`rows` (dst, src, nbytes of src) and their chunks on a device, for packing or unpacking."""

    def __init__(self, device: int) -> None:
        self.rows = _rows([])
        self._device = device
        self._image = self._written = _rows([])
        self._blocks = 0
        self._memory: memory.DeviceArray | None = None

    def on_device(self, stream: int) -> tuple[int, int, int]:
        """Return (the rows' address, the chunks' address, the number of chunks)."""
        # Changed tables are copied to the device on the stream first.
        if self.rows is not self._written:
            self._write(stream)
        assert self._memory is not None
        rows = self._memory.address
        return rows, rows + self.rows.nbytes, self._blocks

    def _write(self, stream: int) -> None:
        chunks = chunks_of(self.rows[:, 2].tolist())
        # Kept until the next write; by then the driver has copied it.
        self._image = np.concatenate([self.rows.reshape(-1), chunks.reshape(-1)])
        if self._memory is None or self._memory.nbytes < self._image.nbytes:
            self._memory = memory.empty(self._image.size, DType.INT64, self._device)
        source = self._image.ctypes.data, self._image.nbytes
        call("cuMemcpyHtoDAsync", self._memory.address, *source, stream)
        self._written, self._blocks = self.rows, len(chunks)


def _rows(rows: Sequence[tuple[int, int, int]]) -> Rows:
    return np.array(rows, np.int64).reshape(-1, 3)
