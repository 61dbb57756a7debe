"""broadcast and barrier.

broadcast of more than INLINE_BYTES: the root shows its array half a board at a time, everyone
copies it out; the two halves let the root be one round ahead. No rank leaves before all have
entered: that is what lets a disagreement (two roots, say) be found in the very call. Of several
rounds, tick 2 says that a rank has left one, so the root signals it only after it has compared
everyone's fingerprints. If there is one round, the next call's meeting says it: who has entered
that has left this one.

Of no more the root leads: it puts its call and the payload into a cache line, and goes on at once,
up to MOST_AHEAD ticks before the slowest rank. Each other one compares its own call with that line
when it comes.
"""

from __future__ import annotations

from nc10d.backend.cpu.algorithms import peer_arrays
from nc10d.backend.cpu.algorithms.group_shape import GroupShape
from nc10d.backend.cpu.program.program import INLINE_BYTES, Step, board, user
from nc10d.backend.cpu.program.steps import (
    BEHIND,
    begin,
    copy,
    end_round,
    enter,
    follow,
    free,
    lead,
    listen,
    meet_all,
    signal,
    wait,
    wait_all,
)


def barrier(layout: GroupShape) -> list[Step]:
    """Nobody leaves before everybody has come."""
    return [free(), enter(), signal(1), meet_all(), end_round(1, 2)]


def broadcast(layout: GroupShape, nbytes: int, root: int) -> list[Step]:
    """User array 0 := the root's."""
    if layout.size == 1:
        return [free(), enter(), end_round(2, 2)]
    if 0 < nbytes <= INLINE_BYTES:
        return _led(layout, nbytes, root)
    first, rest = min(nbytes, layout.half), max(0, nbytes - layout.half)
    steps = _first(layout, first, root)
    if rest:
        body = _more(layout, rest, root)
        rounds = -(-rest // layout.half)
        steps += [signal(2), end_round(2, 2), *body, end_round(2, 2, rounds, len(body))]
    else:
        steps += [end_round(1, 2)]
    return peer_arrays.broadcast(layout, nbytes, root, steps) if nbytes >= layout.direct else steps


def _led(layout: GroupShape, nbytes: int, root: int) -> list[Step]:
    if layout.rank == root:
        way = [lead(user(0), nbytes)]
    else:
        way = [listen(root), wait(root, 1), follow(user(0), root, nbytes)]
    return [begin(), wait_all(BEHIND), *way, signal(1), end_round(1, 0)]


def _first(layout: GroupShape, nbytes: int, root: int) -> list[Step]:
    put, get = copy(board(root), user(0), nbytes), copy(user(0), board(root), nbytes)
    before, after = ([put], []) if layout.rank == root else ([], [get])
    if nbytes == 0:
        before, after = [], []
    return [free(), enter(), *before, signal(1), meet_all(), *after]


def _more(layout: GroupShape, rest: int, root: int) -> list[Step]:
    half = layout.half
    place = user(0, half, half)
    if layout.rank == root:
        return [free(), copy(board(root), place, half, rest), signal(2)]
    return [wait(root, 1), copy(place, board(root), half, rest), signal(2)]
