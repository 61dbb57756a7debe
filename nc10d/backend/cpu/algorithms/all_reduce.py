"""all_reduce and reduce on one host: a flat algorithm for small arrays, windows for large arrays.

Flat (up to `GroupShape.one_shot` bytes). Each rank copies its array to its staging buffer and
signals tick 1. When all ranks have done so, each rank reduces all arrays in rank order.

By windows (Rabenseifner's reduce-scatter and all-gather, over shared memory). The array is cut
into windows, and a window into a chunk per rank. For each window every rank

1. copies its part of all chunks to its staging buffer, signals tick 1 and waits for all ranks;
2. copies its peers' results for the window before from their staging buffers (in a reduce only the
   root does);
3. reduces its own chunk and stores the result behind its parts, in the same staging buffer.

A rank publishes window k+1 only after reducing window k, so one barrier per window is
enough.

Both reduce in rank order, so they produce the same bits (R. Rabenseifner, "Optimization of
collective reduction operations", 2004).

Not done for arrays past the caches, because four ranks on two cores were no faster: fetching the
next window's lines ahead, staging buffers with other sizes (64 KiB to 2 MiB).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nc10d.backend.cpu.algorithms import peer_arrays as direct
from nc10d.backend.cpu.algorithms.group_shape import GroupShape
from nc10d.backend.cpu.algorithms.reduction import Reduction
from nc10d.backend.cpu.program import steps as do
from nc10d.backend.cpu.program.program import (
    INLINE_BYTES,
    NOWHERE,
    At,
    Step,
    earlier,
    inline,
    line_up,
    staging,
    user,
)


@dataclass(frozen=True, slots=True)
class FusedArray:
    """A small array in a fused all_reduce: user array `index`, its bytes and its reduction."""

    index: int
    nbytes: int
    reduction: Reduction


def all_reduce(shape: GroupShape, nbytes: int, reduction: Reduction, root: int = -1) -> list[Step]:
    """Return the steps that reduce all ranks' user array 0 in place, or only on the root."""
    if shape.size == 1:
        return fused(shape, [FusedArray(0, nbytes, reduction)])
    if nbytes <= one_shot_limit(shape):
        parts = [FusedArray(0, nbytes, reduction)]
        return fused(shape, parts) if root < 0 else _flat_to_root(shape, parts[0], root)
    staged = _by_windows(shape, nbytes, reduction, root)
    if root >= 0 or nbytes < shape.direct or reduction.scaled:
        return staged
    return direct.all_reduce(shape, nbytes, reduction, staged)


def one_shot_limit(shape: GroupShape) -> int:
    """Return the largest array in bytes that the flat algorithm reduces."""
    return min(shape.one_shot, shape.slot_bytes)


def fused(shape: GroupShape, parts: Sequence[FusedArray]) -> list[Step]:
    """Return the steps that reduce small arrays, which fit into a slot and share a barrier."""
    small = len(parts) == 1 and parts[0].nbytes <= INLINE_BYTES
    parts = [part for part in parts if part.nbytes]
    if shape.size == 1:
        each = [(user(part.index), part) for part in parts]
        changes = [part.reduction.alone(at, at, part.nbytes) for at, part in each]
        return do.alone([step for steps in changes for step in steps])
    publishes: list[Step] = []
    folds: list[Step] = []
    offset = 0
    for part in parts:
        mine = inline(shape.rank) if small else staging(shape.rank, offset)
        first = inline(0) if small else staging(0, offset)
        publishes.append(part.reduction.publish(mine, user(part.index), part.nbytes))
        folds.append(_fold(shape, part, first, mine))
        offset += line_up(part.nbytes)
    assert offset <= shape.slot_bytes or small, (offset, shape)
    return do.single_round(publishes, folds)


def _fold(shape: GroupShape, part: FusedArray, first: At, mine: At) -> Step:
    # The reduction overwrites the user's array from the first pair on. With two ranks there is no
    # other pair. With more ranks this rank's contribution is read from its staging buffer.
    direct = shape.size == 2 and not part.reduction.scaled
    own = user(part.index) if direct else mine
    return do.fold_staged(user(part.index), first, own, part.nbytes, part.reduction.how)


def _flat_to_root(shape: GroupShape, part: FusedArray, root: int) -> list[Step]:
    mine = staging(shape.rank)
    publishes = [part.reduction.publish(mine, user(0), part.nbytes)] if part.nbytes else []
    folds = [_fold(shape, part, staging(0), mine)] if part.nbytes and shape.rank == root else []
    return do.single_round(publishes, folds)


