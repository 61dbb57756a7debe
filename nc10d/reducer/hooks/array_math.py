"""Arithmetic for hooks that compute: NumPy's on the CPU, a framework's on its devices.

Contract: a hook asks `math_of(bucket)` and hands over arrays of that kind alone. On a device all
work is queued on the current stream, and the host waits for nothing. A framework registers its
arithmetic in `MATHS`; arrays of other types on a device are refused with a TypeError.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from nc10d.arrays.buffer import as_buffer
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


HOST = HostMath()
MATHS: dict[type, Callable[[Any], Any]] = {}
"""For a type of arrays, the arithmetic of the device of an array, with HostMath's methods."""


def math_of(bucket: GradBucket) -> Any:
    """Return the arithmetic for a bucket; TypeError if it is sparse, or on a device without one."""
    flat = bucket.flat()
    if as_buffer(flat).device in HOSTS:
        return HOST
    found = MATHS.get(type(flat))
    if found is None:
        return bucket.on_host()  # raises the error that names the device and other hooks
    return found(flat)
