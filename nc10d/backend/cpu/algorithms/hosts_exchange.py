"""all_gather, reduce_scatter and exchanges in a group that spans hosts.

Every call begins with a barrier of all ranks. Then a rank sends its array for another host to a
single rank there, straight from array to array. All of a rank's transfers proceed at the same time,
so no rank order can deadlock. A host's ranks pass the received arrays on to each other by the
algorithms for a single host, or access large arrays in place (hosts_peer_arrays.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from nc10d.backend.cpu.algorithms import exchange, gather, hosts_peer_arrays
from nc10d.backend.cpu.algorithms.exchange import Route
from nc10d.backend.cpu.algorithms.group_shape import GroupShape, Span, span_of
from nc10d.backend.cpu.algorithms.hosts_barrier import opening
from nc10d.backend.cpu.algorithms.reduction import (
    Reduction,
    continued,
    fold,
    reduce_across,
    segment_of,
    strided,
    within,
)
from nc10d.backend.cpu.program import steps as do
from nc10d.backend.cpu.program.program import At, Step, line_up, scratch, user


def all_gather(shape: GroupShape, sizes: Sequence[int], mine: At, outs: Sequence[At]) -> list[Step]:
    """Return the steps for outs[r] := rank r's array `mine` of sizes[r] bytes."""
    span, me = span_of(shape), shape.rank
    rows = _crossing(span, sizes, mine, outs)
    steps = [*opening(span), *gathered(span, sizes, mine, outs)]
    if not hosts_peer_arrays.applies(span, max(sizes)):
        return steps
    own = [do.copy(outs[me], mine, sizes[me])] if sizes[me] else []
    return hosts_peer_arrays.all_gather(span, sizes, outs, own, do.flow(rows), steps)


def _crossing(span: Span, sizes: Sequence[int], mine: At, outs: Sequence[At]) -> list[Step]:
    """Return an all_gather's transfers between hosts."""
    # A rank's array goes to a single rank on every other host; the ranks there take turns.
    receivers = [span.hosts[g][span.local_rank % len(span.hosts[g])] for g in span.away]
    rows = [do.give(peer, mine, sizes[span.shape.rank]) for peer in receivers]
    for g in span.away:
        theirs = span.hosts[g][span.local_rank :: span.local.size]
        rows += [do.take(r, outs[r], sizes[r]) for r in theirs]
    return rows


def gathered(span: Span, sizes: Sequence[int], mine: At, outs: Sequence[At]) -> list[Step]:
    """Return the steps of an all_gather over staging buffers, behind the opening."""
    home = span.hosts[span.host]
    rows = _crossing(span, sizes, mine, outs)
    local = gather.all_gather(span.local, [sizes[r] for r in home], mine, [outs[r] for r in home])
    steps = [*continued(local), *do.flow(rows)]
    if span.local.size > 1:
        for g in span.away:
            steps += _pass_on(span, g, sizes, outs)
    return steps


def _pass_on(span: Span, host: int, sizes: Sequence[int], outs: Sequence[At]) -> list[Step]:
    steps: list[Step] = []
    for ranks in _passes(span, host):
        places = [outs[r] if r >= 0 else user(0) for r in ranks]
        amounts = [sizes[r] if r >= 0 else 0 for r in ranks]
        if any(amounts):
            mine = places[span.local_rank]
            steps += continued(gather.all_gather(span.local, amounts, mine, places))
    return steps


def _passes(span: Span, host: int) -> list[list[int]]:
    """Deal a host's ranks to this host's ranks, in passes of one each; -1 stands for none."""
    ranks, count = list(span.hosts[host]), span.local.size
    ranks += [-1] * (-len(ranks) % count)
    return [ranks[i : i + count] for i in range(0, len(ranks), count)]


def reduce_scatter(
    shape: GroupShape, sizes: Sequence[int], out: At, inps: Sequence[At], reduction: Reduction
) -> list[Step]:
    """Return the steps for out := reduction of all inps[this rank]; rank r gets sizes[r] bytes."""
    span, me = span_of(shape), shape.rank
    steps = opening(span)
    if reduction.in_rank_order:
        return [*steps, *ordered_reduce_scatter(span, sizes, out, inps, reduction, 0)]
    partial: dict[int, At] = {}
    folds: list[tuple[At, At, int]] = []
    base = 0
    for g in range(len(span.hosts)):
        for ranks in _passes(span, g):
            mine = ranks[span.local_rank]
            amounts = [sizes[r] if r >= 0 else 0 for r in ranks]
            if span.local.size == 1 and not reduction.scaled:
                partial[mine] = inps[mine]
                continue
            places = [inps[r] if r >= 0 else inps[0] for r in ranks]
            place = scratch(base)
            base += line_up(amounts[span.local_rank])
            local = gather.reduce_scatter(span.local, amounts, place, places, within(reduction))
            steps += continued(local)
            if mine >= 0:
                partial[mine] = place
                folds.append((place, inps[mine], sizes[mine]))
    home = span.hosts[span.host]
    outgoing = [do.give(r, at, sizes[r]) for r, at in partial.items() if r not in home]
    sources = {g: span.hosts[g][span.local_rank % len(span.hosts[g])] for g in span.away}
    crossing = reduce_across(span, outgoing, sources, partial[me], out, sizes[me], reduction, base)
    staged = [*steps, *crossing]
    if reduction.scaled or not hosts_peer_arrays.applies(span, sum(sizes)):
        return staged
    how = within(reduction)
    return hosts_peer_arrays.reduce_scatter(span, folds, inps, sum(sizes), how, crossing, staged)


