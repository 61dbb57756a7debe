"""Steps that cross to other hosts, and the transformations that make local programs parts of
programs across hosts.

A rank's scratch memory is its own: what comes from other hosts and is no user's array lands there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from nc10d.backend.cpu.program.program import At, Kernel, Space, Step, StepKind

HEADER_BYTES = 192
"""What hosts compare of each other's calls: sequence number, fingerprint, and the call as text."""
MESSAGE_BYTES = 88
"""What goes before a message: its tag, size and dtype, and the line that sends it."""


def scratch(offset: int, stride: int = 0) -> At:
    """Point into this rank's own scratch memory."""
    return At(Space.SCRATCH, 0, offset, stride)


def give(peer: int, src: At, nbytes: int) -> Step:
    """Send bytes to a rank of another host; a row of a `flow`."""
    return Step(StepKind.GIVE, nbytes, src=src, peer=peer)


def take(peer: int, dst: At, nbytes: int) -> Step:
    """Receive bytes from a rank of another host; a row of a `flow`."""
    return Step(StepKind.TAKE, nbytes, dst=dst, peer=peer)


def push(peer: int, src: At, nbytes: int) -> Step:
    """Send as much as goes, without waiting; a later push or give of the same bytes goes on."""
    return Step(StepKind.PUSH, nbytes, src=src, peer=peer)


def head() -> Step:
    """Send what goes before a message; a row of a `flow`."""
    return Step(StepKind.HEAD, MESSAGE_BYTES)


def flow(rows: Iterable[Step]) -> list[Step]:
    """Carry out transfers, all at once; at most one from, and one to, each rank."""
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
    """Compare the size that a rank announces with the one that is awaited from it."""
    return Step(StepKind.EXPECT, 8, src=src, own=own, peer=peer)


def pair(dst: At, a: At, b: At, nbytes: int, kernel: Kernel) -> Step:
    """dst = kernel(a, b)."""
    return Step(StepKind.PAIR, nbytes, dst=dst, src=a, own=b, kernel=kernel)


def loop(body: Sequence[Step], repeat: int) -> list[Step]:
    """Run steps `repeat` times, one segment further each; they end no round."""
    if repeat == 0:
        return []
    return [*body, Step(StepKind.LOOP, repeat=repeat, back=len(body))] if repeat > 1 else [*body]


_LATER = {StepKind.MEET: StepKind.WAIT, StepKind.MEETALL: StepKind.WAITALL}


def continued(steps: Iterable[Step]) -> list[Step]:
    """Return a local program as a later part of another: who has met needs no fingerprints."""
    return [
        replace(step, kind=_LATER.get(step.kind, step.kind))
        for step in steps
        if step.kind is not StepKind.ENTER
    ]
