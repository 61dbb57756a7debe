"""Buckets: their flat memory, the gradients as views of it, and the reduction under way.

Contract: who owns buckets calls `leave` once all gradients are in one, `follow` when all have left,
then `settle`; nobody writes to them in between.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from nc10d import cuda, registered
from nc10d.ops import Array
from nc10d.reducer.hooks import CommHook, GradBucket, called, reduced_array
from nc10d.reducer.plan import BucketPlan, Plan
from nc10d.reducer.sparse import SparseBucket
from nc10d.work import Future, Work

if TYPE_CHECKING:
    from nc10d.group import ProcessGroup

Allocate: TypeAlias = Callable[[int, "np.dtype[Any]"], Array]
"""Makes a flat array of zeros from a count and a dtype: np.zeros, nc10d.zeros, a framework's."""
Allocation: TypeAlias = "Allocate | Mapping[str, Allocate] | None"
"""What makes memory: on all devices, by device, or what suits the group's backends."""


class Bucket:
    """Bucket `index` of a plan; `views[param]` is where the gradient of a parameter lies."""

    def __init__(
        self,
        index: int,
        plan: BucketPlan,
        parameters: Sequence[Array],
        is_last: bool,
        allocate: Allocate,
        purpose: str = "",
    ) -> None:
        self.buffer = allocate(plan.count, plan.dtype.numpy)
        mine = [parameters[param] for param in plan.params]
        self._seen = GradBucket(index, self.buffer, plan.slots, mine, is_last, purpose)
        self.views = dict(zip(plan.params, self._seen.gradients(), strict=True))
        self._outcome: Work | Future[Any] | None = None

    def leave(self, hook: CommHook, state: Any) -> None:
        """Hand the bucket to a hook; does not block if the hook does not."""
        self._outcome = called(hook, state, self._seen)

    def follow(self) -> None:
        """Take the second step, for buckets that have one: this has none."""

    def zero(self) -> None:
        """Set all of it to zero."""
        self.buffer[...] = 0

    def settle(self) -> None:
        """Wait until it is reduced and put the result where the views are; raise what failed.

        Nothing to wait for if it has not left.
        """
        outcome, self._outcome = self._outcome, None
        if outcome is None:
            return
        try:
            found = reduced_array(outcome, self._seen)
            if found is not self.buffer:
                self.buffer[...] = found
        finally:
            self._seen.set_buffer(self.buffer)


class Storage:
    """All buckets of a plan, and `gradients[param]`: for each parameter a view, or sparse rows.

    `purposes` say what each bucket is, in the words that ranks compare; `names` are the
    parameters'. `allocate` makes memory on
    every device, or maps devices ("cpu", "cuda:0") to what makes it there; TypeError for a device
    that is missing. Without it, memory is what other ranks can read on the CPU, and plain on GPUs.
    """

    def __init__(
        self,
        plan: Plan,
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
            else Bucket(index, bucket, parameters, index == last, make, purpose)
            for index, (bucket, purpose, make) in enumerate(
                zip(plan.buckets, purposes, makers, strict=True)
            )
        ]
        views: dict[int, Any] = {}
        for bucket in self.buckets:
            views.update(bucket.views)
        self.gradients = [views[param] for param in range(len(parameters))]

    def zero(self) -> None:
        """Set all gradients to zero."""
        for bucket in self.buckets:
            bucket.zero()


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
