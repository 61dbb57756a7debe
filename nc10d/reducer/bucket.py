"""Buckets: their flat memory, the gradients as views of it, and the reduction under way.

Contract: who owns buckets calls `keep` when a pass begins, `take` for each gradient, `leave` once
all are there, `follow` when all have left, then `settle`, `end`, and `restore`; nobody writes to
them from `leave` to `settle`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from nc10d.ops import Array
from nc10d.reducer.gradients import assign, kept
from nc10d.reducer.hooks import Allocate, CommHook, GradBucket, called, reduced_array
from nc10d.reducer.plan import BucketPlan
from nc10d.work import Future, Work

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
