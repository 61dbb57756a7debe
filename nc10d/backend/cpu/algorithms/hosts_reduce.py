"""Reductions, broadcast and barrier in a group that spans hosts.

all_reduce and reduce:

- Small arrays travel with the barrier between hosts (hosts_barrier.py). Each leader reduces its
  host's arrays and, after the barrier, all hosts' blocks.
- Large arrays: after a barrier each host reduces its ranks' arrays, a chunk per rank. The ranks
  with the same local rank on all hosts form a rail. They reduce-scatter and all-gather their chunk
  by direct exchange. Then a host's ranks gather the chunks from each other. Inside a host this
  takes the staging buffers, or access in place (hosts_peer_arrays.py).

Both reduce in rank order inside a host and then in host order, so the bits do not depend on the
algorithm. An `ordered` reduction whose result depends on the order is an exchange instead: each
rank folds all ranks' contributions to its chunk in rank order, and sends the result to all.

broadcast: down a binomial tree of hosts, or down a chain in segments for large arrays; then inside
each host.

Not done, because ranks keep step then, and sleep ten times as often: results that leave segment by
segment between the parts still to be sent. Not done, because one socket was as fast as two or four:
several sockets for a pair of ranks. Segments of half to six times the size gained nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from nc10d.backend.cpu.algorithms import broadcast as local
from nc10d.backend.cpu.algorithms import gather, hosts_peer_arrays
from nc10d.backend.cpu.algorithms.all_reduce import FusedArray
from nc10d.backend.cpu.algorithms.group_shape import GroupShape, Span, span_of
from nc10d.backend.cpu.algorithms.hosts_barrier import Gathered, opening
from nc10d.backend.cpu.algorithms.hosts_exchange import gathered, ordered_reduce_scatter
from nc10d.backend.cpu.algorithms.hosts_peer_arrays import Cut
from nc10d.backend.cpu.algorithms.peer_arrays import windows_of
from nc10d.backend.cpu.algorithms.reduction import Reduction, continued, fold, reduce_across, within
from nc10d.backend.cpu.program import steps as do
from nc10d.backend.cpu.program.program import (
    At,
    Step,
    Steps,
    line_up,
    moved,
    scratch,
    staging,
    user,
)

SMALL_BYTES = 256 * 1024
"""The most bytes from all hosts together that travel with the barrier."""
LEAST = 2048
"""A host's bytes that travel with the barrier however many hosts there are.

With many hosts the rails are even slower; computed from times on two cores, not measured.
"""
SEGMENT = 256 * 1024
"""Bytes of a broadcast that a host forwards at a time."""
MOST_WINDOWS = 16
"""The most windows in a broadcast that are announced to local peers as they arrive."""
CHAINED = 128 * 1024
"""Bytes per host from which a broadcast goes down a chain of hosts.

Computed from times on two cores, not measured with many hosts.
"""


def one_shot_limit(shape: GroupShape) -> int:
    """Return the largest array in bytes that travels with the barrier between hosts."""
    assert shape.hosts is not None, shape
    return min(shape.one_shot, shape.slot_bytes, max(LEAST, SMALL_BYTES // len(shape.hosts.hosts)))


def barrier(shape: GroupShape) -> list[Step]:
    """Return the steps for a barrier: no rank leaves before all have entered."""
    return opening(span_of(shape))


def all_reduce(shape: GroupShape, nbytes: int, reduction: Reduction, root: int = -1) -> list[Step]:
    """Return the steps that reduce all ranks' user array 0 in place, or only on the root."""
    if nbytes <= one_shot_limit(shape) and not reduction.in_rank_order:
        return fused(shape, [FusedArray(0, nbytes, reduction)], root)
    span = span_of(shape)
    place, base, copied = user(0), 0, []
    if root not in (-1, shape.rank):  # A non-root rank's array stays unchanged.
        place, base = scratch(0), line_up(nbytes)
        copied = [do.copy(place, user(0), nbytes)]
    if reduction.in_rank_order:
        return [*opening(span), *copied, *_ordered(span, place, nbytes, reduction, base)]
    cuts = _cuts(span, nbytes, reduction)
    low, length = cuts[span.local_rank]
    rail = _rail(span, moved(place, low), length, reduction, base) if length else []
    staged = [*opening(span), *copied, *_over_staging(span, place, cuts, reduction, rail)]
    if root >= 0 or reduction.scaled or not hosts_peer_arrays.applies(span, nbytes):
        return staged
    return hosts_peer_arrays.all_reduce(span, nbytes, cuts, within(reduction), rail, staged)


