"""By what a bucket's sum is divided: all ranks, or those that have a batch in this pass.

Contract: the hook that is there if nobody brings one. With uneven batches, ranks that have run out
take part with zeros; a small all_reduce beside the forward pass counts the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nc10d.ops import AVG, ReduceOp, premul_sum
from nc10d.reducer.hooks import GradBucket
from nc10d.work import Future, Work

if TYPE_CHECKING:
    from nc10d.group.process_group import ProcessGroup


class Average:
    """Averages a bucket over `size` ranks, or over as many as a Work has counted."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._counting: Work | None = None
        self._count = size

    def count_by(self, work: Work, use_static_world_size: bool) -> None:
        """Divide the next pass by what `work` ends with, unless all ranks count anyway.

        Its result is an array of one element: how many ranks have a batch.
        """
        self._counting = work
        self._count = self._size if use_static_world_size else 0

    @property
    def factor(self) -> float:
        """What sums are multiplied by. May block until ranks are counted; raises what failed."""
        if self._counting is not None:
            (found,) = self._counting.result()
            self._count = self._count or int(found.reshape(-1)[0])
            self._counting = None
        if not 1 <= self._count <= self._size:
            raise ValueError(f"{self._count} of {self._size} ranks have a batch: none is left")
        return 1 / self._count

    def reduction(self) -> ReduceOp:
        """Return the reduction that is the mean; as `factor`, it may block."""
        factor = self.factor
        return AVG if self._count == self._size else premul_sum(factor)

    def reset(self) -> None:
        """Divide by all ranks again: a count holds for one pass."""
        self._counting, self._count = None, self._size

    def __call__(self, group: ProcessGroup, bucket: GradBucket) -> Work | Future[Any]:
        """Start to average a bucket over the group, as a comm hook."""
        return bucket.all_reduce(group, self.reduction())
