"""Buckets in memory: the storage for a plan. To rebuild buckets, a Reducer makes new storage."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from nc10d import cuda
from nc10d.api import registered
from nc10d.arrays.buffer import device_type
from nc10d.base.run_to_end import import_to_end
from nc10d.group.process_group import ProcessGroup
from nc10d.ops import Array
from nc10d.reducer.buckets.bucket import Allocation, Bucket
from nc10d.reducer.buckets.sparse_bucket import SparseBucket
from nc10d.reducer.hooks.grad_bucket import Allocate
from nc10d.reducer.plan import BucketPlan, ReducePlan
from nc10d.reducer.schedule import Schedule
from nc10d.reducer.settings import Settings

_NAME = 24
"""The most characters of a parameter's name in a bucket's purpose."""


class Storage:
    """All buckets of a plan; `gradients[param]` is a view of a bucket, or a SparseGradient."""

    def __init__(
        self, plan: ReducePlan, buckets: Sequence[Bucket | SparseBucket], names: Sequence[str]
    ) -> None:
        self.plan, self.buckets = plan, buckets
        self.schedule = Schedule([bucket.params for bucket in plan.buckets], names)
        self.sparse = [bucket for bucket in buckets if isinstance(bucket, SparseBucket)]
        views: dict[int, Array] = {}
        takes: dict[int, Callable[[int, Array, int, bool], None]] = {}
        for bucket in buckets:
            views.update(bucket.views)
            takes.update(dict.fromkeys(bucket.views, bucket.take))
        self.gradients = [views[param] for param in range(len(views))]
        self.takes = [takes[param] for param in range(len(views))]
        """By parameter: the `take` of its bucket."""

    def keep(self, params: Collection[int]) -> None:
        """Copy the current gradients of these parameters; see `Bucket.keep`."""
        for bucket in self.buckets:
            bucket.keep([param for param in params if param in bucket.views])

    def restore(self, params: Collection[int]) -> None:
        """Restore these gradients from their copies, and drop all copies."""
        for bucket in self.buckets:
            bucket.restore([param for param in params if param in bucket.views])

    def zero(self) -> None:
        """Set all gradients to zero."""
        for bucket in self.buckets:
            bucket.zero()

    def nothing(self) -> Array | None:
        """Return an array without elements if all buckets are on devices, else None."""
        first = self.buckets[0]
        if isinstance(first, Bucket) and all(map(_on_device, self.buckets)):
            return first.memory[:0]
        return None

    def wait(self) -> None:
        """Wait for the reductions that an interrupted pass has left in flight, if any."""
        for bucket in self.buckets:
            bucket.wait()


def _on_device(bucket: Bucket | SparseBucket) -> bool:
    return isinstance(bucket, Bucket) and device_type(bucket.memory) != "cpu"


def _bucket_class(device: str) -> type[Bucket]:
    if not device.startswith("cuda"):
        return Bucket
    found: type[Bucket] = import_to_end("nc10d.reducer.buckets.device_bucket").DeviceBucket
    return found


def _allocator(allocate: Allocation, device: str, group: ProcessGroup) -> Allocate:
    if callable(allocate):
        return allocate
    if allocate is None:
        # A user's own kind of group need not have backends.
        shared = partial(_peer_readable, group) if hasattr(group, "backend") else np.zeros
        allocate = {"cpu": shared}
        if device.startswith("cuda"):
            allocate[device] = partial(cuda.zeros, device=device)
    allocator = allocate.get(device)
    if allocator is None:
        known = ", ".join(allocate)
        raise TypeError(f"parameters are on {device}, `allocate` knows of {known} alone")
    return allocator


def _peer_readable(group: ProcessGroup, count: int, dtype: np.dtype[Any]) -> Array:
    """Return zeros in memory that peers can access directly, or ordinary zeros if that is full."""
    try:
        return registered.zeros(count, dtype, group)
    except MemoryError:
        return np.zeros(count, dtype)


@dataclass(frozen=True, slots=True)
class StorageMaker:
    """Makes storage for the Reducer that is the `number`th of its group."""

    # `allocate` makes memory on every device, or maps devices ("cpu", "cuda:0") to allocators;
    # TypeError if a device is missing. Without it, CPU memory is readable by other ranks if the
    # group's backend has such memory, and GPU memory is ordinary memory.

    parameters: Sequence[Array]
    settings: Settings
    allocate: Allocation
    group: ProcessGroup
    number: int

    def make(self, plan: ReducePlan) -> Storage:
        """Return new storage for a plan, filled with zeros."""
        last = len(plan.buckets) - 1
        buckets = [self._bucket(i, bucket, i == last) for i, bucket in enumerate(plan.buckets)]
        return Storage(plan, buckets, self.settings.names)

    def _bucket(self, index: int, plan: BucketPlan, is_last: bool) -> Bucket | SparseBucket:
        if plan.sparse:
            return SparseBucket(index, plan, self.parameters, is_last, self.settings.names)
        allocate = _allocator(self.allocate, plan.device, self.group)
        # Ranks compare the purpose, which is short, since errors show two.
        first = self.settings.names[plan.params[0]][-_NAME:]
        purpose = f"bucket {index} of reducer {self.number} ({first})"
        kind, ordered = _bucket_class(plan.device), self.settings.ordered
        return kind(index, plan, self.parameters, is_last, allocate, purpose, ordered)
