"""broadcast and barrier.

broadcast: the root shows its array half a board at a time (up to INLINE_BYTES in the cache line of
its counter) and every other rank copies it out. The two halves let the root be one round ahead. No
rank leaves before all have entered and compared fingerprints, so a disagreement (two roots, say) is
an error of that very call on every rank.

With several rounds, tick 2 states that a rank has left a round, so the root signals it only after
it has compared all fingerprints. With one round, the next call's meeting states it: a rank that has
entered the next call has left this one.
"""

from __future__ import annotations

from nc10d.backend.cpu.algorithms import peer_arrays
from nc10d.backend.cpu.algorithms.group_shape import GroupShape
from nc10d.backend.cpu.program.program import INLINE_BYTES, Step, board, inline, user
from nc10d.backend.cpu.program.steps import (
    copy,
    end_round,
    enter,
    free,
    meet_all,
    signal,
    wait,
)


def barrier(layout: GroupShape) -> list[Step]:
    """Nobody leaves before everybody has come."""
    return [free(), enter(), signal(1), meet_all(), end_round(1, 2)]


def broadcast(layout: GroupShape, nbytes: int, root: int) -> list[Step]:
    """User array 0 := the root's."""
    if layout.size == 1:
        return [free(), enter(), end_round(2, 2)]
    first, rest = min(nbytes, layout.half), max(0, nbytes - layout.half)
    steps = _first(layout, first, root)
    if rest:
        body = _more(layout, rest, root)
        rounds = -(-rest // layout.half)
        steps += [signal(2), end_round(2, 2), *body, end_round(2, 2, rounds, len(body))]
    else:
        steps += [end_round(1, 2)]
    return peer_arrays.broadcast(layout, nbytes, root, steps) if nbytes >= layout.direct else steps


def _first(layout: GroupShape, nbytes: int, root: int) -> list[Step]:
    shown = inline(root) if nbytes <= INLINE_BYTES else board(root)
    put, get = copy(shown, user(0), nbytes), copy(user(0), shown, nbytes)
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
