"""Reductions, broadcast and barrier of a group that spans hosts.

Inside a host, local programs, or for large arrays those of hosts_peer_arrays.py; between hosts,
streams. Small
arrays ride along while the leaders meet. Of large ones each host folds its ranks' arrays, a chunk a
rank; every such rank is a rail: the ranks with the same number on their hosts reduce-scatter and
all-gather their chunk between them, everyone with everyone at once, or small pieces of many hosts
from hand to hand; then it spreads inside each host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from nc10d.backend.cpu.algorithms import broadcast as local
from nc10d.backend.cpu.algorithms import gather, hosts_peer_arrays
from nc10d.backend.cpu.algorithms.all_reduce import Part
from nc10d.backend.cpu.algorithms.group_shape import GroupShape
from nc10d.backend.cpu.algorithms.hosts_barrier import Gathered, Span, opening, span_of
from nc10d.backend.cpu.algorithms.hosts_fold import HostChunk, fold, reduce_across, within
from nc10d.backend.cpu.algorithms.hosts_peer_arrays import Cut
from nc10d.backend.cpu.algorithms.hosts_relay import pays, relayed
from nc10d.backend.cpu.algorithms.hosts_steps import continued, flow, give, loop, scratch, take
from nc10d.backend.cpu.algorithms.peer_arrays import windows_of
from nc10d.backend.cpu.algorithms.reduction import Reduction
from nc10d.backend.cpu.program.lines import line_up
from nc10d.backend.cpu.program.program import At, Step, board, moved, user
from nc10d.backend.cpu.program.steps import (
    copy,
    end_round,
    enter,
    free,
    meet_all,
    reduce_ranks,
    signal,
    wait,
)

SMALL_BYTES = 256 * 1024
"""What a leader gathers of all hosts together in one shot, at most,"""
LEAST = 2048
"""and of each host at least: of so many hosts, passing on is slower still, by the cost model."""
SEGMENT = 256 * 1024
MOST_WINDOWS = 16
"""So many windows of a broadcast at most are told to mates as they come."""
CHAINED = 128 * 1024
"""Bytes, times the number of hosts, from which a broadcast goes down a chain of hosts: by the cost
model, with the constants of `benchmarks/model/machine.py`."""


def one_shot_limit(layout: GroupShape) -> int:
    """Return the largest array, in bytes, that rides along while hosts meet."""
    assert layout.hosts is not None, layout
    return min(layout.small, layout.half, max(LEAST, SMALL_BYTES // len(layout.hosts.hosts)))


def barrier(layout: GroupShape) -> list[Step]:
    """Nobody leaves before everybody has come."""
    return opening(span_of(layout))


def all_reduce(layout: GroupShape, nbytes: int, reduction: Reduction, root: int = -1) -> list[Step]:
    """Fold user array 0 of all ranks, in place; with a root, only there."""
    if nbytes <= one_shot_limit(layout):
        return fused(layout, [Part(0, nbytes, reduction)], root)
    span = span_of(layout)
    place, base, copied = user(0), 0, []
    if root not in (-1, layout.rank):  # the array must stay as it is
        place, base = scratch(0), line_up(nbytes)
        copied = [copy(place, user(0), nbytes)]
    cuts = _cuts(span, nbytes)
    low, length = cuts[span.mate]
    rail = _rail(span, moved(place, low), length, reduction, base) if length else []
    boards = [*opening(span), *copied, *_over_boards(span, place, cuts, reduction, rail)]
    if root >= 0 or reduction.scaled or not hosts_peer_arrays.applies(layout, nbytes):
        return boards
    return hosts_peer_arrays.all_reduce(layout, span, nbytes, cuts, within(reduction), rail, boards)


def fused(layout: GroupShape, parts: Sequence[Part], root: int = -1) -> list[Step]:
    """Reduce several small arrays with one handshake."""
    span = span_of(layout)
    parts = [part for part in parts if part.nbytes]
    if not parts:
        return opening(span)
    offsets = [sum(line_up(p.nbytes) for p in parts[:i]) for i in range(len(parts))]
    gathered = Gathered(span, offsets[-1] + line_up(parts[-1].nbytes))
    wanted = root in (-1, layout.rank)
    if span.near.size == 1:
        return _fused_alone(gathered, parts, offsets, wanted)
    if span.mate == 0:
        return _fused_leader(gathered, parts, offsets, wanted)
    puts, gets = [], []
    for part, offset in zip(parts, offsets, strict=True):
        at = user(part.index)
        puts.append(part.reduction.show(board(span.mate, offset), at, part.nbytes))
        if wanted:
            gets.append(copy(at, board(0, offset), part.nbytes))
    steps = [free(), enter(), *puts, signal(1), meet_all(), wait(0, 2), *gets, signal(2)]
    return [*steps, end_round(2, 2)]


def _fused_alone(
    gathered: Gathered, parts: Sequence[Part], offsets: Sequence[int], wanted: bool
) -> list[Step]:
    steps = [free(), enter()]
    for part, offset in zip(parts, offsets, strict=True):
        mine = scratch(gathered.mine + offset)
        steps.append(part.reduction.show(mine, user(part.index), part.nbytes))
    steps += gathered.steps()
    for part, offset in zip(parts, offsets, strict=True) if wanted else ():
        steps += _fold_blocks(gathered, part, offset, user(part.index))
    return [*steps, end_round(1, 2)]


def _fused_leader(
    gathered: Gathered, parts: Sequence[Part], offsets: Sequence[int], wanted: bool
) -> list[Step]:
    puts: list[Step] = []
    folds: list[Step] = []
    results: list[Step] = []
    for part, offset in zip(parts, offsets, strict=True):
        mine, how = board(0, offset), within(part.reduction).how
        puts.append(part.reduction.show(mine, user(part.index), part.nbytes))
        block = scratch(gathered.mine + offset)
        folds.append(reduce_ranks(block, board(0, offset), mine, part.nbytes, how))
        # Only this rank reads what it has shown: the result may take its place.
        results += _fold_blocks(gathered, part, offset, mine)
        if wanted:
            results.append(copy(user(part.index), mine, part.nbytes))
    steps = [free(), enter(), *puts, signal(1), meet_all(), *folds, *gathered.steps(), *results]
    return [*steps, signal(2), end_round(2, 2)]


def _fold_blocks(gathered: Gathered, part: Part, offset: int, dst: At) -> list[Step]:
    hosts = range(len(gathered.span.hosts))
    blocks = [gathered.block(host, offset) for host in hosts]
    return fold(dst, blocks, part.nbytes, part.reduction, 0, dst)


def _cuts(span: Span, nbytes: int) -> list[Cut]:
    """Return where the part of each rank of my host begins, and its bytes."""
    rails = min(map(len, span.hosts))
    chunk = line_up(-(-nbytes // rails))
    lows = [min(nbytes, mate * chunk) for mate in range(span.near.size)]
    return [(low, min(chunk, nbytes - low)) for low in lows]


def _over_boards(
    span: Span,
    place: At,
    cuts: Sequence[Cut],
    reduction: Reduction,
    rail: Sequence[Step],
) -> list[Step]:
    """Fold my part of `place`, reduce it between hosts by `rail`, get the others'."""
    sizes = [length for _, length in cuts]
    places = [moved(place, low) for low, _ in cuts]
    mine = places[span.mate]
    if span.near.size == 1:
        shown = [reduction.show(mine, mine, sizes[0])] if reduction.scaled else []
        return [*shown, *rail]
    steps = continued(gather.reduce_scatter(span.near, sizes, mine, places, within(reduction)))
    return [*steps, *rail, *continued(gather.all_gather(span.near, sizes, mine, places))]


