"""all_gather, reduce_scatter and exchanges of a group that spans hosts.

What a rank has for another host goes to one rank there, straight from array to array; ranks of a
host pass on to each other what came for all of them; large arrays they read where they lie
(hosts_peer_arrays.py). Everyone's transfers go at once.
"""

from __future__ import annotations

from collections.abc import Sequence

from nc10d.backend.cpu.algorithms import exchange, gather, hosts_peer_arrays
from nc10d.backend.cpu.algorithms.exchange import Route
from nc10d.backend.cpu.algorithms.group_shape import GroupShape
from nc10d.backend.cpu.algorithms.hosts_barrier import Span, opening, span_of
from nc10d.backend.cpu.algorithms.hosts_fold import HostChunk, reduce_across, within
from nc10d.backend.cpu.algorithms.hosts_steps import continued, expect, flow, give, scratch, take
from nc10d.backend.cpu.algorithms.reduction import Reduction
from nc10d.backend.cpu.program.lines import line_down, line_up
from nc10d.backend.cpu.program.program import At, Step, user
from nc10d.backend.cpu.program.steps import copy


def all_gather(
    layout: GroupShape, sizes: Sequence[int], mine: At, outs: Sequence[At]
) -> list[Step]:
    """outs[r] := rank r's array of sizes[r] bytes; mine is my own."""
    span, me = span_of(layout), layout.rank
    home = span.hosts[span.host]
    # A rank's array goes to one mate of every other host, the mates taking turns.
    receivers = [span.hosts[g][span.mate % len(span.hosts[g])] for g in span.away]
    rows = [give(peer, mine, sizes[me]) for peer in receivers]
    for g in span.away:
        rows += [take(r, outs[r], sizes[r]) for r in span.hosts[g][span.mate :: span.near.size]]
    near = gather.all_gather(span.near, [sizes[r] for r in home], mine, [outs[r] for r in home])
    steps = [*opening(span), *continued(near), *flow(rows)]
    if span.near.size > 1:
        for g in span.away:
            steps += _pass_on(span, g, sizes, outs)
    if not hosts_peer_arrays.applies(layout, max(sizes)):
        return steps
    own = [copy(outs[me], mine, sizes[me])] if sizes[me] else []
    return hosts_peer_arrays.all_gather(layout, span, sizes, outs, own, flow(rows), steps)


def _pass_on(span: Span, host: int, sizes: Sequence[int], outs: Sequence[At]) -> list[Step]:
    steps: list[Step] = []
    for ranks in _passes(span, host):
        places = [outs[r] if r >= 0 else user(0) for r in ranks]
        amounts = [sizes[r] if r >= 0 else 0 for r in ranks]
        if any(amounts):
            mine = places[span.mate]
            steps += continued(gather.all_gather(span.near, amounts, mine, places))
    return steps


def _passes(span: Span, host: int) -> list[list[int]]:
    """Deal a host's ranks to my host's mates, one each a pass; -1 for none."""
    ranks, count = list(span.hosts[host]), span.near.size
    ranks += [-1] * (-len(ranks) % count)
    return [ranks[i : i + count] for i in range(0, len(ranks), count)]


def reduce_scatter(
    layout: GroupShape, sizes: Sequence[int], out: At, inps: Sequence[At], reduction: Reduction
) -> list[Step]:
    """out := fold over ranks of their inps[my rank]; sizes[r] bytes belong to rank r."""
    span, me = span_of(layout), layout.rank
    steps = opening(span)
    partial: dict[int, At] = {}
    folds: list[tuple[At, At, int]] = []
    base = 0
    for g in range(len(span.hosts)):
        for ranks in _passes(span, g):
            mine = ranks[span.mate]
            amounts = [sizes[r] if r >= 0 else 0 for r in ranks]
            if span.near.size == 1 and not reduction.scaled:
                partial[mine] = inps[mine]
                continue
            places = [inps[r] if r >= 0 else inps[0] for r in ranks]
            place = scratch(base)
            base += line_up(amounts[span.mate])
            near = gather.reduce_scatter(span.near, amounts, place, places, within(reduction))
            steps += continued(near)
            if mine >= 0:
                partial[mine] = place
                folds.append((place, inps[mine], sizes[mine]))
    home = span.hosts[span.host]
    outgoing = [HostChunk(r, at, sizes[r]) for r, at in partial.items() if r not in home]
    sources = {g: span.hosts[g][span.mate % len(span.hosts[g])] for g in span.away}
    crossing = reduce_across(span, outgoing, sources, partial[me], out, sizes[me], reduction, base)
    boards = [*steps, *crossing]
    if reduction.scaled or not hosts_peer_arrays.applies(layout, sum(sizes)):
        return boards
    how = within(reduction)
    return hosts_peer_arrays.reduce_scatter(
        layout, span, folds, inps, sum(sizes), how, crossing, boards
    )


def even_all_to_all(
    layout: GroupShape, nbytes: int, sends: Sequence[At], recvs: Sequence[At]
) -> list[Step]:
    """recvs[r] := rank r's sends[me], `nbytes` each."""
    span = span_of(layout)
    home = span.hosts[span.host]
    near = exchange.even_all_to_all(
        span.near, nbytes, [sends[r] for r in home], [recvs[r] for r in home]
    )
    away = [r for g in span.away for r in span.hosts[g]]
    rows = [give(r, sends[r], nbytes) for r in away]
    rows += [take(r, recvs[r], nbytes) for r in away]
    boards = [*opening(span), *continued(near), *flow(rows)]
    if not hosts_peer_arrays.applies(layout, nbytes):
        return boards
    return hosts_peer_arrays.all_to_all(layout, span, nbytes, sends, recvs, flow(rows), boards)


def announced(layout: GroupShape, route: Route, send_counts: int, recv_counts: int) -> list[Step]:
    """Exchange by `route`; two user arrays hold its sizes as int64, in the order of `nearest`."""
    span = span_of(layout)
    order = nearest(layout)
    near, away = order[: span.near.size], order[span.near.size :]
    local = exchange.announced(
        span.near, _near_route(route, near, layout), send_counts, recv_counts
    )
    first = 8 * len(near)
    sizes = [give(r, user(send_counts, first + 8 * i), 8) for i, r in enumerate(away)]
    sizes += [take(r, scratch(8 * i), 8) for i, r in enumerate(away)]
    checks = [
        expect(scratch(8 * i), user(recv_counts, first + 8 * i), r) for i, r in enumerate(away)
    ]
    rows = [give(r, route.sends[r], route.send_bytes[r]) for r in away]
    rows += [take(r, route.recvs[r], route.recv_bytes[r]) for r in away]
    return [*opening(span), *continued(local), *flow(sizes), *checks, *flow(rows)]


def _near_route(route: Route, ranks: Sequence[int], layout: GroupShape) -> Route:
    slot = line_down(layout.half // len(ranks)) if route.pitch else route.slot
    return Route(
        [route.sends[r] for r in ranks],
        [route.send_bytes[r] for r in ranks],
        [route.recvs[r] for r in ranks],
        [route.recv_bytes[r] for r in ranks],
        slot,
        slot if route.pitch else 0,
    )


def nearest(layout: GroupShape) -> list[int]:
    """Return the ranks of my host, then the others: the order of an exchange's sizes."""
    if layout.hosts is None:
        return list(range(layout.size))
    return [*layout.hosts.mates(layout.rank), *layout.hosts.away(layout.rank)]
