"""all_gather and reduce_scatter on one host, over staging buffers.

all_gather: in each round a rank copies the next piece of its array to its staging buffer and
signals tick 1. Then it waits for each peer in turn, beginning with the next rank, and copies.

reduce_scatter: in each round a rank copies a piece of every chunk to its staging buffer and
signals tick 1. When all ranks have done so, it reduces the pieces of its own chunk in rank order.

Every round waits for all ranks, so the half of the round before is free again.
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


def all_gather(shape: GroupShape, sizes: Sequence[int], mine: At, outs: Sequence[At]) -> list[Step]:
    """Return the steps of outs[r] := rank r's array `mine` of sizes[r] bytes."""
    me = shape.rank
    own = [copy(outs[me], mine, sizes[me])] if sizes[me] else []
    if shape.size == 1:
        return [free(), enter(), *own, end_round(1, 2)]
    rounds = max(1, -(-max(sizes) // shape.staging))
    opening = _gather_round(shape, sizes, mine, outs, own, 0, opening=True)
    steps = [*opening, end_round(1, 2)]
    if rounds > 1:
        body = _gather_round(shape, sizes, mine, outs, [], shape.staging, opening=False)
        steps += [*body, end_round(1, 2, rounds - 1, len(body))]
    if max(sizes) < shape.direct:
        return steps
    return peer_arrays.all_gather(shape, sizes, mine, outs, steps)


def _gather_round(
    shape: GroupShape,
    sizes: Sequence[int],
    mine: At,
    outs: Sequence[At],
    own: list[Step],
    base: int,
    *,
    opening: bool,
) -> list[Step]:
    me, staging = shape.rank, shape.staging
    # Every round waits for all ranks, which frees the half of the round before.
    steps: list[Step] = [free(), enter()] if opening else []
    if sizes[me] > base:
        steps.append(copy(board(me), moved(mine, base, staging), staging, sizes[me] - base))
    steps += [signal(1), *own]
    for peer in shape.peers:
        steps.append(meet(peer) if opening else wait(peer, 1))
        if sizes[peer] > base:
            place = moved(outs[peer], base, staging)
            steps.append(copy(place, board(peer), staging, sizes[peer] - base))
    return steps


def reduce_scatter(
    shape: GroupShape, sizes: Sequence[int], out: At, inps: Sequence[At], reduction: Reduction
) -> list[Step]:
    """Return the steps of out := reduction of all ranks' inps[this rank].

    Rank r gets sizes[r] bytes.
    """
    if shape.size == 1:
        place = [reduction.show(out, inps[0], sizes[0])] if sizes[0] else []
        return [free(), enter(), *place, end_round(1, 2)]
    slot = line_down(shape.staging // shape.size)
    rounds = max(1, -(-max(sizes) // slot))
    opening = _scatter_round(shape, sizes, out, inps, reduction, slot, 0, opening=True)
    steps = [*opening, end_round(1, 2)]
    if rounds > 1:
        body = _scatter_round(shape, sizes, out, inps, reduction, slot, slot, opening=False)
        steps += [*body, end_round(1, 2, rounds - 1, len(body))]
    if sum(sizes) < shape.direct or len(set(sizes)) > 1 or reduction.scaled:
        return steps
    return peer_arrays.reduce_scatter(shape, sizes[0], out, inps, reduction, steps)


def _scatter_round(
    shape: GroupShape,
    sizes: Sequence[int],
    out: At,
    inps: Sequence[At],
    reduction: Reduction,
    slot: int,
    base: int,
    *,
    opening: bool,
) -> list[Step]:
    me = shape.rank
    # `out` may be this rank's own chunk, which the reduction overwrites before its turn in rank
    # order. So with more than two ranks that contribution goes through the staging buffer, too.
    alone = shape.size == 2 and not reduction.scaled
    # Every round waits for all ranks, which frees the half of the round before.
    steps: list[Step] = [free(), enter()] if opening else []
    for peer in shape.peers if alone else [*shape.peers, me]:
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
