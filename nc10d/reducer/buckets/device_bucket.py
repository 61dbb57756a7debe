"""A dense bucket on a device: a single kernel packs the gradients, another unpacks the means.

Contract: as `bucket.Bucket`, in stream order. No call blocks the host, unless the backend needs
other ranks first. Any thread may mark a gradient, on any stream; the launch waits on the device for
all these streams. The caller's own arrays are read at the launch: until the pass is finished, the
caller leaves them unchanged and keeps their streams alive. The means are ready on the finishing
thread's current stream, and on the arrays' streams.
"""

# ruff: noqa: D102  (the base classes document the methods)
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nc10d.arrays.buffer import as_buffer
from nc10d.arrays.dtypes import DType, scalar
from nc10d.cuda.memory import current_stream_key, device_of, order_others_after
from nc10d.cuda.streams import StreamKey, order_after
from nc10d.group.process_group import ProcessGroup
from nc10d.ops import Array
from nc10d.reducer.buckets.bucket import Bucket
from nc10d.reducer.device_packing import DevicePacker
from nc10d.reducer.hooks.deferred_future import OrderedFuture
from nc10d.reducer.hooks.grad_bucket import CommHook, Step, averaging_factor
from nc10d.reducer.plan import BucketPlan
from nc10d.work import Future, Work


class DeviceBucket(Bucket):
    """A bucket of device arrays; `take` accepts arrays on the same device."""

    def __init__(self, index: int, plan: BucketPlan, *more: Any) -> None:
        self.device = plan.device
        self._offsets = {p: s.offset for p, s in zip(plan.params, plan.slots, strict=True)}
        self._packers: dict[tuple[str, DType], DevicePacker] = {}
        self._streams: set[StreamKey] = set()
        self._launch_stream: StreamKey | None = None
        self._unpacked = False
        self._kept_flat: Array | None = None
        super().__init__(index, plan, *more)
        self._ordinal = device_of(self.memory)

    def keep(self, params: Sequence[int]) -> None:
        """Enqueue a copy of the current gradients of these parameters."""
        if params:
            self._keeping_packer(params).pack()
            self._streams.add(self._current_stream())

    def restore(self, params: Sequence[int]) -> None:
        if params:
            self._keeping_packer(params).unpack()

    def _keeping_packer(self, params: Sequence[int]) -> DevicePacker:
        if self._kept_flat is None:
            self._kept_flat = self._allocate(len(self.memory), as_buffer(self.memory).dtype.numpy)
        return self._packer("keep", self._kept_flat, {param: self.views[param] for param in params})

    def take(
        self, param: int, gradient: Array | None, divisor: int = 0, divided: bool = False
    ) -> None:
        """Record a gradient and the stream that computes it."""
        array = self.memory if gradient is None else gradient
        self._streams.add(current_stream_key(array, self._ordinal))
        if gradient is not None:
            self._given[param] = gradient
            self._unpacked = True

    def launch(self, hook: CommHook, state: object) -> None:
        """Call the hook on a stream that follows all gradients' streams."""
        self._launch_stream = here = self._current_stream()
        for stream in self._streams:
            order_after(here, stream)
        super().launch(hook, state)

    def wait(self) -> None:
        """Order the current stream behind the launch; enqueue copying the result to the views."""
        launched_on, self._launch_stream = self._launch_stream, None
        if launched_on is not None:
            order_after(self._current_stream(), launched_on)
        super().wait()

    def end(self, reduced: bool) -> None:
        """Do as `Bucket.end`, and order the arrays' streams behind the means."""
        super().end(reduced)
        streams, self._streams, self._unpacked = self._streams, set(), False
        # Also after a failure: a launched operation may still write on the device.
        order_others_after(self._current_stream(), streams)

    def _current_stream(self) -> StreamKey:
        return current_stream_key(self.memory, self._ordinal)

    def buffer(self) -> Array:
        """Enqueue copying the caller's own arrays into the bucket, once per pass."""
        if self._unpacked and self._buffer is self.memory:
            self._unpacked = False
            self._packer("own", self.memory, self._given).pack()
        return self._buffer

    def on_host(self) -> Array:
        """Raise TypeError: NumPy can't read device memory."""
        raise TypeError(
            "this comm hook computes on the CPU, and bucket "
            f"{self.index()} is on {self.device}: use one that works on devices "
            "(allreduce_hook, bf16_compress_hook, fp16_compress_hook, post_localSGD_hook)"
        )

    def narrowed(self, dtype: DType, over: ProcessGroup | None = None) -> Array:
        """Enqueue the cast of all gradients in one launch; see `GradBucket.narrowed`."""
        narrow, factor = self._narrow_like(self._buffer, dtype), averaging_factor(over)
        if self._buffer is not self.memory:
            self._copy(self._buffer, narrow, factor)
            return narrow
        # From the bucket, or from the caller's own arrays.
        sources = {**self.views, **self._given} if self._unpacked else self.views
        self._unpacked = False
        self._packer("narrow", narrow, sources).pack(factor)
        return narrow

    def widened(self, narrow: Array) -> Array:
        self._copy(narrow, self._buffer)
        return self._buffer

    def following(self, outcome: Work | Future[Any], step: Step) -> Future[Any]:
        """Return the Future of a step; the waiting thread enqueues the step behind the outcome."""
        return OrderedFuture(outcome, step)

    def _copy(self, source: Array, target: Array, scale: float = 1.0) -> None:
        """Enqueue writing `source * scale` to `target`, which has the same length."""
        self._cached_packer("copy", [source], target, [0]).pack(scale)

    def _packer(self, use: str, flat: Array, arrays: Mapping[int, Array]) -> DevicePacker:
        offsets = [self._offsets[param] for param in arrays]
        return self._cached_packer(use, list(arrays.values()), flat, offsets)

    def _cached_packer(
        self, use: str, arrays: Sequence[Array], flat: Array, offsets: Sequence[int]
    ) -> DevicePacker:
        """Return the packer of earlier passes, with its tables, set to these arrays."""
        # The cache has a packer for each use and dtype: a hook may use another array in every pass.
        key = use, scalar(as_buffer(flat).dtype)
        packer = self._packers.get(key)
        if packer is None:
            packer = self._packers[key] = DevicePacker(arrays, flat, offsets)
        else:
            packer.take(arrays, offsets, flat)
        return packer

    def _give(self, given: Mapping[int, Array]) -> None:
        if given:
            self._packer("own", self.memory, given).unpack()
