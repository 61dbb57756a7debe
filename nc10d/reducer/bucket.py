"""Buckets: their flat memory, the gradients as views of it, and the reduction under way.

Contract: who owns buckets calls `keep` when a pass begins, `take` for each gradient, `leave` once
all are there, `follow` when all have left, then `settle`, `end`, and `restore`; nobody writes to
them from `leave` to `settle`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from nc10d import cuda, registered
from nc10d.ops import Array
from nc10d.reducer.gradients import assign, kept
from nc10d.reducer.hooks import Allocate, CommHook, GradBucket, called, reduced_array
from nc10d.reducer.plan import BucketPlan, Plan
from nc10d.reducer.sparse import SparseBucket
from nc10d.work import Future, Work

if TYPE_CHECKING:
    from nc10d.group import ProcessGroup

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
        self.seen = self._show(index, plan, mine, is_last, purpose, allocate)
        self.views = dict(zip(plan.params, self.seen.gradients(), strict=True))
        self._allocate = allocate
        self._given: dict[int, Array] = {}
        self._before: dict[int, Array] = {}
        self._outcome: Work | Future[Any] | None = None

    def _show(self, index: int, plan: BucketPlan, *more: Any) -> GradBucket:
        """Return what hooks see of it."""
        return GradBucket(index, self.buffer, plan.slots, *more)

    def keep(self, params: Sequence[int]) -> None:
        """Keep what the gradients of these parameters are now, beside those that are kept."""
        self._before.update({param: kept(self.views[param]) for param in params})

    def restore(self, params: Sequence[int]) -> None:
        """Give gradients that were kept the values back that they had; forget all others."""
        before, self._before = self._before, {}
        for param in params:
            assign(self.views[param], before[param])

    def take(self, param: int, gradient: Array | None) -> None:
        """Take a gradient that is final: in its place already, or an array that gets the mean."""
        if gradient is not None:
            self._given[param] = gradient
            assign(self.views[param], gradient)

    def leave(self, hook: CommHook, state: Any) -> None:
        """Hand the bucket to a hook; does not block if the hook does not."""
        self._outcome = called(hook, state, self.seen)

    def follow(self) -> None:
        """Take the second step, for buckets that have one: this has none."""

    def zero(self) -> None:
        """Set all of it to zero."""
        self.buffer[...] = 0

    def settle(self) -> None:
        """Wait until it is reduced and put the result where the views are; raise what failed.

        Nothing to wait for if it has not left. After a Ctrl-C it can be waited for once more.
        """
        if self._outcome is None:
            return
        try:
            found = reduced_array(self._outcome, self.seen)
            if found is not self.buffer:
                self.buffer[...] = found
            self._outcome = None
        except Exception:
            self._outcome = None
            raise
        finally:
            self.seen.set_buffer(self.buffer)

    def end(self, reduced: bool) -> None:
        """Let the arrays that were given go: with the means, if all has been reduced."""
        given, self._given = self._given, {}
        if reduced:
            self._give(given)

    def _give(self, given: Mapping[int, Array]) -> None:
        for param, gradient in given.items():
            assign(gradient, self.views[param])


class Storage:
    """All buckets of a plan, and `gradients[param]`: for each parameter a view, or sparse rows.

    `purposes` say what each bucket is, in the words that ranks compare; `names` are the
    parameters'. `allocate` makes memory on every device, or maps devices ("cpu", "cuda:0") to what
    makes it there; TypeError for a device that is missing. Without it, memory is what other ranks
    can read on the CPU, and plain on GPUs.
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
