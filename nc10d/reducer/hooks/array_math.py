"""Arithmetic for hooks that compute: NumPy's on the CPU, a framework's on its devices.

Contract: a hook asks `math_of(bucket)`, hands over arrays of that kind alone, calls the group that
`group_of` returns, and ends with `result`. A framework registers its arithmetic in `MATHS`: all
work is queued on the current stream of the device, and the host waits for nothing. Other arrays on
a device are copied to the host, computed and reduced there, and copied back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from nc10d.arrays.buffer import as_buffer
from nc10d.cuda import memory
from nc10d.group.host_calls import on_host
from nc10d.group.process_group import ProcessGroup
from nc10d.ops import Array
from nc10d.reducer.hooks.grad_bucket import GradBucket
from nc10d.work import Future, Work, collect_all

STEPS = 255
"""Steps between the smallest and the largest value of a channel in 8 bits."""
HEAD = 8
"""Bytes of a channel's scale and zero point."""
HOSTS = {"cpu"}
"""Kinds of devices whose memory NumPy reads."""


class HostMath:
    """NumPy's arithmetic."""

    def array(self, x: Any) -> Array:
        """Return the array on which the other methods work, in the memory of `x`."""
        return as_buffer(x).as_numpy()

    def group_of(self, group: ProcessGroup) -> Any:
        """Return what reduces the arrays of this arithmetic over a group."""
        return group

    def result(self, bucket: GradBucket) -> Array:
        """Return the bucket's buffer, into which the results have been written."""
        return bucket.buffer()

    def wide(self, arrays: Sequence[Array]) -> Any:
        """Return the dtype in which these arrays are computed: float32, or float64 if one is."""
        return np.float64 if any(x.dtype == np.float64 for x in arrays) else np.float32

    def zeros(self, count: int, dtype: Any) -> Array:
        """Return a flat array of zeros."""
        return np.zeros(count, dtype)

    def copy(self, x: Array, dtype: Any = None) -> Array:
        """Return a copy, in another dtype if one is given."""
        return x.astype(dtype or x.dtype)

    def joined(self, arrays: Sequence[Array]) -> Array:
        """Return a flat copy of all arrays, in their own dtype."""
        return np.concatenate([x.reshape(-1) for x in arrays]) if arrays else np.zeros(0, "f4")

    def fill(self, columns: Array, values: np.ndarray[Any, Any]) -> None:
        """Replace columns of zeros by those of `values`."""
        empty = ~columns.any(axis=0)
        columns[:, empty] = values[:, empty]

    def length(self, column: Array, epsilon: float) -> Any:
        """Return the length of a column plus `epsilon`, or 1 if that is zero."""
        return (np.linalg.norm(column) + epsilon) or 1

    def multiply(self, a: Array, b: Array, out: Array) -> None:
        """Write the product of two matrices."""
        np.matmul(a, b, out=out)

    def after(self, bucket: GradBucket, works: Sequence[Work], step: Callable[[], Any]) -> Any:
        """Return the Future of `step()`, which follows all Works."""

        def end(ended: Future[list[Future[Any]]]) -> Any:
            for part in ended.value():
                part.value()
            return step()

        return collect_all([work.get_future() for work in works]).then(end)

    def messages(self, count: int, nbytes: int) -> Array:
        """Return memory for as many messages."""
        return np.zeros((count, nbytes), np.uint8)

    def encode(self, values: Array, width: int) -> Array:
        """Return values in 8 bits, in channels of `width` elements; see `quantization`."""
        channels = -(-values.size // width)
        rows = np.zeros((channels, width), np.float32)
        rows.reshape(-1)[: values.size] = values
        low, high = np.minimum(rows.min(1), 0), np.maximum(rows.max(1), 0)
        scale = ((high - low) / np.float32(STEPS)).astype(np.float32)
        scale[scale == 0] = 1
        zero = np.clip(np.rint(-low / scale), 0, STEPS).astype(np.float32)
        codes = np.clip(np.rint(rows / scale[:, None]) + zero[:, None], 0, STEPS).astype(np.uint8)
        head = np.stack([scale, zero], 1).view(np.uint8)
        return np.concatenate([head.reshape(-1), codes.reshape(-1)[: values.size]])

    def decode(self, message: Array, count: int, width: int) -> Array:
        """Return the `count` float32 values of a message."""
        channels = -(-count // width)
        scale, zero = message[: HEAD * channels].view(np.float32).reshape(-1, 2).T
        codes = message[HEAD * channels :].astype(np.float32)
        of = np.arange(count) // width
        return np.asarray((codes - zero[of]) * scale[of])


class CopiedMath(HostMath):
    """NumPy's arithmetic on a copy of a device array."""

    def __init__(self) -> None:
        self._copy: Array | None = None

    def array(self, x: Any) -> Array:
        """Return a copy in host memory; blocks until the work queued before is done."""
        memory.synchronize_stream(memory.current_stream_key(x))
        self._copy = memory.to_host(x)
        return self._copy

    def group_of(self, group: ProcessGroup) -> Any:
        """Return what reduces host arrays over the group."""
        return on_host(group)

    def result(self, bucket: GradBucket) -> Array:
        """Copy the results to the bucket's buffer, and return it; blocks until that is done."""
        buffer = bucket.buffer()
        assert self._copy is not None, "the hook has asked for the array"
        memory.write_now(buffer, self._copy)
        return buffer


HOST = HostMath()
MATHS: dict[type, Callable[[Any], Any]] = {}
"""For a type of arrays, the arithmetic of the device of an array, with HostMath's methods."""


def math_of(bucket: GradBucket) -> Any:
    """Return the arithmetic for a bucket; TypeError if it is sparse."""
    flat = bucket.flat()
    if as_buffer(flat).device in HOSTS:
        return HOST
    found = MATHS.get(type(flat))
    return CopiedMath() if found is None else found(flat)
