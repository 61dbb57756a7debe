"""The barrier between hosts, which carries small arrays.

The lowest rank of each host is its leader. In round k a leader sends the header of its host's call
to the leader 2^k hosts before, and receives the header of the host 2^k behind (dissemination:
Hensgen, Finkel and Manber 1988). A leader that has passed all rounds knows that every host's ranks
have entered, with the same call.

A round may also carry all blocks gathered so far (Bruck et al. 1997). After the last round every
leader has all hosts' blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

from nc10d.backend.cpu.algorithms.group_shape import Span
from nc10d.backend.cpu.program import steps as do
from nc10d.backend.cpu.program.program import At, Step, moved, scratch


@dataclass(frozen=True, slots=True)
class Gathered:
    """The leaders' blocks of `nbytes` each, in scratch memory from `base` on."""

    span: Span
    nbytes: int
    base: int = 0

    @property
    def mine(self) -> int:
        """Offset of this host's block, behind its header."""
        return self.base + do.HEADER_BYTES

    @property
    def came(self) -> int:
        """Offset of the message received in a round: a header, then blocks."""
        return self.mine + len(self.span.hosts) * self.nbytes

    def block(self, host: int, offset: int = 0) -> At:
        """Return the place of a host's block."""
        count = len(self.span.hosts)
        turn = (host - self.span.host) % count
        if count == 2 and turn:  # A single round: the received block stays in its place.
            return scratch(self.came + do.HEADER_BYTES + offset)
        return scratch(self.mine + turn * self.nbytes + offset)

    def steps(self) -> list[Step]:
        """Return a leader's steps: pass the barrier and gather all hosts' blocks."""
        span, count = self.span, len(self.span.hosts)
        steps = [do.call_header(scratch(self.base))]
        have = 1
        while have < count:
            more = min(have, count - have)
            to = span.leader((span.host - have) % count)
            source = span.leader((span.host + have) % count)
            nbytes = do.HEADER_BYTES + more * self.nbytes
            came = scratch(self.came)
            give = do.give(to, scratch(self.base), nbytes)
            steps += do.flow([give, do.take(source, came, nbytes)])
            steps.append(do.check_header(came, source))
            if self.nbytes and count > 2:
                place = scratch(self.mine + have * self.nbytes)
                steps.append(do.copy(place, moved(came, do.HEADER_BYTES), more * self.nbytes))
            have += more
        return steps


def opening(span: Span) -> list[Step]:
    """Return the steps for a barrier of all ranks, which compares their calls."""
    steps = [do.free(), do.enter(), do.signal(1), do.meet_all(), *meet_hosts(span)]
    return [*steps, *([do.signal(2)] if span.local_rank else []), do.end_round(2, 2)]


def meet_hosts(span: Span) -> list[Step]:
    """Return the steps for the barrier between hosts, for a host whose ranks have all entered."""
    return [do.wait(0, 2)] if span.local_rank else [*Gathered(span, 0).steps(), do.signal(2)]
