"""Copy many arrays to a flat array and back on a GPU: all tensors in a bucket in a single launch.

Contract: as `packing`, for the same arrays on a single device, many times. Tables on the device
list the copies; they are written again when an array has moved, as gradients do in each pass where
they are set to None. A call enqueues a kernel on the current stream (of `nc10d.cuda`) and does not
block, except to allocate the tables the first time, and for each launch in a graph, which has
tables of its own. Casts are between real floats of at most 32 bits. The caller keeps the arrays
alive and in place.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import numpy as np

from nc10d.arrays.buffer import Buffer, as_buffer
from nc10d.arrays.dtypes import DType, scalar
from nc10d.cuda import captured_graphs, memory
from nc10d.cuda.device_kernels import load_kernel
from nc10d.cuda.driver import call, event_pool, on_device
from nc10d.cuda.streams import Stream, relaxed_capture_mode
from nc10d.kernels.gpu.gpu_pack import THREADS, chunks_of, packing_name, supports
from nc10d.kernels.gpu.gpu_ptx import shipped_ptx
from nc10d.ops import Array

_ARGUMENTS = (ctypes.c_int64, ctypes.c_int64, ctypes.c_double, ctypes.c_int64)
Words = np.ndarray[Any, np.dtype[np.int64]]
_buffer, _ordinal = attrgetter("buffer"), attrgetter("device")


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
        self._addresses: list[int] = []
        self._kinds: list[Any] = []
        self._offsets: list[int] = []
        self._steps = _words([])
        self._packing, self._unpacking = _Tables(self._device), _Tables(self._device)
        self._inner = self._outer = scalar(as_buffer(flat).dtype)
        self.take(arrays, offsets)

    def take(
        self, arrays: Sequence[Array], offsets: Sequence[int], flat: Array | None = None
    ) -> None:
        """Use these arrays, and `flat` if given, from now on; cheap if none has changed."""
        flat, offsets = self.flat if flat is None else flat, [*offsets]
        every = [flat, *arrays]
        ours = set(map(type, every)) == {memory.DeviceArray}
        buffers = list(map(_buffer if ours else as_buffer, every))
        addresses = [x.address for x in buffers]
        kinds = [(x.count, x.dtype, x.contiguous, x.writable, x.device) for x in buffers]
        alike = kinds == self._kinds and offsets == self._offsets
        if alike and addresses == self._addresses:
            self.flat = flat
            return
        on_host = not alike and any(x.device != "cuda" for x in buffers)
        find = _ordinal if ours else memory.device_of
        if on_host or set(map(find, every)) != {self._device}:
            raise TypeError(f"all arrays must be on cuda:{self._device}")
        if not alike:
            self._lay_out(buffers, offsets)
        self._move(addresses)
        self.flat, self._offsets = flat, offsets
        self._addresses, self._kinds = addresses, kinds

    def _lay_out(self, buffers: Sequence[Buffer], offsets: Sequence[int]) -> None:
        """Check the arrays; note what does not depend on their addresses."""
        for x in buffers:
            if not x.contiguous or not x.writable:
                raise ValueError(f"an array of shape {x.shape} is not contiguous and writable")
        whole, *parts = buffers
        outer = scalar(whole.dtype)
        inner = _only_dtype(parts) or outer
        if not supports(inner, outer):
            raise TypeError(f"arrays of {inner.label} can't be cast to {outer.label}")
        for x, offset in zip(parts, offsets, strict=True):
            if not 0 <= offset <= whole.count - x.count:
                end = offset + x.count
                raise ValueError(f"elements {offset} to {end} are not all inside of {whole.count}")
        counts, size = _words([x.count for x in parts]), whole.dtype.itemsize
        self._inner, self._outer, self._steps = inner, outer, _words(offsets) * size
        self._packing.lay_out(_words([x.nbytes for x in parts]))
        self._unpacking.lay_out(counts * size)

    def _move(self, addresses: Sequence[int]) -> None:
        """Note the addresses of the flat array, and of the arrays."""
        places, arrays = addresses[0] + self._steps, _words(addresses[1:])
        self._packing.move(places, arrays)
        self._unpacking.move(arrays, places)

    def pack(self, scale: float = 1.0) -> None:
        """Enqueue writing the arrays, times `scale`, to the flat array."""
        self._launch(self._packing, self._inner, self._outer, scale)

    def unpack(self, scale: float = 1.0) -> None:
        """Enqueue writing the flat array, times `scale`, to the arrays."""
        self._launch(self._unpacking, self._outer, self._inner, scale)

    def _launch(self, tables: _Tables, src: DType, dst: DType, scale: float) -> None:
        if not tables.blocks:
            return
        here = memory.current_stream_key(self.flat, self._device)
        kernel = _kernel(self._device, src, dst, scale != 1)
        with on_device(self._device):
            in_order = not memory.in_capture(here)
            if in_order:
                # The last launch may still read the tables, on a stream that may be gone.
                call("cuStreamWaitEvent", here.stream, self._launched, 0)
            find = tables.on_device if in_order else tables.for_graph
            rows, chunks, blocks = find(here.stream)
            shape = blocks, 1, 1, THREADS, 1, 1, 0
            values = rows, chunks, scale, 0
            call("cuLaunchKernel", kernel, *shape, here.stream, (values, _ARGUMENTS), 0)
            if in_order:
                call("cuEventRecord", self._launched, here.stream)
        memory.order_others_after(here, set())


@functools.cache
def _kernel(device: int, src: DType, dst: DType, scaled: bool) -> int:
    return load_kernel(device, shipped_ptx(packing_name(src, dst, scaled)))


def _only_dtype(arrays: Sequence[Buffer]) -> DType | None:
    """Return the common dtype of all arrays, or None without arrays; TypeError if they differ."""
    distinct = {scalar(x.dtype) for x in arrays}
    if len(distinct) > 1:
        names = ", ".join(sorted(dtype.label for dtype in distinct))
        raise TypeError(f"arrays of one bucket must have one dtype, got {names}")
    return distinct.pop() if distinct else None


class _Tables:
    """The rows (dst, src, nbytes of src) and their chunks on a device, to pack or to unpack."""

    def __init__(self, device: int) -> None:
        self.nbytes = _words([])
        self._device = device
        self._ends = self._written = self.nbytes, self.nbytes
        self._chunks, self.blocks = chunks_of(self.nbytes), 0
        self._has_chunks = False
        self._image = self.nbytes
        self._memory: memory.DeviceArray | None = None

    def lay_out(self, nbytes: Words) -> None:
        """Begin with rows of so many bytes, whose addresses `move` gives."""
        self.nbytes, self._chunks, self._has_chunks = nbytes, chunks_of(nbytes), False
        self.blocks = len(self._chunks)

    def move(self, dst: Words, src: Words) -> None:
        """Take other addresses."""
        self._ends = dst, src

    def on_device(self, stream: int) -> tuple[int, int, int]:
        """Return (the rows' address, the chunks' address, the number of chunks)."""
        # Changed tables are copied to the device on the stream first.
        if self._ends is not self._written:
            self._write(stream)
        assert self._memory is not None
        return self._places_in(self._memory)

    def for_graph(self, stream: int) -> tuple[int, int, int]:
        """Return the same for a launch that is captured: tables that no later launch changes."""
        image = np.concatenate([self._rows(), self._chunks.reshape(-1)])
        made, mine = memory.reserve(image.shape, DType.INT64, self._device), Stream(self._device)
        with relaxed_capture_mode():
            _send(image, made, mine.handle)
            mine.synchronize()  # this copy alone, which is no part of the graph
        captured_graphs.keep(stream, self._device, lambda: made)
        return self._places_in(made)

    def _write(self, stream: int) -> None:
        image = self._rows()
        if not self._has_chunks:  # else only addresses have changed
            image = np.concatenate([image, self._chunks.reshape(-1)])
        if self._memory is None or self._memory.nbytes < image.nbytes:
            self._memory = memory.empty(image.size, DType.INT64, self._device)
        _send(image, self._memory, stream)
        self._image = image  # kept until the next write; by then the driver has copied it
        self._written, self._has_chunks = self._ends, True

    def _rows(self) -> Words:
        rows = np.empty((len(self.nbytes), 3), np.int64)
        rows[:, 0], rows[:, 1] = self._ends
        rows[:, 2] = self.nbytes
        return rows.reshape(-1)

    def _places_in(self, tables: memory.DeviceArray) -> tuple[int, int, int]:
        rows = tables.address
        return rows, rows + 3 * self.nbytes.nbytes, self.blocks


def _send(image: Words, tables: memory.DeviceArray, stream: int) -> None:
    call("cuMemcpyHtoDAsync", tables.address, image.ctypes.data, image.nbytes, stream)


def _words(words: Sequence[int]) -> Words:
    return np.array(words, np.int64)
