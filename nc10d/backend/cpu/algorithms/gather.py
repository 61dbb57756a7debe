"""all_gather and reduce_scatter on one host, over staging buffers.

all_gather: in each round a rank copies its array's next piece to its staging buffer and signals
tick 1. Then the rank copies from each peer, beginning with the next rank: in the first round when
all ranks have come and their calls are equal, later in turn, as each peer signals.

reduce_scatter: in each round a rank copies a piece of every chunk to its staging buffer and
signals tick 1. When all ranks have done so, the rank reduces its own chunk's pieces in rank order.

Every round waits for all ranks, so the slot from the round before is free again.

Not done: ranks that leave a gather or scatter before all have entered, as MPI's ranks do. They
would not learn in that call that the calls differ. The present way costs a switch between processes
per call where ranks share cores.
"""

from __future__ import annotations

from collections.abc import Sequence

from nc10d.backend.cpu.algorithms import peer_arrays
from nc10d.backend.cpu.algorithms.group_shape import GroupShape
from nc10d.backend.cpu.algorithms.reduction import Reduction
from nc10d.backend.cpu.program import steps as do
from nc10d.backend.cpu.program.program import At, Step, moved, staging


def all_gather(shape: GroupShape, sizes: Sequence[int], mine: At, outs: Sequence[At]) -> list[Step]:
    """Return the steps for outs[r] := rank r's array `mine` of sizes[r] bytes."""
    me = shape.rank
    if shape.size == 1:
        return do.alone([do.copy(outs[me], mine, sizes[me])] if sizes[me] else [])
    rounds = max(1, -(-max(sizes) // shape.slot_bytes))
    steps = [*_gather_round(shape, sizes, mine, outs, 0), do.end_round(1, 2)]
    if rounds > 1:
        body = _gather_round(shape, sizes, mine, outs, shape.slot_bytes)
        steps += [*body, do.end_round(1, 2, rounds - 1, len(body))]
    if max(sizes) < shape.direct:
        return steps
    return peer_arrays.all_gather(shape, sizes, mine, outs, steps)


def _gather_round(
    shape: GroupShape, sizes: Sequence[int], mine: At, outs: Sequence[At], base: int
) -> list[Step]:
    me, slot = shape.rank, shape.slot_bytes
    steps = [] if base else [do.free(), do.enter()]
    if sizes[me] > base:
        steps.append(do.copy(staging(me), moved(mine, base, slot), slot, sizes[me] - base))
    steps.append(do.signal(1))
    if not base:
        steps.append(do.meet_all())
        steps += [do.copy(outs[me], mine, sizes[me])] if sizes[me] else []
    for peer in shape.peers:
        steps += [do.wait(peer, 1)] if base else []
        if sizes[peer] > base:
            place = moved(outs[peer], base, slot)
            steps.append(do.copy(place, staging(peer), slot, sizes[peer] - base))
    return steps


def reduce_scatter(
    shape: GroupShape, sizes: Sequence[int], out: At, inps: Sequence[At], reduction: Reduction
) -> list[Step]:
    """Return the steps for out := reduction of all inps[this rank]; rank r gets sizes[r] bytes."""
    if shape.size == 1:
        return do.alone(reduction.alone(out, inps[0], sizes[0]) if sizes[0] else [])
    piece = reduction.down(shape.slot_bytes // shape.size)
    rounds = max(1, -(-max(sizes) // piece))
    steps = [*_scatter_round(shape, sizes, out, inps, reduction, 0), do.end_round(1, 2)]
    if rounds > 1:
        body = _scatter_round(shape, sizes, out, inps, reduction, piece)
        steps += [*body, do.end_round(1, 2, rounds - 1, len(body))]
    if sum(sizes) < shape.direct or len(set(sizes)) > 1 or reduction.scaled:
        return steps
    return peer_arrays.reduce_scatter(shape, sizes[0], out, inps, reduction, steps)


def _scatter_round(
    shape: GroupShape, sizes: Sequence[int], out: At, inps: Sequence[At], how: Reduction, base: int
) -> list[Step]:
    me, piece = shape.rank, how.down(shape.slot_bytes // shape.size)
    # `out` may be this rank's own chunk, which the reduction overwrites before its turn in rank
    # order. So with more than two ranks that contribution goes through the staging buffer, too.
    alone = shape.size == 2 and not how.scaled
    steps = [] if base else [do.free(), do.enter()]
    for peer in shape.peers if alone else [*shape.peers, me]:
        if sizes[peer] > base:
            place = moved(inps[peer], base, piece)
            left = sizes[peer] - base
            steps.append(how.publish(staging(me, peer * piece), place, piece, left))
    steps += [do.signal(1), do.wait_all(1) if base else do.meet_all()]
    if sizes[me] > base:
        own = moved(inps[me], base, piece) if alone else staging(me, me * piece)
        to, parts, left = moved(out, base, piece), staging(0, me * piece), sizes[me] - base
        steps.append(do.fold_staged(to, parts, own, piece, how.how, total=left))
    return steps
