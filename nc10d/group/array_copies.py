"""Copies of a caller's arrays, of any library, on their own device."""

from __future__ import annotations

from typing import Any

import numpy as np

from nc10d.arrays.arguments import check_output
from nc10d.arrays.buffer import as_buffer
from nc10d.arrays.interop import numpy_view
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
    memory = _device_memory()
    twin = memory.empty(buffer.shape, buffer.dtype, memory.device_of(x))
    memory.copy_to(twin, x)
    return twin


def copy_array(target: Array, source: Array) -> None:
    """Copy the elements of `source` to `target`, in C order; on a device, copying is queued.

    The arrays have been checked: as many elements of the same dtype on the same kind of device.
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
    if group.in_batch():  # an earlier call of the block may be what computes `x`
        raise ValueError(f"{call}: out is not possible inside a coalescing block: copy, and reduce")
    plain = type(x) is type(out) is np.ndarray and x.dtype is out.dtype and x.shape == out.shape
    summed = plain and op is SUM and x.dtype.kind in "fiu" and x.dtype.itemsize <= 8
    if not (summed and out.flags.carray and not np.may_share_memory(x, out)):
        check_output(call, out, x, op)
    copy_array(out, x)
    return out


def _device_memory() -> Any:
    from nc10d.cuda import memory  # imported late: jobs without a device do without the driver

    return memory
