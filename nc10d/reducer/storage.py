"""All buckets of a plan: which kind each is, who makes its memory, and how gradients are found."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from nc10d import cuda
from nc10d.api import registered
from nc10d.ops import Array
from nc10d.reducer.bucket import Allocation, Bucket
from nc10d.reducer.hooks import Allocate
from nc10d.reducer.plan import ReducePlan
from nc10d.reducer.sparse import SparseBucket

if TYPE_CHECKING:
    from nc10d.group.process_group import ProcessGroup


class Storage:
    """All buckets of a plan, and `gradients[param]`: for each parameter a view, or sparse rows.

    `purposes` say what each bucket is, in the words that ranks compare; `names` are the
    parameters'. `allocate` makes memory on every device, or maps devices ("cpu", "cuda:0") to what
    makes it there; TypeError for a device that is missing. Without it, memory is what other ranks
    can read on the CPU, and plain on GPUs.
    """

    def __init__(
        self,
        plan: ReducePlan,
        parameters: Sequence[Array],
        allocate: Allocation,
        purposes: Sequence[str],
        names: Sequence[str],
        group: ProcessGroup,
    ) -> None:
        last = len(plan.buckets) - 1
        makers = [_maker(allocate, bucket.device, group) for bucket in plan.buckets]
        self.buckets: list[Bucket | SparseBucket] = [
            SparseBucket(index, bucket, parameters, index == last, names)
            if bucket.sparse
            else _kind(bucket.device)(index, bucket, parameters, index == last, make, purpose)
            for index, (bucket, purpose, make) in enumerate(
                zip(plan.buckets, purposes, makers, strict=True)
            )
        ]
        self._bucket_of = {param: bucket for bucket in self.buckets for param in bucket.views}
        views: dict[int, Any] = {}
        for bucket in self.buckets:
            views.update(bucket.views)
        self.gradients = [views[param] for param in range(len(parameters))]

    def take(self, param: int, gradient: Any) -> None:
        """Take a gradient into its bucket; see `Bucket.take`."""
        self._bucket_of[param].take(param, gradient)

    def keep(self, params: Collection[int]) -> None:
        """Keep what the gradients of these parameters are now; see `Bucket.keep`."""
        for bucket in self.buckets:
            bucket.keep([param for param in params if param in bucket.views])

    def restore(self, params: Collection[int]) -> None:
        """Give gradients that were kept the values back that they had."""
        for bucket in self.buckets:
            bucket.restore([param for param in params if param in bucket.views])

    def zero(self) -> None:
        """Set all gradients to zero."""
        for bucket in self.buckets:
            bucket.zero()

    def settle(self) -> None:
        """Wait for what a pass that was interrupted has left under way, if one was."""
        for bucket in self.buckets:
            bucket.settle()


def _kind(device: str) -> type[Bucket]:
    """Return which buckets are for a device."""
    if not device.startswith("cuda"):
        return Bucket
    from nc10d.reducer.device_bucket import DeviceBucket

    return DeviceBucket


def _maker(allocate: Allocation, device: str, group: ProcessGroup) -> Allocate:
    """Return what makes memory on a device."""
    if callable(allocate):
        return allocate
    if allocate is None:
        # A group of the user's own making need not have backends.
        allocate = {"cpu": partial(_readable, group) if hasattr(group, "backend") else np.zeros}
        if device.startswith("cuda"):
            allocate[device] = partial(cuda.zeros, device=device)
    found = allocate.get(device)
    if found is None:
        known = ", ".join(allocate)
        raise TypeError(f"parameters are on {device}, `allocate` knows of {known} alone")
    return found


def _readable(group: ProcessGroup, count: int, dtype: np.dtype[Any]) -> Array:
    """Return memory that peers can read and write where it lies, while there is any."""
    try:
        return registered.zeros(count, dtype, group)
    except MemoryError:
        return np.zeros(count, dtype)
