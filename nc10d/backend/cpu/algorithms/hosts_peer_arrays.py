"""Large collectives across hosts: a host's ranks access their peers' arrays in place.

The alternatives are those of peer_arrays.py: ranks expose their arrays as they enter. If all of a
host's arrays can be read, its ranks reduce and fetch them in place; otherwise they take the staging
buffers. Each host chooses by itself, because the transfers between hosts are the same either way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nc10d.backend.cpu.algorithms.group_shape import GroupShape, Span
from nc10d.backend.cpu.algorithms.hosts_barrier import meet_hosts
from nc10d.backend.cpu.algorithms.peer_arrays import access_for, all_have_read, fold_peers, ways
from nc10d.backend.cpu.algorithms.reduction import Reduction, continued
from nc10d.backend.cpu.program import steps as do
from nc10d.backend.cpu.program.program import At, Step, Steps, user

SHARE_DONE = 3
"""The tick that reports that this rank's share is complete. The barrier uses the ticks before."""

Cut = tuple[int, int]
"""The offset of a part in an array, and the part's bytes."""


def applies(span: Span, nbytes: int) -> bool:
    """Return whether ranks may access arrays with so many bytes in place."""
    return span.local.size > 1 and nbytes >= span.shape.direct


def all_reduce(
    span: Span, nbytes: int, cuts: Sequence[Cut], reduction: Reduction, rail: Steps, staged: Steps
) -> list[Step]:
    """Reduce this rank's part of user array 0, then between hosts by `rail`; fetch the rest."""
    # `cuts` are the parts for this host's ranks.
    local = span.local
    low, length = cuts[local.rank]
    mine = user(0, low)
    steps = meet_hosts(span)
    if length:
        steps += [fold_peers(local, mine, mine, low, length, reduction), *rail]
    steps.append(do.signal(SHARE_DONE))
    for peer in local.peers:
        low, length = cuts[peer]
        steps += _fetched(peer, SHARE_DONE, [(user(0, low), length)])
    access = access_for(span.shape, nbytes)
    steps += all_have_read(SHARE_DONE + 1)
    return _ways(_opening(local, [user(0)], access), steps, staged)


def broadcast(
    span: Span,
    nbytes: int,
    source: int,
    windows: Sequence[Cut],
    passed_on: Callable[[int, int], list[Step]],
    staged: Steps,
) -> list[Step]:
    """User array 0 := that of local rank `source`."""
    # `source` receives the array by `passed_on`, window by window, and signals each. Without
    # windows `source` is the root and only forwards the array.
    local = span.local
    done = SHARE_DONE + len(windows)
    steps = meet_hosts(span)
    if local.rank != source:
        for tick, (low, length) in enumerate(windows, SHARE_DONE):
            steps += _fetched(source, tick, [(user(0, low), length)])
        if not windows:
            steps.append(do.fetch(user(0), source, 0, nbytes))
        return _ways([do.enter()], [*steps, do.signal(done), do.end_round(done, done)], staged)
    for tick, (low, length) in enumerate(windows, SHARE_DONE):
        steps += [*passed_on(low, length), do.signal(tick)]
    if not windows:
        steps += passed_on(0, nbytes)
    access = access_for(span.shape, nbytes)
    return _ways(_opening(local, [user(0)], access), [*steps, *all_have_read(done)], staged)


def all_gather(
    span: Span, sizes: Sequence[int], outs: Sequence[At], own: Steps, crossing: Steps, staged: Steps
) -> list[Step]:
    """outs[r] := rank r's array; `own` copies this rank's, `crossing` receives from other hosts."""
    # A rank whose `outs` lie in several arrays cannot expose them as a single array, and sets the
    # flag.
    local, home = span.local, span.hosts[span.host]
    steps = [*meet_hosts(span), *own, do.signal(SHARE_DONE), *crossing, do.signal(SHARE_DONE + 1)]
    for peer in local.peers:
        rank = home[peer]
        steps += _fetched(peer, SHARE_DONE, [(outs[rank], sizes[rank])])
    for peer in local.peers:
        ranks = [r for g in span.away for r in span.hosts[g][peer :: local.size]]
        steps += _fetched(peer, SHARE_DONE + 1, [(outs[r], sizes[r]) for r in ranks])
    opening = _opening(local, outs, access_for(span.shape, sum(sizes)))
    return _ways(opening, [*steps, *all_have_read(SHARE_DONE + 2)], staged)


def reduce_scatter(
    span: Span,
    folds: Sequence[tuple[At, At, int]],
    inps: Sequence[At],
    nbytes: int,
    reduction: Reduction,
    crossing: Steps,
    staged: Steps,
) -> list[Step]:
    """Reduce chunks within the host, then between hosts by `crossing`."""
    # `folds` lists the destination, this rank's part and each chunk's bytes. `nbytes` is the sum
    # over all chunks.
    local = span.local
    steps = meet_hosts(span)
    for to, mine, size in folds:
        if size:
            steps.append(fold_peers(local, to, mine, mine.offset, size, reduction))
    steps += [
        do.signal(SHARE_DONE),
        *crossing,
        do.wait_all(SHARE_DONE),
        do.end_round(SHARE_DONE, SHARE_DONE),
    ]
    access = access_for(span.shape, nbytes)
    return _ways(_opening(local, inps, access), steps, staged)


def all_to_all(
    span: Span,
    nbytes: int,
    sends: Sequence[At],
    recvs: Sequence[At],
    crossing: Steps,
    staged: Steps,
) -> list[Step]:
    """recvs[r] := rank r's sends[this rank], `nbytes` each; from other hosts by `crossing`."""
    local, home, me = span.local, span.hosts[span.host], span.shape.rank
    steps = [*meet_hosts(span), do.copy(recvs[me], sends[me], nbytes)]
    for peer in local.peers:
        steps.append(do.fetch(recvs[home[peer]], peer, sends[me].offset, nbytes))
    steps += crossing
    opening = _opening(local, sends, access_for(span.shape, nbytes * span.shape.size))
    return _ways(opening, [*steps, *all_have_read(SHARE_DONE)], staged)


def _ways(opening: Steps, direct: Steps, staged: Steps) -> list[Step]:
    # Hosts compare how many calls their ranks have entered, so a call enters only once.
    return ways(opening, direct, continued(staged))


def _opening(local: GroupShape, places: Sequence[At], access: int) -> list[Step]:
    if len({at.index for at in places}) > 1:
        return [do.enter(flag=True)]
    return [do.enter(), do.expose(local.rank, user(places[0].index), access)]


def _fetched(peer: int, tick: int, parts: Sequence[tuple[At, int]]) -> list[Step]:
    """Fetch parts of a peer's array to the same places here, once it has signalled `tick`."""
    fetches = [do.fetch(at, peer, at.offset, nbytes) for at, nbytes in parts if nbytes]
    return [do.wait(peer, tick), *fetches] if fetches else []
