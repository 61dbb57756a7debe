"""Arrays as memory: address, count, dtype and device of any library's array.

`as_buffer` looks the type up: NumPy arrays, a framework's types that its adapter has registered,
`__cuda_array_interface__`, then the ways in which host arrays show their memory (arrays.exporters).
A Buffer keeps the owner alive and copies nothing; making one never waits for a device.

A Buffer describes its caller's memory, or there is no Buffer: an array whose elements have no
memory is a TypeError. Subclasses of ndarray are treated as plain memory (np.matrix, np.memmap);
masked arrays are refused, because the mask would be lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from nc10d.arrays import intervals
from nc10d.arrays.dtypes import ElementType, element_of
from nc10d.arrays.exporters import host_view


@dataclass(frozen=True, slots=True)
class Buffer:
    """An array's memory. `count` is in elements, `strides` in bytes; `address` is element 0's."""

    address: int
    count: int
    dtype: ElementType
    device: str
    owner: object
    writable: bool
    contiguous: bool
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The bytes of all elements, without gaps between them."""
        return self.count * self.dtype.itemsize

    @property
    def span(self) -> tuple[int, int]:
        """The elements' address range: first address, and first address behind the range."""
        if not self.count:
            return self.address, self.address
        steps = [(n - 1) * step for n, step in zip(self.shape, self.strides, strict=True)]
        low = sum(step for step in steps if step < 0)
        high = sum(step for step in steps if step > 0)
        return self.address + low, self.address + high + self.dtype.itemsize

    @property
    def repeats(self) -> bool:
        """Whether elements share bytes, as in a broadcast view or a sliding window."""
        # Sorted by stride, each dimension must step over the extent of the smaller dimensions. That
        # holds for every slice, transpose or reshape of an array. A hand-made layout that
        # interleaves dimensions without a collision counts as sharing too.
        if self.contiguous or not self.count:
            return False
        reach = self.dtype.itemsize
        steps = zip(self.strides, self.shape, strict=True)
        for step, n in sorted((abs(step), n) for step, n in steps if n > 1):
            if step < reach:
                return True
            reach += (n - 1) * step
        return False

    def as_numpy(self) -> npt.NDArray[Any]:
        """Return an ndarray that keeps the same memory alive; TypeError off the CPU."""
        if self.device != "cpu":
            raise TypeError(f"memory on {self.device} can't be seen as a NumPy array")
        if isinstance(self.owner, np.ndarray):
            return np.asarray(self.owner)
        return np.asarray(_Memory(self)).view(self.dtype.numpy)


class _Memory:
    """A Buffer with NumPy's array interface, as untyped bytes: NumPy may not know the dtype."""

    __slots__ = ("__array_interface__", "_buffer")

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer  # NumPy keeps this object as the array's base
        self.__array_interface__ = {
            "version": 3,
            "typestr": f"|V{buffer.dtype.itemsize}",
            "data": (buffer.address, not buffer.writable),
            "shape": buffer.shape,
            "strides": buffer.strides,
        }


_LOWEST_ADDRESS = 4096  # no program has memory below, on Linux
Resolver = Callable[[Any], Buffer]
_resolvers: dict[type, Resolver] = {}
_devices: dict[type, Callable[[Any], str]] = {}
_families: set[type] = set()
single_device_types: set[type] = set()
"""Array types whose arrays are all on the same kind of device."""


def register(
    kind: type,
    resolve: Resolver,
    device: str | Callable[[Any], str] | None = None,
    subclasses: bool = False,
) -> None:
    """Resolve arrays whose type is exactly `kind`, or a subclass too, by `resolve`.

    `device(x)` returns just the device type ("cpu", "cuda"), cheaply. `device` is a str if all such
    arrays are on that type of device. Without `device`, the Buffer is made to find out.
    """
    _resolvers[kind] = resolve
    if subclasses:
        _families.add(kind)
    if isinstance(device, str):
        single_device_types.add(kind)
        _devices[kind] = lambda _: device
    else:
        _devices[kind] = device or (lambda x: resolve(x).device)


def _family(x: object) -> type | None:
    """Return the type that has been registered with its subclasses and has `x` among them."""
    return next((kind for kind in type(x).__mro__ if kind in _families), None)


def _register_by_name(x: object) -> bool:
    """Register an array's type if `_RESOLVERS_BY_NAME` has it; return whether it does."""
    kind = type(x)
    resolve = _RESOLVERS_BY_NAME.get((kind.__module__.partition(".")[0], kind.__name__))
    if resolve is not None:
        register(kind, resolve, "cuda")
    return resolve is not None


def as_buffer(x: object) -> Buffer:
    """Return the memory of `x`; TypeError if it is no array, or its dtype can't be sent."""
    resolve = _resolvers.get(type(x))
    if resolve is None:
        resolve = _resolver_for(x)
    return resolve(x)


def device_type(x: object) -> str:
    """Return the device type ("cpu", "cuda") of an array, or of a list's first array."""
    find = _devices.get(type(x))
    if find is not None:
        return find(x)
    if isinstance(x, (list, tuple)):
        # An empty list or None is an error that the CPU's checks report.
        return device_type(x[0]) if x else "cpu"
    return _guess_device(x)


