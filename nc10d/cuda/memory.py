"""Device memory without a framework, for tests, staging and small programs.

A DeviceArray is contiguous. It has `__cuda_array_interface__`, so Numba, CuPy and torch can share
it without a copy.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import deque
from collections.abc import Set
from dataclasses import replace
from math import prod
from operator import attrgetter
from typing import Any, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt

from nc10d.arrays.buffer import Buffer, as_buffer, is_packed, packed_strides, register
from nc10d.arrays.dtypes import DType, ElementType, RecordType, element_of
from nc10d.cuda import streams
from nc10d.cuda.driver import call, current_device, device_at, inherited, on_device, ordinal
from nc10d.cuda.streams import StreamKey, stream_of

HostArray = np.ndarray[Any, np.dtype[Any]]
AnyDType: TypeAlias = ElementType | npt.DTypeLike


class DeviceArray:
    """A contiguous array with `shape` and `dtype` in a device's memory."""

    __slots__ = ("__weakref__", "address", "buffer", "device", "dtype", "owner", "shape")

    def __init__(
        self, address: int, shape: tuple[int, ...], dtype: ElementType, device: int, owner: object
    ) -> None:
        """Describe existing memory; `owner`, another object, keeps it alive."""
        self.address = address
        self.shape = shape
        self.dtype = dtype
        self.device = device
        self.owner = owner
        strides = packed_strides(shape, dtype.itemsize)
        self.buffer = Buffer(address, prod(shape), dtype, "cuda", owner, True, True, shape, strides)

    @property
    def nbytes(self) -> int:
        """The bytes of all elements."""
        return self.buffer.nbytes

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "version": 3,
            "shape": self.shape,
            "typestr": self.dtype.numpy.str,
            "data": (self.address, False),
            "strides": None,
            "stream": streams.LEGACY,
        }

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: slice | int) -> DeviceArray:
        """Return a row, or a slice (step 1) of rows, as an array on the same memory."""
        inner = self.shape[1:]
        if isinstance(index, slice):
            first, stop, step = index.indices(len(self))
            shape = (max(stop - first, 0), *inner)
        else:
            first, step, shape = index, 1, inner
        if step != 1 or (not isinstance(index, slice) and not 0 <= first < len(self)):
            raise IndexError(f"no such rows of {len(self)}: {index!r}")
        address = self.address + first * prod(inner) * self.dtype.itemsize
        return DeviceArray(address, shape, self.dtype, self.device, self.owner)

    def reshape(self, shape: tuple[int, ...]) -> DeviceArray:
        """Return an array with another shape and as many elements, on the same memory."""
        if prod(shape) != prod(self.shape):
            raise ValueError(f"{prod(self.shape)} elements can't have the shape {shape}")
        return DeviceArray(self.address, shape, self.dtype, self.device, self.owner)

    def __setitem__(self, index: object, source: object) -> None:
        """Queue a write to all elements: `x[...] = y`, a device array with the same count, or 0."""
        if index is not Ellipsis:
            raise IndexError(f"write to all of it: x[...] or x[3:5][...], not x[{index!r}]")
        if isinstance(source, (int, float)):
            fill(self, source)
        else:
            copy_to(self, source)

    def copy(self) -> DeviceArray:
        """Return a copy; copying is queued."""
        twin = empty(self.shape, self.dtype, self.device)
        copy_to(twin, self)
        return twin

    def fill_from(self, x: HostArray) -> None:
        """Copy a host array with the same shape and dtype to this array; blocks until done."""
        if (x.shape, element_of(x.dtype)) != (self.shape, self.dtype):
            raise ValueError(f"expected {self.dtype.label} {self.shape}, got {x.dtype} {x.shape}")
        if self.nbytes:
            packed = np.ascontiguousarray(x)
            with on_device(self.device):
                call("cuMemcpyHtoD", self.address, packed.ctypes.data, self.nbytes)

    def __array__(self, *_: object, **__: object) -> NoReturn:
        """Refuse NumPy's conversion, which would hide a copy: TypeError."""
        raise TypeError("a DeviceArray lies in device memory: x.to_host() returns a copy")

    def to_host(self) -> HostArray:
        """Return a copy in host memory; blocks until the work queued on the default stream is done.

        The caller must have waited for work on other streams.
        """
        return to_host(self)

    def __repr__(self) -> str:
        return f"<DeviceArray {self.shape} {self.dtype.label} on cuda:{self.device}>"


