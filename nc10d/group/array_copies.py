"""Copies of a caller's arrays, of any library, on their own device."""

from __future__ import annotations

from typing import Any

import numpy as np

from nc10d.arrays.buffer import as_buffer
from nc10d.arrays.interop import numpy_view
from nc10d.ops import Array


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
    if as_buffer(target).device != "cpu":
        _device_memory().copy_to(target, source)
        return
    to, of = numpy_view(target), numpy_view(source)
    np.copyto(to, of.reshape(to.shape))


def _device_memory() -> Any:
    from nc10d.cuda import memory  # imported late: jobs without a device do without the driver

    return memory
