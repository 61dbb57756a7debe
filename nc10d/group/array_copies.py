"""Arrays like a caller's, from any library, on their own device: copies, new arrays, parts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import numpy as np

from nc10d.arrays.arguments import check_output
from nc10d.arrays.buffer import as_buffer, device_type
from nc10d.arrays.fields import records_of
from nc10d.arrays.interop import numpy_view
from nc10d.base.run_to_end import import_to_end
from nc10d.group.collectives import Collectives
from nc10d.ops import SUM, Array, ReduceOp


def copy_of(x: Array) -> Array:
    """Return a contiguous copy: an ndarray, or a DeviceArray whose copying is queued.

    TypeError if `x` is no array; ValueError for a device array that is not contiguous.
    """
    if type(x) is np.ndarray:
        return x.copy()
    buffer = as_buffer(x)
    if buffer.device == "cpu":
        return buffer.as_numpy().copy()
    return _device_memory().copy_of(x)


def new_array(x: Array, shape: Sequence[int]) -> Array:
    """Return an array with undefined contents, with the library, dtype and device of `x`.

    A CUDA array whose library is not known gets a DeviceArray. TypeError if there is no such array.
    """
    if hasattr(x, "new_empty"):  # torch's tensors
        return x.detach().new_empty(tuple(shape))
    if isinstance(x, np.ndarray):
        return np.empty(tuple(shape), x.dtype)
    make = _MAKERS.get(type(x).__module__.partition(".")[0])
    if make is not None and device_type(x) == "cuda":
        return make(x, tuple(shape))
    if hasattr(x, "__array_namespace__"):
        return x.__array_namespace__().empty(tuple(shape), dtype=x.dtype, device=x.device)
    buffer = as_buffer(x)
    if buffer.device != "cuda":
        raise TypeError(f"expected an array that can make another one, got {type(x).__name__}")
    memory = _device_memory()
    return memory.empty(tuple(shape), buffer.dtype, memory.device_of(x))


def _new_of_numba(x: Array, shape: tuple[int, ...]) -> Array:
    cuda = sys.modules["numba.cuda"]
    with cuda.gpus[_device_memory().device_of(x)]:
        return cuda.device_array(shape, x.dtype)


def _new_of_cupy(x: Array, shape: tuple[int, ...]) -> Array:
    cupy = sys.modules["cupy"]
    with x.device:
        return cupy.empty(shape, x.dtype)


_MAKERS: dict[str, Callable[[Array, tuple[int, ...]], Array]] = {
    "numba": _new_of_numba,
    "cupy": _new_of_cupy,
}
"""By library: makes an array on another array's device, with the same dtype."""


def assign(target: Array, source: Array) -> None:
    """Copy `source` to `target`, which has the same library, shape and dtype.

    ValueError for a device array that is not contiguous, unless its library can copy it.
    """
    raw = device_type(source) == "cuda" and not hasattr(source, "new_empty")
    if raw and type(source).__module__.partition(".")[0] != "cupy":
        _device_memory().copy_to(target, source)
    else:
        target[...] = source.detach() if hasattr(source, "detach") else source


def equal_parts(x: Array, dim: int, count: int) -> list[Array]:
    """Cut `x` into equal views along a dimension, in order."""
    step = x.shape[dim] // count
    if device_type(x) == "cuda" and not hasattr(x, "new_empty"):
        return _device_parts(x, dim, step, count)
    before = (slice(None),) * dim
    return [x[(*before, slice(i * step, (i + 1) * step))] for i in range(count)]


def _device_parts(x: Array, dim: int, step: int, count: int) -> list[Array]:
    # Not every library can cut device arrays along any dimension.
    whole, memory = as_buffer(x), _device_memory()
    shape = (*whole.shape[:dim], step, *whole.shape[dim + 1 :])
    return [memory.DeviceView(x, shape, i * step * whole.strides[dim]) for i in range(count)]


def copy_array(target: Array, source: Array) -> None:
    """Copy the elements of `source` to `target`, in C order; on a device, copying is queued.

    The arrays have been checked: as many elements with the same dtype on the same kind of device.
    """
    if type(target) is type(source) is np.ndarray and target.shape == source.shape:
        np.copyto(target, source)
        return
    if as_buffer(target).device != "cpu":
        _device_memory().copy_to(target, source)
        return
    to, of = numpy_view(target), numpy_view(source)
    np.copyto(to, of.reshape(to.shape))


def fill_output(call: str, group: Collectives, out: Array, x: Array, op: ReduceOp) -> Array:
    """Copy `x` to `out`, where `call` reduces it in place; return `out`.

    ValueError or TypeError, with nothing changed, unless `out` is an array like `x` apart from it,
    and `op` a reduction of its dtype; ValueError inside a coalescing block.
    """
    if group.in_batch():  # an earlier call in the block may compute `x`
        raise ValueError(f"{call}: out is not possible inside a coalescing block: copy, and reduce")
    plain = type(x) is type(out) is np.ndarray and x.dtype is out.dtype and x.shape == out.shape
    summed = plain and op is SUM and x.dtype.kind in "fiu" and x.dtype.itemsize <= 8
    if not (summed and out.flags.carray and not np.may_share_memory(x, out)):
        if isinstance(out, tuple) != isinstance(x, tuple):
            raise TypeError(f"{call}: out must be a tuple where tensor is, and an array otherwise")
        check_output(call, records_of(out, op), records_of(x, op), op)
    for target, source in zip(out, x, strict=True) if isinstance(x, tuple) else [(out, x)]:
        copy_array(target, source)
    return out


def _device_memory() -> Array:
    # Imported late: jobs without a device do without the driver.
    return import_to_end("nc10d.cuda.memory")
