"""broadcast and barrier.

broadcast: the root shows its array half a board at a time, everyone copies it out; the two
halves let the root be one round ahead. No rank leaves before all have entered: that is what lets
a disagreement (two roots, say) be found in the very call. Tick 2 says that a rank has left the
round, so the root signals it only after it has compared everyone's fingerprints.
"""

from __future__ import annotations

from nc10d.backend.cpu.algorithms import direct
from nc10d.backend.cpu.algorithms.layout import Layout
from nc10d.backend.cpu.program import INLINE_BYTES, Step, board, inline, user
from nc10d.backend.cpu.steps import copy, end_round, enter, free, meet_all, signal, wait


def barrier(layout: Layout) -> list[Step]:
    """Nobody leaves before everybody has come."""
    return [free(), enter(), signal(1), meet_all(), end_round(1, 2)]


def broadcast(layout: Layout, nbytes: int, root: int) -> list[Step]:
    """User array 0 := the root's."""
    if layout.size == 1:
        return [free(), enter(), end_round(2, 2)]
    if nbytes <= INLINE_BYTES:
        return _tiny(layout, nbytes, root)
    first, rest = min(nbytes, layout.half), max(0, nbytes - layout.half)
    steps = _first(layout, first, root)
    if rest:
        body = _more(layout, rest, root)
        rounds = -(-rest // layout.half)
        steps += [*body, end_round(2, 2, rounds, len(body))]
    return direct.broadcast(layout, nbytes, root, steps) if nbytes >= layout.direct else steps


def _tiny(layout: Layout, nbytes: int, root: int) -> list[Step]:
    if layout.rank == root:
        put = [copy(inline(root), user(0), nbytes)] if nbytes else []
        return [free(), enter(), *put, signal(1), meet_all(), signal(2), end_round(2, 2)]
    get = [copy(user(0), inline(root), nbytes)] if nbytes else []
    return [free(), enter(), signal(1), meet_all(), *get, signal(2), end_round(2, 2)]


def _first(layout: Layout, nbytes: int, root: int) -> list[Step]:
    if layout.rank == root:
        put = copy(board(root), user(0), nbytes)
        return [free(), enter(), put, signal(1), meet_all(), signal(2), end_round(2, 2)]
    get = copy(user(0), board(root), nbytes)
    return [free(), enter(), signal(1), meet_all(), get, signal(2), end_round(2, 2)]


def _more(layout: Layout, rest: int, root: int) -> list[Step]:
    half = layout.half
    place = user(0, half, half)
    if layout.rank == root:
        return [free(), copy(board(root), place, half, rest), signal(2)]
    return [wait(root, 1), copy(place, board(root), half, rest), signal(2)]
