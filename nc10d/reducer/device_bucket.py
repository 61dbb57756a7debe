"""Buckets on a device: gradients go in and means come out by one launch each, in stream order.

Contract: as `bucket.Bucket`, and no call blocks the host, but where other ranks are needed first. A
gradient may be marked by any thread, on any stream: the bucket leaves behind all of them. Arrays of
the caller's own are read when the bucket leaves; until the pass is finished they are left alone,
and the streams on which they came exist. Means are ready on the finishing thread's current stream,
and on those on which their arrays came.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nc10d.arrays.buffer import as_buffer
from nc10d.arrays.dtypes import DType
from nc10d.cuda.memory import current_stream_key, device_of, order_others_after
from nc10d.cuda.streams import StreamKey, order_after
from nc10d.ops import Array
from nc10d.reducer.bucket import Bucket
from nc10d.reducer.deferred_future import OrderedFuture
from nc10d.reducer.device_packing import DevicePacker
from nc10d.reducer.hooks import CommHook, GradBucket, Step, share
from nc10d.reducer.plan import BucketPlan
from nc10d.work import Future, Work

if TYPE_CHECKING:
    from nc10d.group.process_group import ProcessGroup


class DeviceBucket(Bucket):
    """A bucket whose gradients are device arrays, such as the caller's own."""

    def __init__(self, index: int, plan: BucketPlan, *more: Any) -> None:
        self.device = plan.device
        self._offsets = {p: s.offset for p, s in zip(plan.params, plan.slots, strict=True)}
        self._packers: dict[tuple[str, DType], DevicePacker] = {}
        self._places: set[StreamKey] = set()
        self._left: StreamKey | None = None
        self._outside = False
        self._spare: Array | None = None
        super().__init__(index, plan, *more)
        self._number = device_of(self.buffer)

    def _show(self, index: int, plan: BucketPlan, *more: Any) -> GradBucket:
        return DeviceGradBucket(self, index, self.buffer, plan.slots, *more)

    def keep(self, params: Sequence[int]) -> None:
        """Queue: keep what the gradients of these parameters are now, in memory for that."""
        if params:
            self._spare_packer(params).pack()
            self._places.add(self._here())

    def restore(self, params: Sequence[int]) -> None:
        """Queue: give gradients that were kept the values back that they had."""
        if params:
            self._spare_packer(params).unpack()

    def _spare_packer(self, params: Sequence[int]) -> DevicePacker:
        if self._spare is None:
            self._spare = self._allocate(len(self.buffer), as_buffer(self.buffer).dtype.numpy)
        return self._packer("spare", self._spare, {param: self.views[param] for param in params})

    def take(self, param: int, gradient: Array | None) -> None:
        """Take note of a gradient, and of the stream on which it is made."""
        self._places.add(
            current_stream_key(self.buffer if gradient is None else gradient, self._number)
        )
        if gradient is not None:
            self._given[param] = gradient
            self._outside = True

    def leave(self, hook: CommHook, state: Any) -> None:
        """Hand the bucket to a hook, behind all streams that gradients were made on."""
        self._left = here = self._here()
        for place in self._places:
            order_after(here, place)
        super().leave(hook, state)

    def settle(self) -> None:
        """Order the current stream behind the bucket's way; put the result where the views are."""
        left, self._left = self._left, None
        if left is not None:
            order_after(self._here(), left)
        super().settle()

    def end(self, reduced: bool) -> None:
        """Let the arrays that were given go, as `Bucket.end`; and their streams behind them."""
        super().end(reduced)
        places, self._places, self._outside = self._places, set(), False
        # Also if it has failed: what has left may still be written to on the device.
        order_others_after(self._here(), places)

    def _here(self) -> StreamKey:
        return current_stream_key(self.buffer, self._number)

    def pack(self) -> None:
        """Queue: put what lies outside of the bucket into it, once."""
        if self._outside:
            self._outside = False
            self._packer("own", self.buffer, self._given).pack()

    def narrow_to(self, flat: Array, scale: float) -> None:
        """Queue: write all gradients, wherever they lie, to an array like the buffer."""
        sources = {**self.views, **self._given} if self._outside else self.views
        self._outside = False
        self._packer("narrow", flat, sources).pack(scale)

    def copy(self, source: Array, target: Array, scale: float = 1.0) -> None:
        """Queue: write an array, times `scale`, to another one that is as long."""
        self._kept("copy", [source], target, [0]).pack(scale)

    def _packer(self, use: str, flat: Array, arrays: Mapping[int, Array]) -> DevicePacker:
        offsets = [self._offsets[param] for param in arrays]
        return self._kept(use, list(arrays.values()), flat, offsets)

    def _kept(
        self, use: str, arrays: Sequence[Array], flat: Array, offsets: Sequence[int]
    ) -> DevicePacker:
        """Return the packer of the last pass, with its tables, for what is of this type now.

        Not by the array: a hook may bring another one in every pass.
        """
        key = use, as_buffer(flat).dtype
        found = self._packers.get(key)
        if found is None:
            found = self._packers[key] = DevicePacker(arrays, flat, offsets)
        else:
            found.take(arrays, offsets, flat)
        return found

    def _give(self, given: Mapping[int, Array]) -> None:
        if given:
            self._packer("own", self.buffer, given).unpack()


class DeviceGradBucket(GradBucket):
    """What a hook sees of such a bucket: gradients are packed when it looks at them."""

    __slots__ = ("_owner",)

    def __init__(self, owner: DeviceBucket, *more: Any) -> None:
        self._owner = owner
        super().__init__(*more)

    def buffer(self) -> Array:
        """Return the flat array of all gradients of the bucket."""
        if self._buffer is self._owner.buffer:
            self._owner.pack()
        return self._buffer

    def on_host(self) -> Array:
        """Raise TypeError: what computes in NumPy has nothing to compute with."""
        raise TypeError(
            "this comm hook computes on the CPU, and bucket "
            f"{self.index()} is on {self._owner.device}: use one that works on devices "
            "(allreduce_hook, bf16_compress_hook, fp16_compress_hook, post_localSGD_hook)"
        )

    def narrowed(self, dtype: DType, over: ProcessGroup | None = None) -> Array:
        """Queue: as on the CPU, from wherever gradients lie, in one launch."""
        narrow = self._narrow_like(self._buffer, dtype)
        if self._buffer is self._owner.buffer:
            self._owner.narrow_to(narrow, share(over))
        else:
            self._owner.copy(self._buffer, narrow, share(over))
        return narrow

    def widened(self, narrow: Array) -> Array:
        """Queue: as on the CPU."""
        self._owner.copy(narrow, self._buffer)
        return self._buffer

    def following(self, outcome: Work | Future[Any], step: Step) -> Future[Any]:
        """Return the Future of a step that is queued by who waits for it, behind the outcome."""
        return OrderedFuture(outcome, step)