def _ordered(span: Span, x: At, nbytes: int, reduction: Reduction, base: int) -> list[Step]:
    """Reduce `nbytes` at `x` in rank order: each rank folds a chunk, and gets the others."""
    chunk = reduction.up(-(-nbytes // span.shape.size))
    lows = [min(nbytes, r * chunk) for r in range(span.shape.size)]
    sizes = [min(chunk, nbytes - low) for low in lows]
    places = [moved(x, low) for low in lows]
    mine = places[span.shape.rank]
    steps = ordered_reduce_scatter(span, sizes, mine, places, reduction, base)
    return [*steps, *gathered(span, sizes, mine, places)]


def fused(shape: GroupShape, parts: Sequence[FusedArray], root: int = -1) -> list[Step]:
    """Return the steps that reduce several small arrays, which share a barrier."""
    span = span_of(shape)
    parts = [part for part in parts if part.nbytes]
    if not parts:
        return opening(span)
    offsets = [sum(line_up(p.nbytes) for p in parts[:i]) for i in range(len(parts))]
    gathered = Gathered(span, offsets[-1] + line_up(parts[-1].nbytes))
    wanted = root in (-1, shape.rank)
    if span.local.size == 1:
        return _fused_alone(gathered, parts, offsets, wanted)
    if span.local_rank == 0:
        return _fused_leader(gathered, parts, offsets, wanted)
    publishes, reads = [], []
    for part, offset in zip(parts, offsets, strict=True):
        at = user(part.index)
        publishes.append(part.reduction.publish(staging(span.local_rank, offset), at, part.nbytes))
        if wanted:
            reads.append(do.copy(at, staging(0, offset), part.nbytes))
    steps = [do.free(), do.enter(), *publishes, do.signal(1), do.meet_all()]
    return [*steps, do.wait(0, 2), *reads, do.signal(2), do.end_round(2, 2)]


def _fused_alone(
    gathered: Gathered, parts: Sequence[FusedArray], offsets: Sequence[int], wanted: bool
) -> list[Step]:
    steps = [do.free(), do.enter()]
    for part, offset in zip(parts, offsets, strict=True):
        mine = scratch(gathered.mine + offset)
        steps.append(part.reduction.publish(mine, user(part.index), part.nbytes))
    steps += gathered.steps()
    for part, offset in zip(parts, offsets, strict=True) if wanted else ():
        steps += _fold_blocks(gathered, part, offset, user(part.index))
    return [*steps, do.end_round(1, 2)]


def _fused_leader(
    gathered: Gathered, parts: Sequence[FusedArray], offsets: Sequence[int], wanted: bool
) -> list[Step]:
    publishes: list[Step] = []
    folds: list[Step] = []
    results: list[Step] = []
    for part, offset in zip(parts, offsets, strict=True):
        mine, how = staging(0, offset), within(part.reduction).how
        publishes.append(part.reduction.publish(mine, user(part.index), part.nbytes))
        block = scratch(gathered.mine + offset)
        folds.append(do.fold_staged(block, staging(0, offset), mine, part.nbytes, how))
        # Only this rank reads its own contribution, so the result may replace it.
        results += _fold_blocks(gathered, part, offset, mine)
        if wanted:
            results.append(do.copy(user(part.index), mine, part.nbytes))
    steps = [do.free(), do.enter(), *publishes, do.signal(1), do.meet_all(), *folds]
    return [*steps, *gathered.steps(), *results, do.signal(2), do.end_round(2, 2)]


def _fold_blocks(gathered: Gathered, part: FusedArray, offset: int, dst: At) -> list[Step]:
    hosts = range(len(gathered.span.hosts))
    blocks = [gathered.block(host, offset) for host in hosts]
    return fold(dst, blocks, part.nbytes, part.reduction, 0, dst)


def _cuts(span: Span, nbytes: int, how: Reduction) -> list[Cut]:
    """Return the offset and the bytes of the part that each local rank has."""
    rails = min(map(len, span.hosts))  # so many local ranks exist on every host
    chunk = how.up(-(-nbytes // rails))
    lows = [min(nbytes, r * chunk) for r in range(span.local.size)]
    return [(low, min(chunk, nbytes - low)) for low in lows]


def _over_staging(
    span: Span, place: At, cuts: Sequence[Cut], reduction: Reduction, rail: Steps
) -> list[Step]:
    """Reduce this rank's part of `place`, then between hosts by `rail`; gather the other parts."""
    sizes = [length for _, length in cuts]
    places = [moved(place, low) for low, _ in cuts]
    mine = places[span.local_rank]
    if span.local.size == 1:
        scaled = [reduction.publish(mine, mine, sizes[0])] if reduction.scaled else []
        return [*scaled, *rail]
    steps = continued(gather.reduce_scatter(span.local, sizes, mine, places, within(reduction)))
    return [*steps, *rail, *continued(gather.all_gather(span.local, sizes, mine, places))]


def _rail(span: Span, place: At, nbytes: int, reduction: Reduction, base: int) -> list[Step]:
    """Reduce `nbytes` at `place` between the ranks with this local rank on their hosts."""
    count = len(span.hosts)
    piece = reduction.up(-(-nbytes // count))
    cuts = [(min(nbytes, g * piece), min(nbytes, (g + 1) * piece)) for g in range(count)]
    at = [moved(place, low) for low, _ in cuts]
    length = [high - low for low, high in cuts]
    peer = {g: span.hosts[g][span.local_rank] for g in span.away}
    outgoing = [do.give(peer[g], at[g], length[g]) for g in span.away]
    mine = at[span.host]
    steps = reduce_across(span, outgoing, peer, mine, mine, length[span.host], reduction, base)
    rows = [do.give(peer[g], mine, length[span.host]) for g in span.away]
    return [*steps, *do.flow([*rows, *(do.take(peer[g], at[g], length[g]) for g in span.away)])]


def broadcast(shape: GroupShape, nbytes: int, root: int) -> list[Step]:
    """Return the steps that copy the root's user array 0 to all ranks."""
    # In a chain no host sends more than once, but the last host receives late.
    span = span_of(shape)
    if nbytes == 0:
        return opening(span)
    assert shape.hosts is not None
    home, root_local_rank = shape.hosts.places[root]
    forwarders = [root if g == home else span.leader(g) for g in range(len(span.hosts))]
    source = root_local_rank if span.host == home else 0

    def passed_on(low: int, count: int) -> list[Step]:
        return _passed_on(span, forwarders, home, nbytes, low, count)

    steps = opening(span)
    if span.local_rank == source:
        steps += passed_on(0, nbytes)
    if span.local.size == 1:
        return steps
    steps += continued(local.broadcast(span.local, nbytes, source))
    if not hosts_peer_arrays.applies(span, nbytes):
        return steps
    windows = [] if span.host == home else windows_of(nbytes, shape.window, MOST_WINDOWS)
    return hosts_peer_arrays.broadcast(span, nbytes, source, windows, passed_on, steps)


def _passed_on(
    span: Span, forwarders: Sequence[int], home: int, nbytes: int, low: int, count: int
) -> list[Step]:
    """Receive `count` of `nbytes`, from `low` on, from the parent host, and forward them."""
    # `forwarders` are the ranks that do so, by host.
    hosts = len(forwarders)
    turn = (span.host - home) % hosts
    parent, children = (_chain if chained(hosts, nbytes) else _tree)(turn, hosts)
    # A host with a single partner forwards nothing, and so moves the whole array at once.
    segment = min(SEGMENT, count) if len(children) + (turn > 0) > 1 else count
    place = user(0, low, segment)
    steps: list[Step] = []
    if turn:
        steps += do.flow([do.take(forwarders[(parent + home) % hosts], place, segment)])
    gives = [forwarders[(child + home) % hosts] for child in children]
    steps += do.flow(do.give(rank, place, segment) for rank in gives)
    steps = [replace(step, total=count) if step.nbytes else step for step in steps]
    return do.loop(steps, -(-count // segment))


def chained(hosts: int, nbytes: int) -> bool:
    """Return whether a broadcast with so many bytes goes down a chain."""
    return nbytes >= CHAINED * hosts


def _tree(turn: int, count: int) -> tuple[int, list[int]]:
    """Return the parent and the children in a binomial tree, as distances from the root's host."""
    limit = turn & -turn if turn else 1 << count.bit_length()
    hops = [1 << i for i in range(count.bit_length()) if 1 << i < limit]
    return turn & (turn - 1), [turn + hop for hop in hops if turn + hop < count]


def _chain(turn: int, count: int) -> tuple[int, list[int]]:
    """Return the host before this host in the chain, and the host behind, if any."""
    return turn - 1, [turn + 1] if turn + 1 < count else []