def _by_windows(shape: GroupShape, nbytes: int, reduction: Reduction, root: int) -> list[Step]:
    # A slot of the staging buffer holds this rank's part of every chunk and, behind them, the
    # result for its own chunk. Window k's results are copied out after window k+1's barrier. So a
    # rank writes the parts of window k+2 while a peer may still read window k's result from the
    # same slot. That is safe: the result lies behind the parts, and is overwritten only after the
    # next barrier.
    chunk = reduction.down(shape.slot_bytes // (shape.size + 1))
    whole = chunk * shape.size
    before = max(0, -(-nbytes // whole) - 1)
    rest = nbytes - before * whole

    def window(base: int, stride: int = 0) -> _Window:
        return _Window(shape, reduction, root, chunk, whole, base, stride)

    # The last window is cut into equal chunks, so that all ranks share the work.
    small = reduction.up(-(-rest // shape.size))
    last = _Window(shape, reduction, root, small, rest, before * whole)
    steps: list[Step] = [do.free(), do.enter()]
    meet = do.meet_all()  # The first barrier compares the ranks' calls.
    # Rounds are free at tick 3: peers read a window's results in the next round, after tick 1 (the
    # last window's: after tick 2), so only the signal after that shows that they have left.
    if before:
        first = window(0)
        steps += [*first.publishes(), do.signal(1), meet, *first.folds(), do.end_round(1, 3)]
        meet = do.wait_all(1)
    if before > 1:
        later = window(whole, whole)
        body = [*later.publishes(), do.signal(1), meet, *window(0, whole).results(earlier)]
        body += later.folds()
        steps += [*body, do.end_round(1, 3, before - 1, len(body))]
    steps += [*last.publishes(), do.signal(1), meet]
    if before:
        steps += window((before - 1) * whole).results(earlier)
    steps += [*last.folds(), do.signal(2), *last.results(staging, do.wait), do.end_round(2, 3)]
    return steps


@dataclass(frozen=True, slots=True)
class _Window:
    """A window: `nbytes` from `base` on, `chunk` bytes a rank; loops move it by `stride` bytes."""

    shape: GroupShape
    reduction: Reduction
    root: int
    chunk: int
    nbytes: int
    base: int
    stride: int = 0

    def publishes(self) -> list[Step]:
        """Return the steps that copy this rank's part of every chunk to its staging buffer."""
        shape = self.shape
        mine = [shape.rank] if self.reduction.scaled else []
        steps: list[Step] = []
        for rank in [*shape.peers, *mine]:
            at, length = self._cut(rank)
            if length:
                place = staging(shape.rank, rank * self.chunk)
                steps.append(self.reduction.publish(place, at, length))
        return steps

    def folds(self) -> list[Step]:
        """Return the steps that reduce this rank's chunk and store the result in staging."""
        size, me = self.shape.size, self.shape.rank
        at, length = self._cut(me)
        if not length:
            return []
        low = me * self.chunk
        own = staging(me, low) if self.reduction.scaled else at
        first, second = staging(me, self._result), at if self.root in (-1, me) else NOWHERE
        if size == 2 and second != NOWHERE:
            # A pair is reduced straight into the user's array, and copied to staging from there.
            first, second = second, first
        return [do.fold_staged(first, staging(0, low), own, length, self.reduction.how, second)]

    def results(
        self, place: Callable[[int, int], At], ready: Callable[[int, int], Step] | None = None
    ) -> list[Step]:
        """Return the steps that copy the peers' results; `ready` makes a wait for each peer."""
        steps: list[Step] = []
        for peer in self.shape.peers if self.root in (-1, self.shape.rank) else ():
            at, length = self._cut(peer)
            if length:
                steps += [ready(peer, 2)] if ready else []
                steps.append(do.copy(at, place(peer, self._result), length))
        return steps

    @property
    def _result(self) -> int:
        return self.shape.size * self.chunk

    def _cut(self, rank: int) -> tuple[At, int]:
        """Return the place of a rank's chunk in the user's array, and the chunk's bytes."""
        low = min(self.nbytes, rank * self.chunk)
        length = min(self.nbytes, low + self.chunk) - low
        return user(0, self.base + low, self.stride), length
