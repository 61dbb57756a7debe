"""The default comm hook: average over all ranks, or over the ranks that have a batch.

Contract: with uneven batches, a rank without a batch takes part with zeros. A small all_reduce
beside the forward pass counts the other ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nc10d.ops import AVG, ReduceOp, premul_sum
from nc10d.reducer.hooks.grad_bucket import GradBucket
from nc10d.work import Future, Work

if TYPE_CHECKING:
    from nc10d.group.process_group import ProcessGroup


class AveragingHook:
    """Averages a bucket over `size` ranks, or over a number of ranks from a Work."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._counting: Work | None = None
        self._count = size

    def count_by(self, work: Work, use_static_world_size: bool) -> None:
        """Divide the next pass by the result of `work`, or by all ranks if the flag is set.

        The result is an array with a single element: the number of ranks that have a batch.
        """
        self._counting = work
        self._count = self._size if use_static_world_size else 0

    @property
    def factor(self) -> float:
        """The factor of the sums; blocks until ranks are counted, and raises the count's error."""
        if self._counting is not None:
            (counted,) = self._counting.result()
            self._count = self._count or int(counted.reshape(-1)[0])
            self._counting = None
        if not 1 <= self._count <= self._size:
            raise ValueError(f"{self._count} of {self._size} ranks have a batch: none is left")
        return 1 / self._count

    def reduction(self) -> ReduceOp:
        """Return the reduction that computes the mean; blocks and raises as `factor`."""
        factor = self.factor
        return AVG if self._count == self._size else premul_sum(factor)

    def reset(self) -> None:
        """Divide by all ranks again: a count is valid for a single pass."""
        self._counting, self._count = None, self._size

    def __call__(self, group: ProcessGroup, bucket: GradBucket) -> Work | Future[Any]:
        """Launch the averaging of a bucket over the group."""
        return bucket.all_reduce(group, self.reduction())
