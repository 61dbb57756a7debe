"""Arithmetic for hooks that compute: NumPy's on the CPU, a framework's on its devices.

Contract: a hook asks `math_of(bucket)`, hands over arrays of that kind alone, calls the group that
`group_of` returns, and ends with `result`. A framework registers its arithmetic in `MATHS`: all
work is queued on the device's current stream, and the host waits for nothing. Other arrays on a
device are copied to the host, computed and reduced there, and copied back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from nc10d.arrays.buffer import as_buffer
from nc10d.cuda import memory
from nc10d.group.host_calls import HostCalls, on_host
from nc10d.group.process_group import ProcessGroup
from nc10d.ops import Array
from nc10d.reducer.hooks.grad_bucket import GradBucket
from nc10d.work import Future, Work, collect_all

T = TypeVar("T")
STEPS = 255
"""Steps between a channel's smallest and largest value in 8 bits."""
HEAD = 8
"""Bytes for a channel's scale and zero point."""
HOSTS = {"cpu"}
"""Device types whose memory NumPy reads."""


class ArrayMath:
    """NumPy's arithmetic; a subclass has another library `xp` with functions by these names."""

    xp: Any = np

    def array(self, x: Array) -> Array:
        """Return the array on which the other methods work, in the memory of `x`."""
        return as_buffer(x).as_numpy()

    def group_of(self, group: ProcessGroup) -> ProcessGroup | HostCalls:
        """Return an object that reduces this arithmetic's arrays over a group."""
        return group

    def result(self, bucket: GradBucket) -> Array:
        """Return the bucket's buffer, into which the results have been written."""
        return bucket.buffer()

    def wide(self, arrays: Sequence[Array]) -> object:
        """Return the dtype in which these arrays are computed: float32, or float64 if one is."""
        wide = self.xp.float64
        return wide if any(x.dtype == wide for x in arrays) else self.xp.float32

    def zeros(self, count: int, dtype: object) -> Array:
        """Return a flat array of zeros."""
        return self.xp.zeros(count, dtype=dtype)

    def copy(self, x: Array, dtype: object = None) -> Array:
        """Return a copy, in another dtype if one is given."""
        return x.astype(dtype or x.dtype)

    def joined(self, arrays: Sequence[Array]) -> Array:
        """Return a flat copy of all arrays, in their own dtype."""
        if not arrays:
            return self.zeros(0, self.xp.float32)
        return self.xp.concatenate([x.reshape(-1) for x in arrays])

    def fill(self, columns: Array, values: Array) -> None:
        """Replace columns of zeros by the columns of `values`, a NumPy array."""
        columns[...] = self.xp.where((columns != 0).any(0), columns, values)

    def length(self, column: Array, epsilon: float) -> Array:
        """Return a column's length plus `epsilon`, or 1 if that is zero."""
        found = self.xp.linalg.norm(column) + epsilon
        return self.xp.where(found == 0, self.xp.ones_like(found), found)

    def multiply(self, a: Array, b: Array, out: Array) -> None:
        """Write two matrices' product."""
        self.xp.matmul(a, b, out=out)

    def after(self, bucket: GradBucket, works: Sequence[Work], step: Callable[[], T]) -> Future[T]:
        """Return the Future for `step()`, which follows all Works."""

        def end(ended: Future[list[Future[Any]]]) -> T:
            for part in ended.value():
                part.value()
            return step()

        return collect_all([work.get_future() for work in works]).then(end)

    def messages(self, count: int, nbytes: int) -> Array:
        """Return memory for as many messages."""
        return self.zeros(count * nbytes, self.xp.uint8).reshape(count, nbytes)

    def encode(self, values: Array, width: int) -> Array:
        """Return values in 8 bits, in channels of `width` elements; see `quantization`."""
        xp, count = self.xp, len(values)
        rows = self._rows(values, count, width)
        low, high = xp.clip(xp.amin(rows, 1), None, 0), xp.clip(xp.amax(rows, 1), 0, None)
        scale = (high - low) / STEPS
        scale = xp.where(scale == 0, xp.ones_like(scale), scale)
        zero = xp.clip(xp.round(-low / scale), 0, STEPS)
        codes = xp.clip(xp.round(rows / scale[:, None]) + zero[:, None], 0, STEPS)
        head = xp.stack([scale, zero], 1).view(xp.uint8)
        return xp.concatenate([head.reshape(-1), self.copy(codes, xp.uint8).reshape(-1)[:count]])

    def decode(self, message: Array, count: int, width: int) -> Array:
        """Return the `count` float32 values in a message."""
        end = HEAD * -(-count // width)
        # Another rank's message begins anywhere: a copy can be viewed as floats.
        head = self.copy(message[:end]).view(self.xp.float32).reshape(-1, 2)
        rows = self._rows(message[end:], count, width)
        return ((rows - head[:, 1:]) * head[:, :1]).reshape(-1)[:count]

    def _rows(self, values: Array, count: int, width: int) -> Array:
        """Return values as float32 in rows of `width`; zeros fill up the last row."""
        channels = -(-count // width)
        rows = self.zeros(channels * width, self.xp.float32)
        rows[:count] = values
        return rows.reshape(channels, width)


class CopiedMath(ArrayMath):
    """NumPy's arithmetic on a copied device array."""

    def __init__(self) -> None:
        self._copy: Array | None = None

    def array(self, x: Array) -> Array:
        """Return a copy in host memory; blocks until the work queued before is done."""
        memory.synchronize_stream(memory.current_stream_key(x))
        self._copy = memory.to_host(x)
        return self._copy

    def group_of(self, group: ProcessGroup) -> ProcessGroup | HostCalls:
        """Return what reduces host arrays over the group."""
        return on_host(group)

    def result(self, bucket: GradBucket) -> Array:
        """Copy the results to the bucket's buffer, and return it; blocks until that is done."""
        buffer = bucket.buffer()
        assert self._copy is not None, "the hook has asked for the array"
        memory.write_now(buffer, self._copy)
        return buffer


HOST = ArrayMath()
MATHS: dict[type, Callable[[Array], ArrayMath]] = {}
"""For an array type, the arithmetic on an array's device, with ArrayMath's methods."""


def math_of(bucket: GradBucket) -> ArrayMath:
    """Return the arithmetic for a bucket; TypeError if it is sparse."""
    flat = bucket.flat()
    if as_buffer(flat).device in HOSTS:
        return HOST
    found = MATHS.get(type(flat))
    return CopiedMath() if found is None else found(flat)
