"""A bucket for a single sparse gradient: ranks exchange their rows, and each rank adds them up.

Contract: as `bucket.Bucket`, but a reduction has two steps, since a rank does not know how many
rows its peers have. `launch` sends the number, `second_step` sends the rows. Every rank launches
the steps in plan order. Rows are in host memory: those on a device are copied (`DeviceRows`). All
ranks add the same rows in rank order, so the result is bitwise the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import get_ident
from typing import Any

import numpy as np

from nc10d.arrays.buffer import as_buffer
from nc10d.base.deadline import Deadline
from nc10d.group.host_calls import on_host
from nc10d.group.process_group import ProcessGroup
from nc10d.ops import AVG, Array, ReduceOp, premul_sum
from nc10d.reducer.gradients import SparseGradient, assign, check, copy_of, no_rows
from nc10d.reducer.hooks.deferred_future import DeferredFuture
from nc10d.reducer.hooks.grad_bucket import (
    CommHook,
    GradBucket,
    call_hook,
    reduced_array,
    require_work,
)
from nc10d.reducer.plan import BucketPlan, Spec
from nc10d.work import Future, Work


class SparseBucket(GradBucket):
    """A bucket for a parameter that expects a sparse gradient; the buffer is a SparseGradient.

    `all_reduce` ends after all buckets are launched. If the hook waits for it, on every rank, rows
    are sent at once. A callback of its `then` may launch another one.
    """

    def __init__(
        self,
        index: int,
        plan: BucketPlan,
        parameters: Sequence[Array],
        is_last: bool,
        names: Sequence[str],
    ) -> None:
        (slot,) = plan.slots
        self._spec = Spec(slot.shape, plan.dtype, plan.device)
        self._name = names[slot.param]
        self._exchanges: list[RowExchange] = []
        self._thread = get_ident()
        super().__init__(index, no_rows(self._spec), plan.slots, [parameters[slot.param]], is_last)
        self._empty = copy_of(self.memory)
        self._given: SparseGradient | None = None
        self._kept: SparseGradient | None = None
        self._outcome: Work | Future[Any] | None = None
        self._second_step_done = False
        self.views = {slot.param: self.memory}

    def reset(self) -> None:
        """Make the gradient itself the buffer again, and drop all exchanges."""
        super().reset()
        self._exchanges = []

    def flat(self) -> Array:
        """Raise TypeError: a sparse gradient is no flat array."""
        raise TypeError(
            f"the gradient of {self._name} is sparse, which this comm hook can't take: use one that"
            " can (allreduce_hook), or a dense gradient"
        )

    def set_buffer(self, buffer: SparseGradient) -> None:
        """Replace the rows by other rows for the parameter; TypeError for other values."""
        self.check(buffer)
        self._buffer = buffer

    def gradients(self) -> list[SparseGradient]:
        """Return a list with the buffer, which is the gradient."""
        return [self._buffer]

    def all_reduce(self, group: ProcessGroup, op: ReduceOp) -> Future[SparseGradient]:
        """Launch the addition of all ranks' rows; ValueError unless `op` is a sum or a mean.

        RuntimeError in a callback that runs on another thread than the pass.
        """
        if get_ident() != self._thread:
            raise RuntimeError(
                f"the rows of {self._name} must be reduced in the comm hook or after a reduction of"
                " rows: other callbacks run at another moment on each rank"
            )
        exchange = RowExchange(group, self._buffer, self._spec, _factor(op, group.size))
        self._exchanges.append(exchange)
        return exchange

    def _divide(self, count: int, size: int) -> ReduceOp:
        return AVG if count == size else premul_sum(1 / count)

    def check(self, value: object) -> None:
        """Raise a TypeError or ValueError if `value` is no sparse gradient for the parameter."""
        check(value, self._spec, True, self._name)

    def keep(self, params: Sequence[int]) -> None:
        """Keep a copy of the current rows, if `params` is not empty."""
        if params:
            self._kept = copy_of(self.memory)

    def restore(self, params: Sequence[int]) -> None:
        """Restore the rows from their copy, if `params` is not empty, and drop the copy."""
        kept, self._kept = self._kept, None
        if params:
            assign(self.memory, kept)

    def take(
        self,
        _param: int,
        gradient: SparseGradient | None,
        _divisor: int = 0,
        _divided: bool = False,
    ) -> None:
        """Take final rows: the caller's own, or None if they are in place."""
        if gradient is not None:
            self._given = gradient
            assign(self.memory, gradient)

    def zero(self) -> None:
        """Remove all rows."""
        assign(self.memory, self._empty)

    def launch(self, hook: CommHook, state: object) -> None:
        """Call the hook; blocks only if the hook blocks."""
        self._thread = get_ident()
        self._outcome = call_hook(hook, state, self)

    def second_step(self) -> None:
        """Send the rows for all the hook's exchanges; see `RowExchange.send_rows`."""
        self._thread = get_ident()
        for exchange in self._exchanges:
            exchange.send_rows()
        self._second_step_done = True

    def is_reduced(self) -> bool:
        """Return False: rows are sent when all buckets are launched."""
        return False

    def wait(self) -> None:
        """Wait for the reduction and copy the result to the gradient; raise the hook's error."""
        outcome, self._outcome = self._outcome, None
        second_step_done, self._second_step_done = self._second_step_done, False
        self._thread = get_ident()
        try:
            for exchange in self._exchanges:
                if second_step_done:
                    # For an exchange that another's callback has begun, on every rank.
                    exchange.send_rows()
                exchange.drain()
            # After a failed pass rows may be missing: then the outcome might never end.
            if outcome is not None and all(x.rows_sent for x in self._exchanges):
                assign(self.memory, reduced_array(outcome, self))
        finally:
            self.reset()

    def end(self, reduced: bool) -> None:
        """Release the rows from `take`; with `reduced`, write the mean's rows to them first."""
        given, self._given = self._given, None
        if reduced and given is not None:
            assign(given, self.memory)


