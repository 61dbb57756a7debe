"""scan and exscan: a rank folds the arrays of the ranks up to itself, or before it, in rank order.

On one host. In each round a rank publishes its array's next piece in its staging buffer and signals
tick 1. When all ranks have done so, each rank folds the pieces for its own result. The rounds are
as in all_gather: each waits for all ranks, so the slot from the round before is free.

On several hosts. A run is a sequence of consecutive ranks on the same host. A run's ranks fold the
prefix of all earlier runs, and then pieces of their own run as above. A run's last rank sends the
prefix behind its own piece to every rank in the next run. The first run waits for no other, each
run waits only for the run before, and no rank begins a round before all local ranks have published:
so no ranks wait for each other in a circle.

Both fold from rank 0 on, one array after the other: the bits do not depend on the hosts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from nc10d.backend.cpu.algorithms.group_shape import GroupShape, span_of
from nc10d.backend.cpu.algorithms.hosts_barrier import opening
from nc10d.backend.cpu.algorithms.reduction import Reduction, continued, fold
from nc10d.backend.cpu.program import steps as do
from nc10d.backend.cpu.program.program import (
    INLINE_BYTES,
    At,
    Step,
    inline,
    moved,
    scratch,
    staging,
)
from nc10d.ops import ReduceOp


@dataclass(frozen=True, slots=True)
class Run:
    """This rank's run: the ranks, their local ranks, and the runs before and behind."""

    ranks: Sequence[int]
    places: Sequence[int]
    before: Sequence[int]
    behind: Sequence[int]


def scan(
    shape: GroupShape, nbytes: int, x: At, reduction: Reduction, exclusive: bool, first: At | None
) -> list[Step]:
    """Return the steps for x := x of the ranks up to this rank (`exclusive`: before it), reduced.

    In an exclusive scan rank 0 keeps its array, or gets copies of the piece at `first`, which has
    `slot_bytes` or as many as x.
    """
    slot = reduction.down(shape.slot_bytes)
    rounds = -(-nbytes // slot)
    if shape.size == 1:
        x = moved(x, 0, slot)
        if exclusive:
            step = [] if first is None else [do.copy(x, first, slot, nbytes)]
        else:
            step = reduction.alone(x, x, slot, nbytes)
        return do.alone(do.loop(step, rounds if step else 0))
    if nbytes == 0:
        return opening(span_of(shape)) if shape.hosts else do.single_round()
    parts = _Parts(_run_of(shape), shape, nbytes, x, reduction, exclusive, first)
    steps = [*parts.round(0), do.end_round(1, 2)]
    if rounds > 1:
        body = parts.round(slot)
        steps += [*body, do.end_round(1, 2, rounds - 1, len(body))]
    return [*opening(span_of(shape)), *continued(steps)] if shape.hosts else steps


def _run_of(shape: GroupShape) -> Run:
    if shape.hosts is None:
        return Run(range(shape.size), range(shape.size), (), ())
    places = shape.hosts.places
    runs = [[*run] for _, run in groupby(range(shape.size), shape.hosts.host_of)]
    at = next(i for i, run in enumerate(runs) if shape.rank in run)
    behind = runs[at + 1] if at + 1 < len(runs) else []
    return Run(runs[at], [places[r][1] for r in runs[at]], runs[at - 1] if at else [], behind)


@dataclass(frozen=True, slots=True)
class _Parts:
    """A rank's steps for a piece of the array, from `base` on."""

    run: Run
    shape: GroupShape
    nbytes: int
    x: At
    reduction: Reduction
    exclusive: bool
    first: At | None

    def round(self, base: int) -> list[Step]:
        """Return a round's steps but the end; with a base, those of every later round."""
        shape, run, slot = self.shape, self.run, self._slot
        local, left = shape.local, self.nbytes - base
        x = moved(self.x, base, slot)
        begin = [] if base else [do.free(), do.enter()]
        publish = self.reduction.publish(self._piece(local.rank), x, slot, left)
        steps = [*begin, publish, do.signal(1), do.wait_all(1) if base else do.meet_all()]
        if run.before:
            steps += do.flow([do.take(run.before[-1], scratch(0), slot)])
        up_to = shape.rank if self.exclusive else shape.rank + 1
        changes = self.reduction.scaled or self.reduction.op.kind.finishes_one
        if up_to != 1 or self.exclusive or changes:  # else x is the result
            steps += self._fold(x, up_to, left, self.reduction.op)
        if run.behind and shape.rank == run.ranks[-1]:
            whole = scratch(slot) if self.exclusive or self.reduction.how.last else x
            if whole is not x:
                steps += self._fold(whole, shape.rank + 1, left, self.reduction.op.unfinished)
            steps += do.flow([do.give(rank, whole, slot) for rank in run.behind])
        return [replace(step, total=left) if step.nbytes else step for step in steps]

    @property
    def _slot(self) -> int:
        return self.reduction.down(self.shape.slot_bytes)

    def _piece(self, local_rank: int) -> At:
        small = self.nbytes <= INLINE_BYTES
        return inline(local_rank) if small else staging(local_rank)

    def _fold(self, dst: At, up_to: int, left: int, op: ReduceOp) -> list[Step]:
        """dst := the arrays of the ranks before `up_to`, reduced by `op` in rank order"""
        slot, run = self._slot, self.run
        if up_to == 0:
            return [] if self.first is None else [do.copy(dst, self.first, slot)]
        parts = [scratch(0)] if run.before else []
        parts += [self._piece(place) for place in run.places[: up_to - run.ranks[0]]]
        reduction = Reduction(op, self.reduction.dtype, up_to)
        if len(parts) > 1:
            return fold(dst, parts, slot, reduction, left, dst)
        last = reduction.how.last
        if last is None:
            return [do.copy(dst, parts[0], slot)]
        return [do.apply(dst, parts[0], slot, last, up_to)]
