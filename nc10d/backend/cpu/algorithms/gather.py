"""all_gather and reduce_scatter, even or ragged: everyone knows every size.

all_gather: each round a rank shows half a board of its array and copies everyone else's.
reduce_scatter: a half is cut into one slot a rank; each round a rank shows a piece of every
rank's chunk and folds the pieces of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from nc10d.backend.cpu.algorithms import peer_arrays
from nc10d.backend.cpu.algorithms.group_shape import GroupShape
from nc10d.backend.cpu.algorithms.reduction import Reduction
from nc10d.backend.cpu.program.lines import line_down
from nc10d.backend.cpu.program.program import At, Step, board, moved
from nc10d.backend.cpu.program.steps import (
    copy,
    end_round,
    enter,
    free,
    meet,
    meet_all,
    reduce_ranks,
    signal,
    wait,
    wait_all,
)


def all_gather(
    layout: GroupShape, sizes: Sequence[int], mine: At, outs: Sequence[At]
) -> list[Step]:
    """outs[r] := rank r's array of sizes[r] bytes; mine is my own."""
    me = layout.rank
    own = [copy(outs[me], mine, sizes[me])] if sizes[me] else []
    if layout.size == 1:
        return [free(), enter(), *own, end_round(1, 2)]
    rounds = max(1, -(-max(sizes) // layout.half))
    opening = _gather_round(layout, sizes, mine, outs, own, 0, opening=True)
    steps = [*opening, end_round(1, 2)]
    if rounds > 1:
        body = _gather_round(layout, sizes, mine, outs, [], layout.half, opening=False)
        steps += [*body, end_round(1, 2, rounds - 1, len(body))]
    if max(sizes) < layout.direct:
        return steps
    return peer_arrays.all_gather(layout, sizes, mine, outs, steps)


def _gather_round(
    layout: GroupShape,
    sizes: Sequence[int],
    mine: At,
    outs: Sequence[At],
    own: list[Step],
    base: int,
    *,
    opening: bool,
) -> list[Step]:
    me, half = layout.rank, layout.half
    # Every round waits for everyone: that frees the half of the round before.
    steps: list[Step] = [free(), enter()] if opening else []
    if sizes[me] > base:
        steps.append(copy(board(me), moved(mine, base, half), half, sizes[me] - base))
    steps += [signal(1), *own]
    for peer in layout.others:
        steps.append(meet(peer) if opening else wait(peer, 1))
        if sizes[peer] > base:
            place = moved(outs[peer], base, half)
            steps.append(copy(place, board(peer), half, sizes[peer] - base))
    return steps


def reduce_scatter(
    layout: GroupShape, sizes: Sequence[int], out: At, inps: Sequence[At], reduction: Reduction
) -> list[Step]:
    """out := fold over ranks of their inps[my rank]; sizes[r] bytes belong to rank r."""
    if layout.size == 1:
        place = [reduction.show(out, inps[0], sizes[0])] if sizes[0] else []
        return [free(), enter(), *place, end_round(1, 2)]
    slot = line_down(layout.half // layout.size)
    rounds = max(1, -(-max(sizes) // slot))
    opening = _scatter_round(layout, sizes, out, inps, reduction, slot, 0, opening=True)
    steps = [*opening, end_round(1, 2)]
    if rounds > 1:
        body = _scatter_round(layout, sizes, out, inps, reduction, slot, slot, opening=False)
        steps += [*body, end_round(1, 2, rounds - 1, len(body))]
    if sum(sizes) < layout.direct or len(set(sizes)) > 1 or reduction.scaled:
        return steps
    return peer_arrays.reduce_scatter(layout, sizes[0], out, inps, reduction, steps)


def _scatter_round(
    layout: GroupShape,
    sizes: Sequence[int],
    out: At,
    inps: Sequence[At],
    reduction: Reduction,
    slot: int,
    base: int,
    *,
    opening: bool,
) -> list[Step]:
    me = layout.rank
    # The fold may overwrite my own chunk (out may be that very chunk) before my turn in rank
    # order comes, so with more than two ranks my contribution is read from my board too.
    alone = layout.size == 2 and not reduction.scaled
    # Every round waits for everyone: that frees the half of the round before.
    steps: list[Step] = [free(), enter()] if opening else []
    for peer in layout.others if alone else [*layout.others, me]:
        if sizes[peer] > base:
            place = moved(inps[peer], base, slot)
            steps.append(reduction.show(board(me, peer * slot), place, slot, sizes[peer] - base))
    steps += [signal(1), meet_all() if opening else wait_all(1)]
    if sizes[me] > base:
        own = moved(inps[me], base, slot) if alone else board(me, me * slot)
        steps.append(
            reduce_ranks(
                moved(out, base, slot),
                board(0, me * slot),
                own,
                slot,
                reduction.how,
                total=sizes[me] - base,
            )
        )
    return steps