class RowExchange(DeferredFuture[SparseGradient]):
    """The sum of all ranks' rows times `factor`; the constructor sends the number of rows."""

    # The waiting thread completes the future, or the pass does at its end.

    __slots__ = (
        *("_factor", "_gradient", "_group", "_rows"),
        *("_sizes", "_spec", "_works", "rows_sent"),
    )

    def __init__(
        self, group: ProcessGroup, gradient: SparseGradient, spec: Spec, factor: float
    ) -> None:
        super().__init__()
        self._group, self._spec, self._factor = group, spec, factor
        self._gradient = SparseGradient(gradient.indices, gradient.values)
        self._sizes = np.zeros((group.size, 2), np.int64)
        self._rows: list[list[Array]] = []
        self.rows_sent = False
        depth, rows = gradient.indices.shape
        own = np.array([rows, depth if rows else 0], np.int64)
        work = on_host(group).all_gather_into_tensor(self._sizes, own, async_op=True)
        self._works = [require_work(work)]

    def send_rows(self) -> None:
        """Send the rows, once; blocks until all ranks have sent their number of rows.

        ValueError, on every rank, if ranks address rows by different numbers of dimensions.
        """
        if self.rows_sent:
            return
        self.rows_sent = True
        try:
            self._send()
        except BaseException as error:
            self._finish(error)  # waits raise it, too
            raise

    def drain(self) -> None:
        """Wait for all operations, and end the Future if rows were sent; raise the first error."""
        works, self._works = self._works, []
        rows, self._rows = self._rows, []
        try:
            for work in works:
                work.wait()
            if rows:
                self._finish(None, self._total(*rows))
        except BaseException as error:
            self._finish(error)
            raise

    def _send(self) -> None:
        self._works.pop().wait()
        depth = _only_depth(self._sizes)
        if depth == 0:
            self._finish(None, self._gradient)  # no rank has rows
            return
        counts = [int(rows) for rows in self._sizes[:, 0]]
        indices = as_buffer(self._gradient.indices).as_numpy()[:depth].T
        own = indices if counts[self._group.rank] else np.zeros((0, depth), np.int64)
        values = as_buffer(self._gradient.values).as_numpy()
        row_shape = values.shape[1:] if len(values) else self._spec.shape[depth:]
        self._rows = [
            self._gather(np.ascontiguousarray(own), counts),
            self._gather(np.ascontiguousarray(values).reshape(-1, *row_shape), counts),
        ]

    def _gather(self, own: Array, counts: Sequence[int]) -> list[Array]:
        gathered = [np.zeros((count, *own.shape[1:]), own.dtype) for count in counts]
        work = on_host(self._group).all_gather(gathered, own, async_op=True)
        self._works.append(require_work(work))
        return gathered

    def _total(self, places: list[Array], values: list[Array]) -> SparseGradient:
        rows = np.concatenate(values)
        wide = rows if rows.dtype.itemsize >= 4 else rows.astype(np.float32)
        # Floats before the sum, which might overflow; ints after it, which would lose their halves.
        early, late = (self._factor, 1) if wide.dtype.kind in "fc" else (1, self._factor)
        total = sum_rows(np.concatenate(places).T, wide * early, self._spec.shape)
        return SparseGradient(total.indices, (total.values * late).astype(rows.dtype))

    def _complete(self, deadline: Deadline | None) -> None:
        """Send the rows if they are not sent yet, and block until all rows have arrived."""
        self.send_rows()
        self.drain()


def sum_rows(indices: Array, values: Array, shape: tuple[int, ...]) -> SparseGradient:
    """Return the same gradient with duplicate places summed, in the order of places."""
    # Floats narrower than float32 are added in float32, and the values stay float32.
    depth = len(indices)
    places = np.ravel_multi_index(tuple(indices), shape[:depth])
    order = np.argsort(places, kind="stable")
    ordered = places[order]
    starts = np.flatnonzero(np.diff(ordered, prepend=-1))
    wide = values if values.dtype.itemsize >= 4 else values.astype(np.float32)
    sums = np.add.reduceat(wide[order], starts, axis=0) if len(starts) else wide
    unique = np.array(np.unravel_index(ordered[starts], shape[:depth]), np.int64)
    return SparseGradient(unique.reshape(depth, -1), sums)


def _factor(op: ReduceOp, size: int) -> float:
    """Return the factor that turns a sum over `size` ranks into the result of `op`."""
    if op.pairwise.name != "SUM":
        raise ValueError(f"rows of sparse gradients are added up: there is no {op.kind.name}")
    return (1.0 if op.factor is None else op.factor) / (size if op.kind.finishes else 1)


def _only_depth(sizes: Array) -> int:
    """Return how many dimensions address a row: the same on all ranks with rows; 0 without rows."""
    depths = {int(depth) for rows, depth in sizes if rows}
    if len(depths) > 1:
        raise ValueError(f"ranks address rows by different numbers of dimensions: {sorted(depths)}")
    return depths.pop() if depths else 0
