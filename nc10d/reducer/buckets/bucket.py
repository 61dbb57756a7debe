"""A dense bucket: flat memory, the gradients as its views, and the reduction.

Contract: hooks use the methods of GradBucket, and the owner all others. For each pass the owner
calls `keep`, then `take` for each gradient, `launch` when all gradients are there, then `wait`,
`end` and `restore`. No thread writes to the bucket between `launch` and the end of `wait`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from nc10d.arrays.buffer import as_buffer
from nc10d.ops import Array
from nc10d.reducer.gradients import assign, copy_of
from nc10d.reducer.hooks.grad_bucket import Allocate, CommHook, GradBucket, call_hook, reduced_array
from nc10d.reducer.packing import FRACTIONAL, LARGE, divide
from nc10d.reducer.plan import BucketPlan
from nc10d.work import Future, Work

Allocation: TypeAlias = "Allocate | Mapping[str, Allocate] | None"
"""An allocator for all devices, an allocator for each device, or None for the default memory."""


class Bucket(GradBucket):
    """Bucket `index` of a plan; `views[param]` is a parameter's gradient."""

    def __init__(
        self,
        index: int,
        plan: BucketPlan,
        parameters: Sequence[Array],
        is_last: bool,
        allocate: Allocate,
        purpose: str = "",
        ordered: bool = False,
    ) -> None:
        memory = allocate(plan.count, plan.dtype.numpy)
        members = [parameters[param] for param in plan.params]
        super().__init__(index, memory, plan.slots, members, is_last, purpose, allocate, ordered)
        self.views = dict(zip(plan.params, self.gradients(), strict=True))
        self._divides = plan.dtype.family in FRACTIONAL
        self._given: dict[int, Array] = {}
        self._kept: dict[int, Array] = {}
        self._outcome: Work | Future[Any] | None = None

    def keep(self, params: Sequence[int]) -> None:
        """Copy the current gradients of these parameters, in addition to earlier copies."""
        self._kept.update({param: copy_of(self.views[param]) for param in params})

    def restore(self, params: Sequence[int]) -> None:
        """Restore these gradients from their copies, and drop all copies."""
        kept, self._kept = self._kept, {}
        for param in params:
            assign(self.views[param], kept[param])

    def take(
        self, param: int, gradient: Array | None, divisor: int = 0, divided: bool = False
    ) -> None:
        """Take a final gradient: an array that gets the mean later, or None if it is in place.

        With `divided`, the gradient in place has been divided already.
        """
        # With a divisor, copying a large array also divides it, which costs nothing there.
        if divided:
            self.divided.add(param)
        else:
            self.divided.discard(param)
        if gradient is None:
            return
        self._given[param] = gradient
        view = self.views[param]
        if divisor and self._divides and view.nbytes >= LARGE and not divided:
            read, written = as_buffer(gradient), as_buffer(view)
            # A gradient that is its own slot may be marked again, and is divided at the launch.
            if read.contiguous and read.address != written.address:
                divide(read, written, divisor)
                self.divided.add(param)
                return
        view[...] = gradient

    def launch(self, hook: CommHook, state: object) -> None:
        """Call the hook; blocks only if the hook blocks."""
        self._outcome = call_hook(hook, state, self)

    def zero(self) -> None:
        """Set all gradients to zero."""
        self.memory[...] = 0

    def is_reduced(self) -> bool:
        """Return whether `wait` would not block; false for a hook that computes in `wait`."""
        outcome = self._outcome
        return outcome is not None and (
            outcome.done() if isinstance(outcome, Future) else outcome.is_completed()
        )

    def wait(self) -> None:
        """Wait for the reduction and copy the result to the views; raise the hook's error."""
        # Returns at once if the bucket is not launched. After a Ctrl-C the owner can wait again.
        if self._outcome is None:
            return
        try:
            reduced = reduced_array(self._outcome, self)
            if reduced is not self.memory:
                self.memory[...] = reduced
            self._outcome = None
        except Exception:
            self._outcome = None
            raise
        finally:
            self.reset()

    def end(self, reduced: bool) -> None:
        """Release the arrays from `take`; with `reduced`, write the means to them first."""
        given, self._given = self._given, {}
        self.divided.clear()
        if reduced and given:
            self._give(given)

    def _give(self, given: Mapping[int, Array]) -> None:
        for param, gradient in given.items():
            gradient[...] = self.views[param]