def ordered_reduce_scatter(
    span: Span, sizes: Sequence[int], out: At, inps: Sequence[At], reduction: Reduction, base: int
) -> list[Step]:
    """Return a reduce_scatter's steps, behind the opening, that fold in rank order.

    Every rank receives the contributions of all ranks to its chunk, and folds them itself. Scratch
    memory from `base` on is overwritten.
    """
    me, ranks, mine = span.shape.rank, range(span.shape.size), sizes[span.shape.rank]
    segment, room = segment_of(reduction, mine, span.shape.size), scratch(base)
    rows = [scratch(base + segment + r * line_up(mine)) for r in ranks]
    base += segment + span.shape.size * line_up(mine)
    steps: list[Step] = []
    if reduction.scaled:
        sends = [scratch(base + sum(map(line_up, sizes[:r]))) for r in ranks]
        whole = zip(sends, inps, sizes, strict=True)
        steps += [reduction.publish(to, x, nbytes) for to, x, nbytes in whole if nbytes]
        inps = sends
    home, away = span.hosts[span.host], [r for g in span.away for r in span.hosts[g]]
    # This rank's own contribution stays where it is.
    given = [0 if r == me else sizes[r] for r in ranks]
    route = Route(inps, given, rows, [mine] * len(ranks))
    if span.local.size > 1:
        most = max(sizes[r] for r in home)
        within_host = _local_route(route, home)
        steps += continued(exchange.known_all_to_all(span.local, within_host, most))
    crossing = [do.give(r, inps[r], sizes[r]) for r in away]
    steps += do.flow([*crossing, *(do.take(r, rows[r], mine) for r in away)])
    if not mine:
        return steps
    rows[me] = inps[me]
    parts = [strided(row, segment) for row in rows]
    body = fold(strided(out, segment), parts, segment, reduction, mine, room)
    return [*steps, *do.loop(body, -(-mine // segment))]


def even_all_to_all(
    shape: GroupShape, nbytes: int, sends: Sequence[At], recvs: Sequence[At]
) -> list[Step]:
    """Return the steps for recvs[r] := rank r's sends[this rank], `nbytes` each."""
    span = span_of(shape)
    home = span.hosts[span.host]
    own, theirs = [sends[r] for r in home], [recvs[r] for r in home]
    local = exchange.even_all_to_all(span.local, nbytes, own, theirs)
    away = [r for g in span.away for r in span.hosts[g]]
    rows = [do.give(r, sends[r], nbytes) for r in away]
    rows += [do.take(r, recvs[r], nbytes) for r in away]
    staged = [*opening(span), *continued(local), *do.flow(rows)]
    if not hosts_peer_arrays.applies(span, nbytes):
        return staged
    return hosts_peer_arrays.all_to_all(span, nbytes, sends, recvs, do.flow(rows), staged)


def announced(shape: GroupShape, route: Route) -> list[Step]:
    """Return the steps for an exchange along `route`.

    User array 0 holds the sizes, in `local_first` order. A rank sends its sizes to other hosts when
    those on its own host agree, and a host's ranks then wait for each other. So no rank writes if a
    pair of ranks on its host, or any pair with its host, disagrees.
    """
    span = span_of(shape)
    order = local_first(shape)
    home, away = order[: span.local.size], order[span.local.size :]
    within_host = _local_route(route, home)
    each = do.SIZES_BYTES
    mine = [user(0, each * i) for i in range(len(home), len(order))]
    theirs = [scratch(each * i) for i in range(len(away))]
    sizes = [do.give(r, at, each) for r, at in zip(away, mine, strict=True)]
    sizes += [do.take(r, at, each) for r, at in zip(away, theirs, strict=True)]
    checks = [do.check_sizes(*row) for row in zip(theirs, mine, away, strict=True)]
    local = exchange.announced(span.local, within_host, [*do.flow(sizes), *checks])
    rows = [do.give(r, route.sends[r], route.send_bytes[r]) for r in away]
    rows += [do.take(r, route.recvs[r], route.recv_bytes[r]) for r in away]
    return [*opening(span), *continued(local), *do.flow(rows)]


def _local_route(route: Route, ranks: Sequence[int]) -> Route:
    return Route(
        [route.sends[r] for r in ranks],
        [route.send_bytes[r] for r in ranks],
        [route.recvs[r] for r in ranks],
        [route.recv_bytes[r] for r in ranks],
        route.to_one,
    )


def local_first(shape: GroupShape) -> list[int]:
    """Return this host's ranks, then the others: the order of an exchange's sizes."""
    if shape.hosts is None:
        return list(range(shape.size))
    return [*shape.hosts.local_ranks(shape.rank), *shape.hosts.remote_ranks(shape.rank)]
