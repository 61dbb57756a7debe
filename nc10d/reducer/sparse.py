"""A bucket of one sparse gradient: ranks show each other their rows, and each adds them up.

Contract: as `bucket.Bucket`, in three steps, since nobody knows how many rows the others have:
`leave` sends the number of rows, `follow` the rows, `settle` adds them up. Steps are launched in
plan order on every rank. The mean is bitwise the same on all ranks: all add the same rows, in the
order of ranks. Comm hooks don't see these buckets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from nc10d.buffer import as_buffer
from nc10d.ops import Array
from nc10d.reducer.gradients import SparseGradient, no_rows
from nc10d.reducer.hooks import started
from nc10d.reducer.mean import Mean
from nc10d.reducer.plan import BucketPlan, Spec
from nc10d.work import Work

if TYPE_CHECKING:
    from nc10d.group import ProcessGroup


class SparseBucket:
    """The bucket of the one parameter of a plan that expects a sparse gradient."""

    def __init__(self, plan: BucketPlan, group: ProcessGroup, mean: Mean) -> None:
        (slot,) = plan.slots
        self._spec = Spec(slot.shape, plan.dtype, plan.device)
        self._group = group
        self._mean = mean
        self._gradient = no_rows(self._spec)
        self._sizes = np.zeros((group.size, 2), np.int64)
        self._rows: list[list[Array]] = []
        self._works: list[Work] = []
        self.views = {slot.param: self._gradient}

    def zero(self) -> None:
        """Forget all rows."""
        empty = no_rows(self._spec)
        self._gradient.indices, self._gradient.values = empty.indices, empty.values

    def leave(self, hook: Any, state: Any) -> None:
        """Send how many rows there are; does not block."""
        del hook, state
        depth, rows = self._gradient.indices.shape
        mine = np.array([rows, depth if rows else 0], np.int64)
        work = self._group.all_gather_into_tensor(self._sizes, mine, async_op=True)
        self._works.append(started(work))

    def follow(self) -> None:
        """Send the rows; blocks until all ranks have said how many.

        ValueError, on every rank, if they address them by different numbers of dimensions.
        """
        if not self._works:
            return
        self._works.pop().wait()
        depth = _only_depth(self._sizes)
        if depth == 0:
            return  # nobody has rows
        counts = [int(rows) for rows in self._sizes[:, 0]]
        indices = as_buffer(self._gradient.indices).as_numpy()[:depth].T
        places = indices if counts[self._group.rank] else np.zeros((0, depth), np.int64)
        values = as_buffer(self._gradient.values).as_numpy()
        each = values.shape[1:] if len(values) else self._spec.shape[depth:]
        self._rows = [
            self._gather(np.ascontiguousarray(places), counts),
            self._gather(np.ascontiguousarray(values).reshape(-1, *each), counts),
        ]

    def settle(self) -> None:
        """Wait for everybody's rows and add them up."""
        works, rows = self._works, self._rows
        self._works, self._rows = [], []
        for work in works:
            work.wait()
        if rows:
            places, values = (np.concatenate(parts) for parts in rows)
            found = add_up(places.T, values, self._spec.shape)
            self._gradient.indices = found.indices
            self._gradient.values = (found.values * self._mean.factor).astype(values.dtype)

    def _gather(self, mine: Array, counts: Sequence[int]) -> list[Array]:
        theirs = [np.zeros((count, *mine.shape[1:]), mine.dtype) for count in counts]
        self._works.append(started(self._group.all_gather(theirs, mine, async_op=True)))
        return theirs


def add_up(indices: Array, values: Array, shape: tuple[int, ...]) -> SparseGradient:
    """Return the same gradient with each place once, in the order of places.

    Narrow floats are added in float32; values come as float64 or float32, not rounded yet.
    """
    depth = len(indices)
    places = np.ravel_multi_index(tuple(indices), shape[:depth])
    order = np.argsort(places, kind="stable")
    ordered = places[order]
    starts = np.flatnonzero(np.diff(ordered, prepend=-1))
    wide = values if values.dtype.itemsize >= 4 else values.astype(np.float32)
    sums = np.add.reduceat(wide[order], starts, axis=0) if len(starts) else wide
    found = np.array(np.unravel_index(ordered[starts], shape[:depth]), np.int64)
    return SparseGradient(found.reshape(depth, -1), sums)


def _only_depth(sizes: Array) -> int:
    """Return how many dimensions address a row: the same on all ranks that have any."""
    depths = {int(depth) for rows, depth in sizes if rows}
    if len(depths) > 1:
        raise ValueError(f"ranks address rows by different numbers of dimensions: {sorted(depths)}")
    return depths.pop() if depths else 0
