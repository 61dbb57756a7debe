"""all_reduce and reduce: one shot for small arrays, reduce-scatter and copy-out for large ones.

One shot: everybody shows its array, everybody folds all of them in rank order. Staged: the array
is cut into one chunk a rank; each rank folds its own chunk and shows the result, which the others
copy out (`reduce`: only the root does). Both fold in rank order, so their bits are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nc10d.backend.cpu.algorithms import direct
from nc10d.backend.cpu.algorithms.contribute import Reduction
from nc10d.backend.cpu.algorithms.layout import Layout, line_down, line_up
from nc10d.backend.cpu.program import INLINE_BYTES, NOWHERE, At, Step, board, inline, user
from nc10d.backend.cpu.steps import (
    copy,
    end_round,
    enter,
    free,
    meet_all,
    reduce_ranks,
    signal,
    wait,
    wait_all,
)


@dataclass(frozen=True, slots=True)
class Part:
    """One array of a fused all_reduce: user array `index`, `nbytes` long, and how to fold it."""

    index: int
    nbytes: int
    reduction: Reduction


def all_reduce(layout: Layout, nbytes: int, reduction: Reduction, root: int = -1) -> list[Step]:
    """Fold user array 0 of all ranks, in place; with a root, only there."""
    if layout.size == 1:
        return [free(), enter(), *_alone(nbytes, reduction), end_round(1, 2)]
    if nbytes <= one_shot_limit(layout):
        parts = [Part(0, nbytes, reduction)]
        return fused(layout, parts) if root < 0 else _one_shot_to(layout, parts[0], root)
    staged = _staged(layout, nbytes, reduction, root)
    if root >= 0 or nbytes < layout.direct or reduction.scaled:
        return staged
    return direct.all_reduce(layout, nbytes, reduction, staged)


def one_shot_limit(layout: Layout) -> int:
    """Return the largest array, in bytes, that goes in one shot."""
    return min(layout.small, layout.half)


def _alone(nbytes: int, reduction: Reduction) -> list[Step]:
    # One rank: the average of one array is that array, a scaled one is scaled where it lies.
    if nbytes == 0 or not reduction.scaled:
        return []
    return [reduction.show(user(0), user(0), nbytes)]


def fused(layout: Layout, parts: Sequence[Part]) -> list[Step]:
    """Reduce several arrays with one handshake; all together they fit in half a board."""
    if layout.size == 1:
        steps = [free(), enter()]
        for part in parts:
            if part.nbytes and part.reduction.scaled:
                at = user(part.index)
                steps.append(part.reduction.show(at, at, part.nbytes))
        return [*steps, end_round(1, 2)]
    puts: list[Step] = []
    folds: list[Step] = []
    offset = 0
    small = len(parts) == 1 and parts[0].nbytes <= INLINE_BYTES
    for part in parts:
        if part.nbytes == 0:
            continue
        mine = inline(layout.rank) if small else board(layout.rank, offset)
        first = inline(0) if small else board(0, offset)
        puts.append(part.reduction.show(mine, user(part.index), part.nbytes))
        folds.append(_fold(layout, part, first, mine))
        offset += line_up(part.nbytes)
    assert offset <= layout.half or small, (offset, layout)
    return [free(), enter(), *puts, signal(1), meet_all(), *folds, end_round(1, 2)]


def _fold(layout: Layout, part: Part, first: At, mine: At) -> Step:
    # The fold overwrites the user's array from the first pair on. With two ranks that pair is
    # everything; with more, a rank's own contribution must come from what it has shown.
    direct = layout.size == 2 and not part.reduction.scaled
    own = user(part.index) if direct else mine
    return reduce_ranks(user(part.index), first, own, part.nbytes, part.reduction.how)


def _one_shot_to(layout: Layout, part: Part, root: int) -> list[Step]:
    mine = board(layout.rank)
    puts = [part.reduction.show(mine, user(0), part.nbytes)] if part.nbytes else []
    if layout.rank != root:
        return [free(), enter(), *puts, signal(1), meet_all(), end_round(1, 2)]
    folds = [_fold(layout, part, board(0), mine)] if part.nbytes else []
    return [free(), enter(), *puts, signal(1), meet_all(), *folds, end_round(1, 2)]


def _staged(layout: Layout, nbytes: int, reduction: Reduction, root: int) -> list[Step]:
    # A half holds one contribution to every rank's chunk, and behind them one result chunk.
    chunk = line_down(layout.half // (layout.size + 1))
    whole = chunk * layout.size
    rounds, rest = divmod(nbytes, whole)
    steps: list[Step] = []
    if rounds:
        first = _round(layout, reduction, chunk, whole, 0, whole, root, opening=True)
        steps += [*first, end_round(2, 3)]
    if rounds > 1:
        body = _round(layout, reduction, chunk, whole, whole, whole, root, opening=False)
        steps += [*body, end_round(2, 3, rounds - 1, len(body))]
    if rest:
        # The last piece is cut again into equal chunks: nobody idles while one rank has it all.
        last = line_up(-(-rest // layout.size))
        opening = rounds == 0
        steps += _round(layout, reduction, last, rest, rounds * whole, 0, root, opening=opening)
        steps.append(end_round(2, 3))
    return steps


def _round(
    layout: Layout,
    reduction: Reduction,
    chunk: int,
    count: int,
    base: int,
    stride: int,
    root: int,
    *,
    opening: bool,
) -> list[Step]:
    """Fold `count` bytes from `base` on, a chunk a rank."""

    def cut(rank: int) -> tuple[int, int]:
        low = min(count, rank * chunk)
        return low, min(count, low + chunk) - low

    me = layout.rank
    result = layout.size * chunk
    # Every round waits for everyone: that frees the half of the round before.
    steps: list[Step] = [free(), enter()] if opening else []
    for peer in layout.others:
        low, length = cut(peer)
        if length:
            steps.append(reduction.show(board(me, low), user(0, base + low, stride), length))
    low, length = cut(me)
    mine = user(0, base + low, stride)
    own = mine
    if length and reduction.scaled:
        own = board(me, low)
        steps.append(reduction.show(own, mine, length))
    steps += [signal(1), meet_all() if opening else wait_all(1)]
    if length:
        first, second = board(me, result), mine if root in (-1, me) else NOWHERE
        if layout.size == 2 and second != NOWHERE:
            # One pair can be folded straight to where it is wanted; its copy goes on the board.
            first, second = second, first
        steps.append(reduce_ranks(first, board(0, low), own, length, reduction.how, second))
    steps.append(signal(2))
    if root in (-1, me):
        for peer in layout.others:
            low, length = cut(peer)
            if length:
                out = user(0, base + low, stride)
                steps += [wait(peer, 2), copy(out, board(peer, result), length)]
    return steps
