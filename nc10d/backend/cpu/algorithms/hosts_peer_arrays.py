"""What ranks of one host do for each other in a large collective across hosts, without boards.

As in direct.py, and with its two ways: they expose their arrays, and if all of a host can be read,
each takes from its mates what it needs where it lies. A host may go one way and another one the
other: between hosts the two do the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nc10d.backend.cpu.algorithms.group_shape import GroupShape
from nc10d.backend.cpu.algorithms.hosts_barrier import Span, meet_hosts
from nc10d.backend.cpu.algorithms.hosts_steps import continued
from nc10d.backend.cpu.algorithms.peer_arrays import access_for, all_have_read, fold_mates, ways
from nc10d.backend.cpu.algorithms.reduction import Reduction
from nc10d.backend.cpu.native.offsets import READS
from nc10d.backend.cpu.program.program import At, Step, user
from nc10d.backend.cpu.program.steps import (
    copy,
    end_round,
    enter,
    expose,
    fetch,
    signal,
    wait,
    wait_all,
)

THERE = 3
"""The tick that says that what mates want of me is there; those before it are the meeting's."""

Cut = tuple[int, int]
"""Where a part of an array begins, and its bytes."""


def applies(layout: GroupShape, nbytes: int) -> bool:
    """Say whether arrays of so many bytes may be read where they lie."""
    return layout.near.size > 1 and nbytes >= layout.direct


def all_reduce(
    layout: GroupShape,
    span: Span,
    nbytes: int,
    cuts: Sequence[Cut],
    reduction: Reduction,
    rail: Sequence[Step],
    boards: Sequence[Step],
) -> list[Step]:
    """Fold my part of user array 0 in place, reduce it between hosts by `rail`, fetch the others'.

    `cuts` are the parts of my host's ranks.
    """
    near = span.near
    low, length = cuts[near.rank]
    mine = user(0, low)
    steps = meet_hosts(span)
    if length:
        steps += [fold_mates(near, mine, mine, low, length, reduction), *rail]
    steps.append(signal(THERE))
    for mate in near.others:
        low, length = cuts[mate]
        steps += _fetched(mate, THERE, [(user(0, low), length)])
    access = access_for(nbytes, layout.asked)
    return _ways(_opening(near, [user(0)], access), [*steps, *all_have_read(THERE + 1)], boards)


def broadcast(
    layout: GroupShape,
    span: Span,
    nbytes: int,
    source: int,
    windows: Sequence[Cut],
    passed_on: Callable[[int, int], list[Step]],
    boards: Sequence[Step],
) -> list[Step]:
    """User array 0 := that of mate `source`, who gets it by `passed_on`, window by window.

    With no windows he has it, and only passes it on.
    """
    near = span.near
    done = THERE + len(windows)
    steps = meet_hosts(span)
    if near.rank != source:
        for tick, (low, length) in enumerate(windows, THERE):
            steps += _fetched(source, tick, [(user(0, low), length)])
        if not windows:
            steps.append(fetch(user(0), source, 0, nbytes))
        return _ways([enter()], [*steps, signal(done), end_round(done, done)], boards)
    for tick, (low, length) in enumerate(windows, THERE):
        steps += [*passed_on(low, length), signal(tick)]
    if not windows:
        steps += passed_on(0, nbytes)
    access = access_for(nbytes, layout.asked)
    return _ways(_opening(near, [user(0)], access), [*steps, *all_have_read(done)], boards)


def all_gather(
    layout: GroupShape,
    span: Span,
    sizes: Sequence[int],
    outs: Sequence[At],
    own: Sequence[Step],
    crossing: Sequence[Step],
    boards: Sequence[Step],
) -> list[Step]:
    """outs[r] := rank r's array: `own` puts mine there, `crossing` what comes to me from others.

    Who has them in several arrays can't expose them as one.
    """
    near, home = span.near, span.hosts[span.host]
    steps = [*meet_hosts(span), *own, signal(THERE), *crossing, signal(THERE + 1)]
    for mate in near.others:
        rank = home[mate]
        steps += _fetched(mate, THERE, [(outs[rank], sizes[rank])])
    for mate in near.others:
        ranks = [r for g in span.away for r in span.hosts[g][mate :: near.size]]
        steps += _fetched(mate, THERE + 1, [(outs[r], sizes[r]) for r in ranks])
    opening = _opening(near, outs, access_for(sum(sizes), layout.asked))
    return _ways(opening, [*steps, *all_have_read(THERE + 2)], boards)


def reduce_scatter(
    layout: GroupShape,
    span: Span,
    folds: Sequence[tuple[At, At, int]],
    inps: Sequence[At],
    nbytes: int,
    reduction: Reduction,
    crossing: Sequence[Step],
    boards: Sequence[Step],
) -> list[Step]:
    """Fold chunks of my host's ranks, `folds` (where to, mine, bytes), then reduce by `crossing`.

    `nbytes` are those of all chunks.
    """
    near = span.near
    steps = meet_hosts(span)
    for to, mine, size in folds:
        if size:
            steps.append(fold_mates(near, to, mine, mine.offset, size, reduction))
    steps += [signal(THERE), *crossing, wait_all(THERE), end_round(THERE, THERE)]
    access = READS if nbytes >= layout.folding else 0
    return _ways(_opening(near, inps, access), steps, boards)


def all_to_all(
    layout: GroupShape,
    span: Span,
    nbytes: int,
    sends: Sequence[At],
    recvs: Sequence[At],
    crossing: Sequence[Step],
    boards: Sequence[Step],
) -> list[Step]:
    """recvs[r] := rank r's sends[my rank], `nbytes` each; those of other hosts by `crossing`."""
    near, home, me = span.near, span.hosts[span.host], layout.rank
    steps = [*meet_hosts(span), copy(recvs[me], sends[me], nbytes)]
    for mate in near.others:
        steps.append(fetch(recvs[home[mate]], mate, sends[me].offset, nbytes))
    steps += crossing
    opening = _opening(near, sends, access_for(nbytes * layout.size, layout.asked))
    return _ways(opening, [*steps, *all_have_read(THERE)], boards)


def _ways(opening: Sequence[Step], direct: Sequence[Step], boards: Sequence[Step]) -> list[Step]:
    # Hosts compare how many calls their ranks have entered: nobody enters twice.
    return ways(opening, direct, continued(boards))


def _opening(near: GroupShape, places: Sequence[At], access: int) -> list[Step]:
    if len({at.index for at in places}) > 1:
        return [enter(flag=True)]
    return [enter(), expose(near.rank, user(places[0].index), access)]


def _fetched(mate: int, tick: int, parts: Sequence[tuple[At, int]]) -> list[Step]:
    """Fetch parts of a mate's array, to the same places in mine, once it has signalled `tick`."""
    fetches = [fetch(at, mate, at.offset, nbytes) for at, nbytes in parts if nbytes]
    return [wait(mate, tick), *fetches] if fetches else []