class DeviceView:
    """A part of any library's device array `owner`: the strides, from a first byte on."""

    __slots__ = ("__weakref__", "buffer", "owner")

    def __init__(self, owner: object, shape: tuple[int, ...], first: int) -> None:
        whole = as_buffer(owner)
        packed = packed_strides(shape, whole.dtype.itemsize)
        self.owner = owner
        self.buffer = replace(
            whole,
            address=whole.address + first,
            count=prod(shape),
            contiguous=is_packed(shape, whole.strides, packed),
            shape=shape,
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """The view's shape."""
        return self.buffer.shape


def empty(
    shape: int | tuple[int, ...], dtype: AnyDType = np.float32, device: object = None
) -> DeviceArray:
    """Return an array with undefined contents on a device (default: the current)."""
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    kind = dtype if isinstance(dtype, DType | RecordType) else element_of(np.dtype(dtype))
    return reserve(shape, kind, current_device() if device is None else ordinal(device))


def reserve(shape: tuple[int, ...], element: ElementType, device: int) -> DeviceArray:
    """Return an array as `empty` does; its memory never belongs to a graph that is captured."""
    with streams.relaxed_capture_mode(), on_device(device):
        mine = _allocating(device)
        # CUDA refuses to allocate 0 bytes, but an array may have no elements.
        address = int(call("cuMemAllocAsync", max(prod(shape) * element.itemsize, 1), mine.handle))
        mine.synchronize()  # other streams may use the array at once
    return DeviceArray(address, shape, element, device, _Allocation(device, address))


@functools.cache
def _allocating(device: int) -> streams.Stream:
    """Return the stream on which memory is allocated; programs don't know it, or capture it."""
    return streams.Stream(device)


def zeros(
    shape: int | tuple[int, ...], dtype: AnyDType = np.float32, device: object = None
) -> DeviceArray:
    """Return an array of zeros on a device (default: the current); see `empty`."""
    made = empty(shape, dtype, device)
    fill(made, 0)
    return made


def fill(x: DeviceArray, value: float) -> None:
    """Queue setting all elements to 0; another value is copied from the host, which blocks."""
    if value:
        x.fill_from(np.full(x.shape, value, x.dtype.numpy))
    elif x.nbytes:
        with on_device(x.device):
            call("cuMemsetD8Async", x.address, 0, x.nbytes, stream_of(x))


def copy_to(target: object, source: object) -> None:
    """Queue a copy of a device array to another; the arrays may belong to any library.

    The copy runs on the target's current stream, after work that is already queued on the current
    streams of both arrays. Work that is queued later on the source's stream, or on the default
    streams, runs after the copy: there the source may be overwritten and freed. (While a graph is
    captured, the source must be kept.)
    ValueError unless both are contiguous, of the same dtype and the same count.
    """
    to, of = as_buffer(target), as_buffer(source)
    alike = (to.count, to.dtype, to.device, of.device) == (of.count, of.dtype, "cuda", "cuda")
    if not (alike and to.writable and to.contiguous and of.contiguous):
        found = [f"{x.count} of {x.dtype.label} on {x.device}" for x in (to, of)]
        raise ValueError(f"copying needs contiguous device arrays alike, got {' and '.join(found)}")
    if to.count:
        here, there = current_stream_key(target), current_stream_key(source)
        streams.order_after(here, there)
        with on_device(here.device):
            call("cuMemcpyDtoDAsync", to.address, of.address, to.nbytes, here.stream)
        order_others_after(here, {there})


def copy_of(x: object) -> DeviceArray:
    """Return a copy of any library's contiguous device array; copying is queued."""
    buffer = as_buffer(x)
    twin = empty(buffer.shape, buffer.dtype, device_of(x))
    copy_to(twin, x)
    return twin


def bytes_now(x: object) -> HostArray:
    """Return the present bytes of a contiguous device array, in no stream's order."""
    buffer = as_buffer(x)
    found: HostArray = np.empty(buffer.nbytes, np.uint8)
    where = found.ctypes.data, buffer.address, buffer.nbytes
    _copy_alone("cuMemcpyDtoHAsync", device_of(x), *where)
    return found


def copy_now(target: object, source: object) -> None:
    """Copy a contiguous device array to another one alike, in no stream's order; blocks."""
    to, of = as_buffer(target), as_buffer(source)
    _copy_alone("cuMemcpyDtoDAsync", device_of(target), to.address, of.address, to.nbytes)


def write_now(target: object, x: HostArray) -> None:
    """Copy a host array to a contiguous device array alike, in no stream's order; blocks."""
    to, packed = as_buffer(target), np.ascontiguousarray(x)
    if (to.count, to.dtype) != (packed.size, element_of(packed.dtype)):
        raise ValueError(f"expected {to.count} of {to.dtype.label}, got {x.size} of {x.dtype}")
    _copy_alone("cuMemcpyHtoDAsync", device_of(target), to.address, packed.ctypes.data, to.nbytes)


def _copy_alone(function: str, device: int, to: int, source: int, nbytes: int) -> None:
    """Copy on a stream of its own; blocks until done."""
    if nbytes:
        mine = streams.Stream(device)
        with on_device(device):
            call(function, to, source, nbytes, mine.handle)
            mine.synchronize()


def synchronize_stream(key: StreamKey) -> None:
    """Block until everything queued on a stream is done."""
    with on_device(key.device):
        call("cuStreamSynchronize", key.stream)


def current_stream_key(x: object, device: int | None = None) -> StreamKey:
    """Return an array's current stream, with its device, which is looked up if not given."""
    # The handle 0 means LEGACY too.
    return StreamKey(stream_of(x) or streams.LEGACY, device_of(x) if device is None else device)


def order_others_after(here: StreamKey, others: Set[StreamKey]) -> None:
    """Make `others`, and their devices' default streams, wait for work queued on `here`."""
    # Memory is freed in default streams' order. While a graph is captured, this does nothing.
    if not in_capture(here):
        devices = {here.device, *(key.device for key in others)}
        for key in {*others, *(StreamKey(streams.LEGACY, device) for device in devices)}:
            streams.order_after(key, here)


def in_capture(key: StreamKey) -> bool:
    """Return whether work queued on a stream becomes part of a graph."""
    return key.stream > streams.LEGACY and streams.is_captured(key.stream, key.device)


class _Allocation:
    """Memory that is freed with its last array; at the process's end the driver frees it."""

    __slots__ = ("__weakref__",)

    def __init__(self, device: int, address: int) -> None:
        weakref.finalize(self, _free, device, address).atexit = False


_dropped: deque[tuple[int, int]] = deque()
"""The devices and addresses of memory to free. Any thread may run finalizers, so it has no lock."""


def _free(device: int, address: int) -> None:
    # Free in the default stream's order. cuMemFree would wait for the whole device, which may
    # itself wait for messages that this process has yet to send. While a blocking stream is
    # captured, the default stream takes no work: the next call frees the memory, too.
    if inherited():
        return
    _dropped.append((device, address))
    with contextlib.suppress(IndexError):  # another thread frees the rest
        while True:
            device, address = dropped = _dropped.pop()
            if streams.is_captured(streams.LEGACY, device):
                _dropped.append(dropped)
                return
            with on_device(device):
                call("cuMemFreeAsync", address, streams.LEGACY)


def to_device(x: HostArray, device: object = None) -> DeviceArray:
    """Return a copy of a host array in device memory; blocks until done."""
    x = np.asarray(x)
    array = empty(x.shape, x.dtype, device)
    array.fill_from(x)
    return array


def to_host(x: object) -> HostArray:
    """Return a copy of any contiguous device array in host memory; blocks until done."""
    buffer = as_buffer(x)
    if not buffer.contiguous:
        raise TypeError("only contiguous device arrays can be copied to the host")
    result: HostArray = np.empty(buffer.shape, buffer.dtype.numpy)
    if buffer.nbytes:
        with on_device(device_of(x)):
            call("cuMemcpyDtoH", result.ctypes.data, buffer.address, buffer.nbytes)
    return result


def device_of(x: object) -> int:
    """Return the number of an array's device."""
    if isinstance(x, DeviceArray):
        return x.device
    buffer = as_buffer(x)
    # An array without elements may have no address at all.
    return device_at(buffer.address) if buffer.address else current_device()


register(DeviceArray, attrgetter("buffer"), "cuda")
register(DeviceView, attrgetter("buffer"), "cuda")
streams.register_stream(DeviceArray, streams.LEGACY)
streams.register_stream(DeviceView, lambda view: stream_of(view.owner))
