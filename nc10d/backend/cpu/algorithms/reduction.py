"""How a rank publishes its contribution to a reduction, and how contributions are combined.

PREMUL_SUM scales each contribution when publishing. AVG divides the sum at the end. All other
operations publish a copy and combine pairwise, in rank order.

All hosts' contributions are reduced in host order, whatever the size or the algorithm; in rank
order, if the operation is `ordered`. So a result's bits are the same on every rank and in every
mode.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from nc10d.arrays.dtypes import ElementKind, ElementType, order_matters
from nc10d.backend.cpu.algorithms.group_shape import Span
from nc10d.backend.cpu.program import steps as do
from nc10d.backend.cpu.program.program import (
    LINE,
    At,
    Combine,
    Kernel,
    Step,
    StepKind,
    Steps,
    scratch,
)
from nc10d.ops import ReduceOp

_FLOATS = ElementKind.FLOAT, ElementKind.COMPLEX


@dataclass(frozen=True, slots=True)
class Reduction:
    """A reduce operation on one type of elements, for a group of `size`."""

    op: ReduceOp
    dtype: ElementType
    size: int

    @property
    def unit(self) -> int:
        """The bytes at whose multiples arrays are cut: whole elements, and lines if possible."""
        return self.dtype.itemsize if LINE % self.dtype.itemsize else LINE

    def up(self, nbytes: int) -> int:
        """Round up to a place where arrays are cut."""
        return -(-nbytes // self.unit) * self.unit

    def down(self, nbytes: int) -> int:
        """Round down to a place where arrays are cut."""
        return nbytes // self.unit * self.unit

    @property
    def in_rank_order(self) -> bool:
        """Whether hosts must not fold first: another order could change the result."""
        return self.op.by_rank and order_matters(self.op, self.dtype, self.size)

    @property
    def scaled(self) -> bool:
        """Whether a published contribution differs from the user's array."""
        return bool(self.op.kind.prepares)

    @property
    def how(self) -> Combine:
        """The pairwise kernel, and an average's division after the last pair."""
        kind = self.op.kind
        pair = Kernel(kind.pairwise.name, self.dtype)
        sums = kind.pairwise.name == "SUM" and not kind.prepares
        pairs = self.size == 2 and sums and self.dtype.family in _FLOATS
        both = Kernel(f"BOTH_{kind.name}", self.dtype) if pairs else None
        item = self.dtype.itemsize
        if not kind.finishes:
            return Combine(pair, both=both, item=item)
        return Combine(pair, Kernel(kind.finishes, self.dtype), self.size, both, item)

    def publish(self, dst: At, src: At, nbytes: int, total: int = 0) -> Step:
        """Return the step that publishes a contribution at `dst`."""
        if not self.scaled:
            return do.copy(dst, src, nbytes, total)
        kernel, factor = Kernel(self.op.kind.prepares, self.dtype), self.op.factor
        return do.apply(dst, src, nbytes, kernel, 0 if factor is None else factor, total)

    def alone(self, dst: At, src: At, nbytes: int, total: int = 0) -> list[Step]:
        """Return the steps for dst := the reduction of a single contribution."""
        steps = [self.publish(dst, src, nbytes, total)] if self.scaled or dst != src else []
        last = self.how.last if self.op.kind.finishes_one else None
        return [*steps, *([do.apply(dst, dst, nbytes, last, 1, total)] if last else [])]


def continued(steps: Iterable[Step]) -> list[Step]:
    """Return a single host's program as a later part of a program that has compared the calls."""
    return [
        replace(step, kind=StepKind.WAIT_ALL) if step.kind is StepKind.MEET_ALL else step
        for step in steps
        if step.kind is not StepKind.ENTER
    ]


SEGMENTS_BYTES = 256 * 1024
"""Bytes in all hosts' segments together, which stay in the L2 cache while they are reduced."""


def within(reduction: Reduction) -> Reduction:
    """Return the reduction inside a host: an average is divided after the last host."""
    return replace(reduction, op=reduction.op.unfinished)


def fold(
    dst: At, parts: Sequence[At], nbytes: int, reduction: Reduction, total: int, room: At
) -> list[Step]:
    """dst = parts, reduced in order. A part may be `dst` itself, but none may be `room`."""
    how = reduction.how
    steps = [do.pair(room, parts[0], parts[1], nbytes, how.pair)]
    steps += [do.pair(room, room, part, nbytes, how.pair) for part in parts[2:]]
    steps[-1] = replace(steps[-1], dst=dst)
    if how.last is not None:
        steps.append(do.apply(dst, dst, nbytes, how.last, how.last_arg))
    return [replace(step, total=total) for step in steps]


def reduce_across(
    span: Span,
    gives: Steps,
    sources: dict[int, int],
    own: At,
    dst: At,
    nbytes: int,
    reduction: Reduction,
    base: int,
) -> list[Step]:
    """dst = all hosts' parts of `nbytes`, in host order; `own` is this host's part."""
    # The steps `gives` meanwhile send what other hosts reduce. `sources` names the rank on each
    # other host that sends that host's part. Scratch memory from `base` on is overwritten.
    if nbytes == 0:
        return do.flow(gives)
    segment = segment_of(reduction, nbytes, len(span.hosts))
    places = {host: scratch(base + turn * segment) for turn, host in enumerate(span.away)}
    # Outgoing data need not keep step with incoming data, so it is pushed without waiting.
    rows = [do.push(row.peer, row.src, row.nbytes) for row in gives]
    takes = [do.take(sources[host], places[host], segment) for host in span.away]
    rows += [replace(take, total=nbytes) for take in takes]
    places[span.host] = strided(own, segment)
    parts = [places[host] for host in range(len(span.hosts))]
    room = scratch(base + len(span.away) * segment)
    body = fold(strided(dst, segment), parts, segment, reduction, nbytes, room)
    return [*do.loop([*do.flow(rows), *body], -(-nbytes // segment)), *do.flow(gives)]


def segment_of(reduction: Reduction, nbytes: int, parts: int) -> int:
    """Return the bytes of a segment in which so many parts are folded."""
    most = reduction.down(SEGMENTS_BYTES // parts)
    return min(max(reduction.unit, most), reduction.up(nbytes))


def strided(at: At, stride: int) -> At:
    """Return a place that moves on with each segment."""
    return replace(at, stride=stride)
