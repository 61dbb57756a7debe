"""all_reduce and reduce: one shot for small arrays, reduce-scatter and copy-out for large ones.

One shot: everybody shows its array, everybody folds all of them in rank order. Staged: the array
is cut into windows, and these into one chunk a rank; each rank folds its own chunk and shows the
result, which the others copy out (`reduce`: only the root does) while the next window is on the
boards. Both fold in rank order, so their bits are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nc10d.backend.cpu.algorithms import peer_arrays as direct
from nc10d.backend.cpu.algorithms.group_shape import GroupShape
from nc10d.backend.cpu.algorithms.reduction import Reduction
from nc10d.backend.cpu.program.lines import line_down, line_up
from nc10d.backend.cpu.program.program import (
    INLINE_BYTES,
    NOWHERE,
    At,
    Step,
    board,
    earlier,
    inline,
    user,
)
from nc10d.backend.cpu.program.steps import (
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


def all_reduce(layout: GroupShape, nbytes: int, reduction: Reduction, root: int = -1) -> list[Step]:
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


def one_shot_limit(layout: GroupShape) -> int:
    """Return the largest array, in bytes, that goes in one shot."""
    return min(layout.small, layout.half)


def _alone(nbytes: int, reduction: Reduction) -> list[Step]:
    # One rank: the average of one array is that array, a scaled one is scaled where it lies.
    if nbytes == 0 or not reduction.scaled:
        return []
    return [reduction.show(user(0), user(0), nbytes)]


def fused(layout: GroupShape, parts: Sequence[Part]) -> list[Step]:
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


def _fold(layout: GroupShape, part: Part, first: At, mine: At) -> Step:
    # The fold overwrites the user's array from the first pair on. With two ranks that pair is
    # everything; with more, a rank's own contribution must come from what it has shown.
    direct = layout.size == 2 and not part.reduction.scaled
    own = user(part.index) if direct else mine
    return reduce_ranks(user(part.index), first, own, part.nbytes, part.reduction.how)


def _one_shot_to(layout: GroupShape, part: Part, root: int) -> list[Step]:
    mine = board(layout.rank)
    puts = [part.reduction.show(mine, user(0), part.nbytes)] if part.nbytes else []
    if layout.rank != root:
        return [free(), enter(), *puts, signal(1), meet_all(), end_round(1, 2)]
    folds = [_fold(layout, part, board(0), mine)] if part.nbytes else []
    return [free(), enter(), *puts, signal(1), meet_all(), *folds, end_round(1, 2)]


def _staged(layout: GroupShape, nbytes: int, reduction: Reduction, root: int) -> list[Step]:
    # A half holds one contribution to every rank's chunk, and behind them one result chunk. That
    # all show a window says that all have folded the one before, whose results are copied out then.
    # So contributions are shown while a peer may still read the result in the same half: it lies
    # behind the largest of them, and is written only when all have met once more.
    chunk = line_down(layout.half // (layout.size + 1))
    whole = chunk * layout.size
    before = max(0, -(-nbytes // whole) - 1)
    rest = nbytes - before * whole

    def window(base: int, stride: int = 0) -> _Window:
        return _Window(layout, reduction, root, chunk, whole, base, stride)

    # The last piece is cut again into equal chunks: nobody idles while one rank has it all.
    small = line_up(-(-rest // layout.size))
    last = _Window(layout, reduction, root, small, rest, before * whole)
    steps: list[Step] = [free(), enter()]
    meet = meet_all()  # where calls are compared
    if before:
        first = window(0)
        steps += [*first.shown(), signal(1), meet, *first.folded(), end_round(1, 3)]
        meet = wait_all(1)
    if before > 1:
        later = window(whole, whole)
        body = [*later.shown(), signal(1), meet, *window(0, whole).results(earlier)]
        body += later.folded()
        steps += [*body, end_round(1, 3, before - 1, len(body))]
    steps += [*last.shown(), signal(1), meet]
    if before:
        steps += window((before - 1) * whole).results(earlier)
    steps += [*last.folded(), signal(2), *last.results(board, wait), end_round(2, 3)]
    return steps


@dataclass(frozen=True, slots=True)
class _Window:
    """`nbytes` from `base` on, a chunk a rank; each segment begins `stride` bytes later."""

    layout: GroupShape
    reduction: Reduction
    root: int
    chunk: int
    nbytes: int
    base: int
    stride: int = 0

    def shown(self) -> list[Step]:
        """Put my part of every chunk on my board."""
        layout = self.layout
        mine = [layout.rank] if self.reduction.scaled else []
        steps: list[Step] = []
        for rank in [*layout.others, *mine]:
            at, length = self._cut(rank)
            if length:
                steps.append(self.reduction.show(board(layout.rank, rank * self.chunk), at, length))
        return steps

    def folded(self) -> list[Step]:
        """Fold all parts of my chunk, and show the result."""
        size, me = self.layout.size, self.layout.rank
        at, length = self._cut(me)
        if not length:
            return []
        low = me * self.chunk
        own = board(me, low) if self.reduction.scaled else at
        first, second = board(me, self._result), at if self.root in (-1, me) else NOWHERE
        if size == 2 and second != NOWHERE:
            # One pair can be folded straight to where it is wanted; its copy goes on the board.
            first, second = second, first
        return [reduce_ranks(first, board(0, low), own, length, self.reduction.how, second)]

    def results(
        self, place: Callable[[int, int], At], ready: Callable[[int, int], Step] | None = None
    ) -> list[Step]:
        """Copy the others' results from their boards; `ready` waits until a rank shows one."""
        steps: list[Step] = []
        for peer in self.layout.others if self.root in (-1, self.layout.rank) else ():
            at, length = self._cut(peer)
            if length:
                steps += [ready(peer, 2)] if ready else []
                steps.append(copy(at, place(peer, self._result), length))
        return steps

    @property
    def _result(self) -> int:
        return self.layout.size * self.chunk

    def _cut(self, rank: int) -> tuple[At, int]:
        """Return where a rank's chunk lies in the user's array, and its length."""
        low = min(self.nbytes, rank * self.chunk)
        length = min(self.nbytes, low + self.chunk) - low
        return user(0, self.base + low, self.stride), length
