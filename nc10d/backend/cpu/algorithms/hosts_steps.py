"""Steps that cross to other hosts, and how programs for a single host become parts of longer ones.

Data from other hosts arrives in a user's array or in scratch memory, which is private to a rank.
Every host's contribution is reduced in the order of hosts, whatever the size or the algorithm. So
the bits of a result are the same on every rank and in every mode.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from nc10d.backend.cpu.algorithms.group_shape import Span
from nc10d.backend.cpu.algorithms.reduction import Reduction
from nc10d.backend.cpu.program.lines import LINE, line_down, line_up
from nc10d.backend.cpu.program.program import At, Kernel, Space, Step, StepKind
from nc10d.backend.cpu.program.steps import apply
from nc10d.ops import SUM, RedOp

HEADER_BYTES = 192
"""Bytes of a call's header: sequence number, fingerprint, and the call as text."""
MESSAGE_BYTES = 88
"""Bytes of a message's header: its tag, size and dtype, and the line that sends it."""


def scratch(offset: int, stride: int = 0) -> At:
    """Point into this rank's scratch memory."""
    return At(Space.SCRATCH, 0, offset, stride)


def give(peer: int, src: At, nbytes: int) -> Step:
    """Send bytes to a rank of another host; a row of a `flow`."""
    return Step(StepKind.GIVE, nbytes, src=src, peer=peer)


def take(peer: int, dst: At, nbytes: int) -> Step:
    """Receive bytes from a rank of another host; a row of a `flow`."""
    return Step(StepKind.TAKE, nbytes, dst=dst, peer=peer)


def push(peer: int, src: At, nbytes: int) -> Step:
    """Send as much as fits into the socket; a later push or give of the same bytes continues."""
    return Step(StepKind.PUSH, nbytes, src=src, peer=peer)


def head() -> Step:
    """Send a message's header; a row of a `flow`."""
    return Step(StepKind.HEAD, MESSAGE_BYTES)


def flow(rows: Iterable[Step]) -> list[Step]:
    """Run all transfers at the same time; at most a single transfer from, and to, each rank."""
    rows = [row for row in rows if row.nbytes]
    for kind in ((StepKind.TAKE,), (StepKind.GIVE, StepKind.HEAD, StepKind.PUSH)):
        peers = [row.peer for row in rows if row.kind in kind]
        assert len(set(peers)) == len(peers), rows
    return [Step(StepKind.FLOW, repeat=len(rows)), *rows] if rows else []


def show(dst: At) -> Step:
    """dst := the header of this call."""
    return Step(StepKind.SHOW, HEADER_BYTES, dst=dst)


def check(src: At, peer: int) -> Step:
    """Compare the header that came from a rank with this call's."""
    return Step(StepKind.CHECK, HEADER_BYTES, src=src, peer=peer)


def expect(src: At, own: At, peer: int) -> Step:
    """Compare the size that a rank announces with the size that this rank expects from it."""
    return Step(StepKind.EXPECT, 8, src=src, own=own, peer=peer)


def pair(dst: At, a: At, b: At, nbytes: int, kernel: Kernel) -> Step:
    """dst = kernel(a, b)."""
    return Step(StepKind.PAIR, nbytes, dst=dst, src=a, own=b, kernel=kernel)


def loop(body: Sequence[Step], repeat: int) -> list[Step]:
    """Run steps `repeat` times, each time a segment further; they end no round."""
    if repeat == 0:
        return []
    return [*body, Step(StepKind.LOOP, repeat=repeat, back=len(body))] if repeat > 1 else [*body]


_LATER = {StepKind.MEET: StepKind.WAIT, StepKind.MEETALL: StepKind.WAITALL}


def continued(steps: Iterable[Step]) -> list[Step]:
    """Return a program for a single host as a later part of another program.

    Its barriers compare no fingerprints, since the earlier part has done so.
    """
    return [
        replace(step, kind=_LATER.get(step.kind, step.kind))
        for step in steps
        if step.kind is not StepKind.ENTER
    ]


SEGMENTS_BYTES = 256 * 1024
"""Bytes of all hosts' segments together, which stay in the L2 cache while they are reduced."""


def within(reduction: Reduction) -> Reduction:
    """Return the reduction inside a host: an average is divided after the last host."""
    return replace(reduction, op=SUM) if reduction.op.kind is RedOp.AVG else reduction


def fold(
    dst: At, parts: Sequence[At], nbytes: int, reduction: Reduction, total: int, room: At
) -> list[Step]:
    """dst = parts, reduced in order. A part may be `dst` itself, but none may be `room`."""
    how = reduction.how
    steps = [pair(room, parts[0], parts[1], nbytes, how.pair)]
    steps += [pair(room, room, part, nbytes, how.pair) for part in parts[2:]]
    steps[-1] = replace(steps[-1], dst=dst)
    if how.last is not None:
        steps.append(apply(dst, dst, nbytes, how.last, how.last_arg))
    return [replace(step, total=total) for step in steps]


@dataclass(frozen=True, slots=True)
class HostChunk:
    """A chunk that a rank of another host receives from this rank: its place and its bytes."""

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
    """dst = all hosts' parts of `nbytes`, reduced in the order of hosts; `own` is this host's part.

    The `outgoing` chunks are sent meanwhile. `sources` names the rank of each other host that sends
    its part. Scratch memory from `base` on is overwritten.
    """
    gives = [give(out.peer, out.place, out.nbytes) for out in outgoing if out.nbytes]
    if nbytes == 0:
        return flow(gives)
    slot = min(max(LINE, line_down(SEGMENTS_BYTES // len(span.hosts))), line_up(nbytes))
    places = {host: scratch(base + turn * slot) for turn, host in enumerate(span.away)}
    # Outgoing data need not keep step with incoming data, so it is pushed without waiting.
    rows = [push(row.peer, row.src, row.nbytes) for row in gives]
    rows += [replace(take(sources[host], places[host], slot), total=nbytes) for host in span.away]
    parts = [
        strided(own, slot) if host == span.host else places[host] for host in range(len(span.hosts))
    ]
    room = scratch(base + len(span.away) * slot)
    body = fold(strided(dst, slot), parts, slot, reduction, nbytes, room)
    return [*loop([*flow(rows), *body], -(-nbytes // slot)), *flow(gives)]


def strided(at: At, stride: int) -> At:
    """Return a place that moves on with each segment."""
    return replace(at, stride=stride)