def _guess_device(x: object) -> str:
    family = _family(x)
    if family is not None:
        return _devices[family](x)
    if isinstance(x, (np.ndarray, type)):  # a class has its instances' methods, but is no array
        return "cpu"
    if hasattr(x, "__cuda_array_interface__"):
        return "cuda"
    if hasattr(x, "__dlpack_device__"):
        try:
            return _DLPACK_DEVICES.get(int(x.__dlpack_device__()[0]), "unknown")
        except (BufferError, RuntimeError, TypeError, ValueError):
            return "unknown"
    return "cpu"


def _resolver_for(x: object) -> Resolver:
    if isinstance(x, type):
        raise TypeError(f"expected an array, got the class {x.__name__}: pass an instance of it")
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError("masked arrays can't be communicated: pass x.data, and the mask by itself")
    if isinstance(x, np.ndarray):
        # Owned by `x` itself: a subclass may redefine attributes.
        return lambda x: replace(_resolve_numpy(np.asarray(x)), owner=x)
    family = _family(x)
    if family is not None:
        return _resolvers[family]
    if hasattr(x, "__cuda_array_interface__"):
        return _resolvers[type(x)] if _register_by_name(x) else _resolve_cuda
    return _resolve_exported


def _resolve_numpy(x: np.ndarray[Any, Any]) -> Buffer:
    dtype = element_of(x.dtype)
    flags = x.flags
    contiguous = flags.c_contiguous
    return Buffer(
        x.ctypes.data, x.size, dtype, "cpu", x, flags.writeable, contiguous, x.shape, x.strides
    )


def _with_memory(found: Buffer) -> Buffer:
    """Return `found`; TypeError if the elements lie at a null pointer, or at an offset to null."""
    if found.count and found.span[0] < _LOWEST_ADDRESS:
        raise TypeError("the array has elements, but no memory: its library gives a null pointer")
    return found


def _resolve_cuda(x: Any) -> Buffer:
    """Read `__cuda_array_interface__`, version 2 or 3 (Numba's specification)."""
    interface = x.__cuda_array_interface__
    dtype = element_of(np.dtype(interface["typestr"]))
    shape = tuple(interface["shape"])
    packed = packed_strides(shape, dtype.itemsize)
    strides = tuple(interface.get("strides") or packed)
    (address, read_only), count = interface["data"], prod(shape)
    contiguous = is_packed(shape, strides, packed)
    found = Buffer(address, count, dtype, "cuda", x, not read_only, contiguous, shape, strides)
    return _with_memory(found)


def _resolve_numba(x: Any) -> Buffer:
    address = x.device_ctypes_pointer.value or 0  # ctypes reads a null pointer as None
    contiguous = x.flags["C_CONTIGUOUS"] or not x.size
    dtype = element_of(x.dtype)
    return Buffer(address, x.size, dtype, "cuda", x, True, contiguous, x.shape, x.strides)


def _resolve_cupy(x: Any) -> Buffer:
    contiguous, dtype = x.flags.c_contiguous, element_of(x.dtype)
    return Buffer(x.data.ptr, x.size, dtype, "cuda", x, True, contiguous, x.shape, x.strides)


_RESOLVERS_BY_NAME = {
    ("numba", "DeviceNDArray"): _resolve_numba,
    ("cupy", "ndarray"): _resolve_cupy,
}
"""CUDA arrays from libraries that need not be imported, by package and type.

Their attributes give the same Buffer as `__cuda_array_interface__`, and faster.
"""
# The device types in the DLPack specification (dlpack.h) that name host or CUDA memory.
_DLPACK_DEVICES = {1: "cpu", 2: "cuda", 3: "cpu", 13: "cuda"}


def _resolve_exported(x: object) -> Buffer:
    device = _guess_device(x)
    if device != "cpu":
        kind = type(x).__name__
        raise TypeError(f"{kind} on {device}: its library must have __cuda_array_interface__")
    return _with_memory(_resolve_numpy(host_view(x)))


def packed_strides(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Return a C-contiguous array's strides."""
    strides: list[int] = []
    step = itemsize
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


def is_packed(shape: Sequence[int], strides: Sequence[int], packed: Sequence[int]) -> bool:
    """Return whether an array is C-contiguous: a dimension with length 1 may have any stride."""
    if 0 in shape:
        return True
    return all(n == 1 or s == p for n, s, p in zip(shape, strides, packed, strict=True))


def overlap(a: Buffer, b: Buffer) -> bool:
    """Return whether two arrays share a byte."""
    # Exact unless that is too expensive (np.shares_memory, which accesses no memory). Then arrays
    # whose spans overlap count as sharing.
    if a.device != b.device or not (a.count and b.count):
        return False
    if not intervals.intersect(a.span, b.span):
        return False
    if a.contiguous and b.contiguous:
        return True
    x, y = np.asarray(_Memory(a)), np.asarray(_Memory(b))
    try:
        return np.shares_memory(x, y, max_work=10_000)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


register(np.ndarray, _resolve_numpy, "cpu")