def _rail(span: Span, place: At, nbytes: int, reduction: Reduction, base: int) -> list[Step]:
    """Reduce `nbytes` at `place` between the ranks that have my number on their hosts."""
    count = len(span.hosts)
    piece = line_up(-(-nbytes // count))
    if pays(count, piece):
        return relayed(span, place, nbytes, piece, reduction, base)
    cuts = [(min(nbytes, g * piece), min(nbytes, (g + 1) * piece)) for g in range(count)]
    at = [moved(place, low) for low, _ in cuts]
    length = [high - low for low, high in cuts]
    peer = {g: span.hosts[g][span.mate] for g in span.away}
    outgoing = [HostChunk(peer[g], at[g], length[g]) for g in span.away]
    mine = at[span.host]
    steps = reduce_across(span, outgoing, peer, mine, mine, length[span.host], reduction, base)
    rows = [give(peer[g], mine, length[span.host]) for g in span.away]
    return [*steps, *flow([*rows, *(take(peer[g], at[g], length[g]) for g in span.away)])]


def broadcast(layout: GroupShape, nbytes: int, root: int) -> list[Step]:
    """User array 0 := the root's; down a tree or a chain of hosts, then inside each.

    Down a chain nobody sends more than once, but the last one hears late.
    """
    span = span_of(layout)
    if nbytes == 0:
        return opening(span)
    assert layout.hosts is not None
    home, root_mate = layout.hosts.places[root]
    speakers = [root if g == home else span.leader(g) for g in range(len(span.hosts))]
    source = root_mate if span.host == home else 0

    def passed_on(low: int, count: int) -> list[Step]:
        return _passed_on(span, speakers, home, nbytes, low, count)

    steps = opening(span)
    if span.mate == source:
        steps += passed_on(0, nbytes)
    if span.near.size == 1:
        return steps
    steps += continued(local.broadcast(span.near, nbytes, source))
    if not hosts_peer_arrays.applies(layout, nbytes):
        return steps
    windows = [] if span.host == home else windows_of(nbytes, layout.window, MOST_WINDOWS)
    return hosts_peer_arrays.broadcast(layout, span, nbytes, source, windows, passed_on, steps)


def _passed_on(
    span: Span, speakers: Sequence[int], home: int, nbytes: int, low: int, count: int
) -> list[Step]:
    """Take `count` of `nbytes`, from `low` on, from a host's speaker, and give them to others."""
    hosts = len(speakers)
    turn = (span.host - home) % hosts
    parent, children = (_chain if chained(hosts, nbytes) else _tree)(turn, hosts)
    # Who has one partner has nothing to pass on: all goes at once.
    segment = min(SEGMENT, count) if len(children) + (turn > 0) > 1 else count
    place = user(0, low, segment)
    steps: list[Step] = []
    if turn:
        steps += flow([take(speakers[(parent + home) % hosts], place, segment)])
    steps += flow([give(speakers[(child + home) % hosts], place, segment) for child in children])
    steps = [replace(step, total=count) if step.nbytes else step for step in steps]
    return loop(steps, -(-count // segment))


def chained(hosts: int, nbytes: int) -> bool:
    """Say whether a broadcast of so many bytes goes down a chain."""
    return nbytes >= CHAINED * hosts


def _tree(turn: int, count: int) -> tuple[int, list[int]]:
    """Return the parent and the children, by their turns, in a binomial tree."""
    limit = turn & -turn if turn else 1 << count.bit_length()
    hops = [1 << i for i in range(count.bit_length()) if 1 << i < limit]
    return turn & (turn - 1), [turn + hop for hop in hops if turn + hop < count]


def _chain(turn: int, count: int) -> tuple[int, list[int]]:
    """Return who is before me and who behind, if anyone."""
    return turn - 1, [turn + 1] if turn + 1 < count else []
