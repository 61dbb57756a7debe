"""How hosts' partial results become one, segment by segment while they come.

Every host's part is folded in the order of hosts, whatever the size or the algorithm: so the bits
of a result are the same on every rank and in every mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from nc10d.backend.cpu.algorithms.hosts_barrier import Span
from nc10d.backend.cpu.algorithms.hosts_steps import flow, give, loop, pair, push, scratch, take
from nc10d.backend.cpu.algorithms.reduction import Reduction
from nc10d.backend.cpu.program.lines import LINE, line_down, line_up
from nc10d.backend.cpu.program.program import At, Step
from nc10d.backend.cpu.program.steps import apply
from nc10d.ops import SUM, RedOp

SEGMENTS_BYTES = 256 * 1024
"""All hosts' segments together: they stay in the second cache while they are folded."""


def within(reduction: Reduction) -> Reduction:
    """Return the reduction inside a host: an average is divided at the very end."""
    return replace(reduction, op=SUM) if reduction.op.kind is RedOp.AVG else reduction


def fold(
    dst: At, parts: Sequence[At], nbytes: int, reduction: Reduction, total: int, room: At
) -> list[Step]:
    """dst = parts, folded in order; one of them may be dst itself, none is `room`."""
    how = reduction.how
    steps = [pair(room, parts[0], parts[1], nbytes, how.pair)]
    steps += [pair(room, room, part, nbytes, how.pair) for part in parts[2:]]
    steps[-1] = replace(steps[-1], dst=dst)
    if how.last is not None:
        steps.append(apply(dst, dst, nbytes, how.last, how.last_arg))
    return [replace(step, total=total) for step in steps]


@dataclass(frozen=True, slots=True)
class HostChunk:
    """What a rank of another host must get of mine: its place here and its bytes."""

    peer: int
    place: At
    nbytes: int


def reduce_across(
    span: Span,
    outgoing: Sequence[HostChunk],
    sources: dict[int, int],
    own: At,
    dst: At,
    nbytes: int,
    reduction: Reduction,
    base: int,
) -> list[Step]:
    """dst = every host's part of `nbytes`, mine being `own`, while my other parts leave.

    `sources` says which rank of each other host sends its part. Scratch from `base` on is used.
    """
    gives = [give(out.peer, out.place, out.nbytes) for out in outgoing if out.nbytes]
    if nbytes == 0:
        return flow(gives)
    slot = min(max(LINE, line_down(SEGMENTS_BYTES // len(span.hosts))), line_up(nbytes))
    places = {host: scratch(base + turn * slot) for turn, host in enumerate(span.away)}
    # What leaves need not keep step with what comes.
    rows = [push(row.peer, row.src, row.nbytes) for row in gives]
    rows += [replace(take(sources[host], places[host], slot), total=nbytes) for host in span.away]
    parts = [
        strided(own, slot) if host == span.host else places[host] for host in range(len(span.hosts))
    ]
    room = scratch(base + len(span.away) * slot)
    body = fold(strided(dst, slot), parts, slot, reduction, nbytes, room)
    return [*loop([*flow(rows), *body], -(-nbytes // slot)), *flow(gives)]


def strided(at: At, stride: int) -> At:
    """Return a place that advances with the segments."""
    return replace(at, stride=stride)
