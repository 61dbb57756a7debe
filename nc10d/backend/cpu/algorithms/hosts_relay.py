"""An all_reduce between many hosts, whose pieces go from hand to hand.

With a piece for every host, everyone with everyone costs a transfer for each of them, twice. Here
they go in as many rounds as the last host's number has binary digits, together with others' pieces
(Bruck et al. 1997: the index algorithm, then the concatenation). A piece travels further so, up to
half of the digits on the average, which pays while pieces are small. Every host's part still
arrives as it was, and is folded in the order of hosts.
"""

from __future__ import annotations

from collections.abc import Iterator

from nc10d.backend.cpu.algorithms.hosts_barrier import Span
from nc10d.backend.cpu.algorithms.hosts_fold import fold
from nc10d.backend.cpu.algorithms.hosts_steps import flow, give, scratch, take
from nc10d.backend.cpu.algorithms.reduction import Reduction
from nc10d.backend.cpu.program.program import At, Step, moved
from nc10d.backend.cpu.program.steps import copy

HOSTS = 16
"""Hosts from which on there are fewer rounds than transfers, by much."""
PIECE = 2048
"""Bytes of a piece up to which a transfer costs more than to send it a few times.

Both by the cost model, with the constants of `benchmarks/model/machine.py`.
"""


def pays(hosts: int, piece: int) -> bool:
    """Say whether pieces of so many bytes go from hand to hand."""
    return hosts >= HOSTS and piece <= PIECE


def relayed(
    span: Span, place: At, nbytes: int, piece: int, reduction: Reduction, base: int
) -> list[Step]:
    """Reduce `nbytes` at `place` between the ranks that have my number on their hosts.

    Host g's piece is `piece` bytes from g * piece on, as far as there are. In scratch from `base`
    on lies a slot for every host, beginning with mine, and behind them what leaves and what comes.
    """
    count, host = len(span.hosts), span.host
    low = min(nbytes, host * piece)
    mine = min(piece, nbytes - low)
    steps = _dealt(span, place, nbytes, piece, base)
    if mine:
        # In slot d lies now what the host d before mine had for me.
        parts = [scratch(base + (host - g) % count * piece) for g in range(count)]
        parts[host] = moved(place, low)
        steps += fold(scratch(base), parts, mine, reduction, 0, scratch(base + count * piece))
    steps += _collected(span, piece, base)
    steps += _copies(moved(place, low), scratch(base), nbytes - low)
    return [*steps, *_copies(place, scratch(base + (count - host) * piece), low)]


def _dealt(span: Span, place: At, nbytes: int, piece: int, base: int) -> list[Step]:
    """Bring each host's piece to it: in each round half of the slots, those with one digit."""
    count, host = len(span.hosts), span.host
    out = base + count * piece
    came = out + count // 2 * piece
    high = (host + 1) * piece
    steps = _copies(scratch(base + piece), moved(place, high), max(0, nbytes - high))
    before = scratch(base + (count - host) * piece)
    steps += _copies(before, place, min(nbytes, host * piece))
    for far in _distances(count):
        runs = list(_runs(count, far, piece))
        total = sum(length for _, _, length in runs)
        for slot, packed, length in runs:
            steps.append(copy(scratch(out + packed), scratch(base + slot), length))
        to, source = _partners(span, far)
        steps += flow([give(to, scratch(out), total), take(source, scratch(came), total)])
        for slot, packed, length in runs:
            steps.append(copy(scratch(base + slot), scratch(came + packed), length))
    return steps


def _collected(span: Span, piece: int, base: int) -> list[Step]:
    """Bring all hosts' results into the slots, mine being in the first one."""
    count = len(span.hosts)
    steps: list[Step] = []
    for have in _distances(count):
        source, to = _partners(span, have)
        total = min(have, count - have) * piece
        row = take(source, scratch(base + have * piece), total)
        steps += flow([give(to, scratch(base), total), row])
    return steps


def _distances(count: int) -> Iterator[int]:
    far = 1
    while far < count:
        yield far
        far *= 2


def _partners(span: Span, far: int) -> tuple[int, int]:
    """Return the ranks like me on the hosts `far` behind mine, and before it."""
    count = len(span.hosts)
    behind, ahead = (span.host + far) % count, (span.host - far) % count
    return span.hosts[behind][span.mate], span.hosts[ahead][span.mate]


def _runs(count: int, far: int, piece: int) -> Iterator[tuple[int, int, int]]:
    """Yield the slots whose number has the binary digit `far`, in runs: place, packed, bytes."""
    packed = 0
    for slot in range(far, count, 2 * far):
        length = min(far, count - slot) * piece
        yield slot * piece, packed, length
        packed += length


def _copies(dst: At, src: At, nbytes: int) -> list[Step]:
    return [copy(dst, src, nbytes)] if nbytes else []
