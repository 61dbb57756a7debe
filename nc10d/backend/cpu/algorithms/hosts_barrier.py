"""How hosts meet in a collective, and how small contributions travel while they do.

One rank of each host, the leader, tells the others what its host calls: in round k to the leader
2^k hosts before it, once it has heard from the one 2^k hosts behind it (dissemination: Hensgen,
Finkel, Manber 1988). A leader that has passed all rounds knows that every host has entered, with
the same call. Contributions may ride along: each round carries all blocks gathered so far (Bruck
et al. 1997), so that after the last round every leader has every host's.
"""

from __future__ import annotations

from dataclasses import dataclass

from nc10d.backend.cpu.algorithms.group_shape import GroupShape
from nc10d.backend.cpu.algorithms.hosts_steps import (
    HEADER_BYTES,
    check,
    flow,
    give,
    scratch,
    show,
    take,
)
from nc10d.backend.cpu.program.program import At, Step
from nc10d.backend.cpu.program.steps import copy, end_round, enter, free, meet_all, signal, wait


@dataclass(frozen=True, slots=True)
class Span:
    """A group across hosts, as one of its ranks sees it."""

    hosts: tuple[tuple[int, ...], ...]
    host: int
    near: GroupShape
    size: int

    @property
    def mate(self) -> int:
        """This rank's number on its host."""
        return self.near.rank

    @property
    def away(self) -> list[int]:
        """The other hosts, beginning with the next one."""
        count = len(self.hosts)
        return [(self.host + i) % count for i in range(1, count)]

    def leader(self, host: int) -> int:
        """Return the rank that speaks for a host."""
        return self.hosts[host][0]


def span_of(layout: GroupShape) -> Span:
    """Return the view of a layout across hosts."""
    assert layout.hosts is not None, layout
    host = layout.hosts.host_of(layout.rank)
    return Span(layout.hosts.hosts, host, layout.near, layout.size)


@dataclass(frozen=True, slots=True)
class Gathered:
    """Where the leaders' blocks of `nbytes` lie in scratch memory from `base` on."""

    span: Span
    nbytes: int
    base: int = 0

    @property
    def mine(self) -> int:
        """Offset of my host's block, behind its header."""
        return self.base + HEADER_BYTES

    @property
    def came(self) -> int:
        """Offset of what comes in a round: a header, then blocks."""
        return self.mine + len(self.span.hosts) * self.nbytes

    def block(self, host: int, offset: int = 0) -> At:
        """Return the place of a host's block."""
        count = len(self.span.hosts)
        turn = (host - self.span.host) % count
        if count == 2 and turn:  # one round: what came can stay where it is
            return scratch(self.came + HEADER_BYTES + offset)
        return scratch(self.mine + turn * self.nbytes + offset)

    def steps(self) -> list[Step]:
        """Return a leader's steps: meet the other hosts and gather everyone's block."""
        span, count = self.span, len(self.span.hosts)
        steps = [show(scratch(self.base))]
        have = 1
        while have < count:
            more = min(have, count - have)
            to = span.leader((span.host - have) % count)
            source = span.leader((span.host + have) % count)
            nbytes = HEADER_BYTES + more * self.nbytes
            steps += flow(
                [give(to, scratch(self.base), nbytes), take(source, scratch(self.came), nbytes)]
            )
            steps.append(check(scratch(self.came), source))
            if self.nbytes and count > 2:
                place = scratch(self.mine + have * self.nbytes)
                came = scratch(self.came + HEADER_BYTES)
                steps.append(copy(place, came, more * self.nbytes))
            have += more
        return steps


def opening(span: Span) -> list[Step]:
    """Nobody goes on before everybody, on all hosts, has entered with the same call."""
    steps = [free(), enter(), signal(1), meet_all(), *meet_hosts(span)]
    return [*steps, *([signal(2)] if span.mate else []), end_round(2, 2)]


def meet_hosts(span: Span) -> list[Step]:
    """Of a host whose ranks have all entered: go on when those of all hosts have."""
    return [wait(0, 2)] if span.mate else [*Gathered(span, 0).steps(), signal(2)]
