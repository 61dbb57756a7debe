"""A bucket of one sparse gradient: ranks show each other their rows, and each adds them up.

Contract: as `bucket.Bucket`, but a reduction has a second step, since nobody knows how many rows
the others have: their number travels when the bucket leaves, they do at `follow`. Steps are
launched in plan order on every rank. The result is bitwise the same on all ranks: all add the same
rows, in the order of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import get_ident
from typing import TYPE_CHECKING, Any

import numpy as np

from nc10d.arrays.buffer import as_buffer
from nc10d.base.deadline import Deadline
from nc10d.ops import Array, RedOp, ReduceOp
from nc10d.reducer.deferred_future import DeferredFuture
from nc10d.reducer.gradients import SparseGradient, assign, check, kept, no_rows
from nc10d.reducer.hooks import CommHook, GradBucket, called, reduced_array, started
from nc10d.reducer.plan import BucketPlan, Spec
from nc10d.work import Future, Work

if TYPE_CHECKING:
    from nc10d.group.process_group import ProcessGroup


class SparseGradBucket(GradBucket):
    """What a hook sees of a sparse gradient: the buffer is a SparseGradient, of one parameter.

    `all_reduce` ends after all buckets have left, unless the hook waits for it on every rank: then
    rows travel at once. What follows from it (`then`) may begin another one.
    """

    __slots__ = ("_name", "_spec", "exchanges", "gradient", "thread")

    def __init__(
        self, index: int, plan: BucketPlan, parameters: Sequence[Array], is_last: bool, name: str
    ) -> None:
        (slot,) = plan.slots
        self._spec = Spec(slot.shape, plan.dtype, plan.device)
        self._name = name
        self.gradient = no_rows(self._spec)
        self.exchanges: list[RowExchange] = []
        self.thread = get_ident()
        super().__init__(index, self.gradient, plan.slots, parameters, is_last)

    def reset(self) -> None:
        """Show the gradient itself, of which nothing is under way."""
        self._buffer, self.exchanges = self.gradient, []

    def flat(self) -> Array:
        """Raise TypeError: there is no flat array."""
        raise TypeError(
            f"the gradient of {self._name} is sparse, which this comm hook can't take: use one that"
            " can (allreduce_hook), or a dense gradient"
        )

    def set_buffer(self, buffer: SparseGradient) -> None:
        """Put other rows of the parameter in the place of these; TypeError if they are none."""
        self.check(buffer)
        self._buffer = buffer

    def gradients(self) -> list[SparseGradient]:
        """Return the one gradient, which is the buffer."""
        return [self._buffer]

    def all_reduce(self, group: ProcessGroup, op: ReduceOp) -> Future[SparseGradient]:
        """Start to add up all ranks' rows; sums and means only, ValueError for other reductions.

        RuntimeError in a callback on another thread than the pass's.
        """
        if get_ident() != self.thread:
            raise RuntimeError(
                f"the rows of {self._name} must be reduced in the comm hook or after a reduction of"
                " rows: other callbacks run at another moment on each rank"
            )
        exchange = RowExchange(group, self._buffer, self._spec, _factor(op, group.size))
        self.exchanges.append(exchange)
        return exchange

    def check(self, value: Any) -> None:
        """Raise the TypeError or ValueError that says why this is no gradient of the parameter."""
        check(value, self._spec, True, self._name)


class RowExchange(DeferredFuture[SparseGradient]):
    """The rows of all ranks, each place once, times `factor`; begins by sending how many.

    It ends in the thread that waits, or at the end of the pass: no other has to wake up for it.
    """

    __slots__ = ("_factor", "_gradient", "_group", "_rows", "_sizes", "_spec", "_works", "followed")

    def __init__(
        self, group: ProcessGroup, gradient: SparseGradient, spec: Spec, factor: float
    ) -> None:
        super().__init__()
        self._group, self._spec, self._factor = group, spec, factor
        self._gradient = SparseGradient(gradient.indices, gradient.values)
        self._sizes = np.zeros((group.size, 2), np.int64)
        self._rows: list[list[Array]] = []
        self.followed = False
        depth, rows = gradient.indices.shape
        mine = np.array([rows, depth if rows else 0], np.int64)
        work = group.all_gather_into_tensor(self._sizes, mine, async_op=True)
        self._works = [started(work)]

    def follow(self) -> None:
        """Send the rows, once; blocks until all ranks have said how many.

        ValueError, on every rank, if they address them by different numbers of dimensions.
        """
        if self.followed:
            return
        self.followed = True
        try:
            self._send()
        except BaseException as error:
            self._finish(error)  # for those who wait
            raise

    def over(self) -> None:
        """Wait until nothing of it is under way, and end if rows were sent; raise what failed."""
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
            self._finish(None, self._gradient)  # nobody has rows
            return
        counts = [int(rows) for rows in self._sizes[:, 0]]
        indices = as_buffer(self._gradient.indices).as_numpy()[:depth].T
        mine = indices if counts[self._group.rank] else np.zeros((0, depth), np.int64)
        values = as_buffer(self._gradient.values).as_numpy()
        each = values.shape[1:] if len(values) else self._spec.shape[depth:]
        self._rows = [
            self._gather(np.ascontiguousarray(mine), counts),
            self._gather(np.ascontiguousarray(values).reshape(-1, *each), counts),
        ]

    def _gather(self, mine: Array, counts: Sequence[int]) -> list[Array]:
        theirs = [np.zeros((count, *mine.shape[1:]), mine.dtype) for count in counts]
        self._works.append(started(self._group.all_gather(theirs, mine, async_op=True)))
        return theirs

    def _total(self, places: list[Array], values: list[Array]) -> SparseGradient:
        rows = np.concatenate(values)
        found = add_up(np.concatenate(places).T, rows, self._spec.shape)
        return SparseGradient(found.indices, (found.values * self._factor).astype(rows.dtype))

    def _bring(self, deadline: Deadline | None) -> None:
        """Send the rows if that has not been done, and block until all have come."""
        self.follow()
        self.over()


class SparseBucket:
    """The bucket of the one parameter of a plan that expects a sparse gradient."""

    def __init__(
        self,
        index: int,
        plan: BucketPlan,
        parameters: Sequence[Array],
        is_last: bool,
        names: Sequence[str],
    ) -> None:
        (param,) = plan.params
        if plan.device != "cpu":
            raise TypeError(
                f"the gradient of {names[param]} is sparse, and on {plan.device}: rows travel on "
                "the CPU alone, keep the parameter there or let its gradient be dense"
            )
        self.seen = SparseGradBucket(index, plan, [parameters[param]], is_last, names[param])
        self._empty = kept(self.seen.gradient)
        self._given: SparseGradient | None = None
        self._before: SparseGradient | None = None
        self._outcome: Work | Future[Any] | None = None
        self._followed = False
        self.views = {param: self.seen.gradient}

    def keep(self, params: Sequence[int]) -> None:
        """Keep the rows as they are now, if the parameter is among these."""
        if params:
            self._before = kept(self.seen.gradient)

    def restore(self, params: Sequence[int]) -> None:
        """Give the gradient the rows back that were kept, if it is among these."""
        before, self._before = self._before, None
        if params:
            assign(self.seen.gradient, before)

    def take(self, _param: int, gradient: SparseGradient | None) -> None:
        """Take rows that are final: in their place already, or of the caller's own."""
        if gradient is not None:
            self._given = gradient
            assign(self.seen.gradient, gradient)

    def zero(self) -> None:
        """Forget all rows."""
        assign(self.seen.gradient, self._empty)

    def leave(self, hook: CommHook, state: Any) -> None:
        """Hand the bucket to a hook; does not block if the hook does not."""
        self.seen.thread = get_ident()
        self._outcome = called(hook, state, self.seen)

    def follow(self) -> None:
        """Take the second step of what the hook has begun; see `RowExchange.follow`."""
        self.seen.thread = get_ident()
        for exchange in self.seen.exchanges:
            exchange.follow()
        self._followed = True

    def settle(self) -> None:
        """Wait until it is reduced and put the result where the gradient is; raise what failed."""
        outcome, self._outcome = self._outcome, None
        followed, self._followed = self._followed, False
        self.seen.thread = get_ident()
        try:
            for exchange in self.seen.exchanges:
                if followed:  # one that another has led to: it is here on every rank
                    exchange.follow()
                exchange.over()
            # Without its second step (the pass has failed before) an outcome might never come.
            if outcome is not None and all(one.followed for one in self.seen.exchanges):
                assign(self.seen.gradient, reduced_array(outcome, self.seen))
        finally:
            self.seen.reset()

    def end(self, reduced: bool) -> None:
        """Let the rows that were given go: with the mean's, if all has been reduced."""
        given, self._given = self._given, None
        if reduced and given is not None:
            assign(given, self.seen.gradient)


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


def _factor(op: ReduceOp, size: int) -> float:
    """Return what a sum over `size` ranks is multiplied by."""
    factors = {RedOp.SUM: 1.0, RedOp.AVG: 1 / size, RedOp.PREMUL_SUM: op.factor}
    found = factors.get(op.kind)
    if found is None:
        raise ValueError(f"rows of sparse gradients are added up: there is no {op.kind.name}")
    return found


def _only_depth(sizes: Array) -> int:
    """Return how many dimensions address a row: the same on all ranks that have any."""
    depths = {int(depth) for rows, depth in sizes if rows}
    if len(depths) > 1:
        raise ValueError(f"ranks address rows by different numbers of dimensions: {sorted(depths)}")
    return depths.pop() if depths else 0
