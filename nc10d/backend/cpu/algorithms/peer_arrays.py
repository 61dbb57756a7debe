"""Large arrays read where they lie: what is not folded is copied once.

Each program has two ways. Ranks expose their arrays; if all of them can be read, everybody takes
what is his from its owner, and nobody leaves before the others have taken theirs. If one can't,
all go the way over the boards. An all_reduce, a broadcast, and two ranks' swaps write into peers'
arrays too, as far as these are lent (see native/peer_array_steps.py).

Registered arrays are folded, fetched and filled where they lie. For others the kernel is asked,
each algorithm from the size on where that pays: see `access_for`. What it fetches to be folded goes
where the result will be, or to a spare place if that is my own part.
"""

from __future__ import annotations

from collections.abc import Sequence

from nc10d.backend.cpu.algorithms.group_shape import GroupShape
from nc10d.backend.cpu.algorithms.reduction import Reduction
from nc10d.backend.cpu.algorithms.tuning import NEVER
from nc10d.backend.cpu.native.offsets import READS, WRITES
from nc10d.backend.cpu.program.lines import LINE, line_down, line_up
from nc10d.backend.cpu.program.program import At, Step, board, moved, user
from nc10d.backend.cpu.program.steps import (
    branch_if_flagged,
    copy,
    end_round,
    enter,
    expose,
    fetch,
    fill_lent,
    fold_exposed,
    free,
    jump,
    recall,
    signal,
    wait,
    wait_all,
)

AHEAD = 2
"""How many windows a rank folds before it fetches the first: peers need not keep step."""
SECOND = 16
"""Where on a board a second array is shown."""
MOST_CHUNKS = 256
"""So many chunks at most, of all ranks in all windows: programs of large arrays stay short."""


def _either(
    layout: GroupShape,
    mine: At,
    direct: Sequence[Step],
    boards: Sequence[Step],
    *,
    access: int,
    lent: int = 0,
) -> list[Step]:
    """Expose an array; go `direct` if all ranks' can be read, else over the boards.

    `access` is what the kernel must give for a plain array, `lent` how many bytes peers write.
    """
    # An area has words for one loan of plain memory, so one rank may write there.
    assert layout.size == 2 or not (access and lent), (access, lent)
    exposed = expose(layout.rank, mine, access, lent=lent)
    return ways([enter(), exposed], direct, boards)


def ways(opening: Sequence[Step], direct: Sequence[Step], boards: Sequence[Step]) -> list[Step]:
    """Open with what exposes; go `direct` if all that can be read, else over the boards."""
    first = [*direct, jump(1 + len(boards))]
    steps = [free(), *opening, signal(1), branch_if_flagged(len(first))]
    return [*steps, *first, end_round(1, 2), *boards]


def _cut(layout: GroupShape, nbytes: int, rank: int) -> tuple[int, int]:
    """Return where a rank's chunk begins, and its bytes."""
    chunk = line_up(-(-nbytes // layout.size))
    low = min(nbytes, rank * chunk)
    return low, min(nbytes, low + chunk) - low


def fold_mates(
    layout: GroupShape,
    dst: At,
    own: At,
    offset: int,
    nbytes: int,
    reduction: Reduction,
    lent: int = 0,
) -> Step:
    """Fold what is exposed; what peers read of my board is its first line, the rest is free."""
    room, most = board(layout.rank, LINE), line_down((layout.half - LINE) // 2)
    return fold_exposed(dst, own, offset, nbytes, reduction.how, room, most, lent)


def all_reduce(
    layout: GroupShape, nbytes: int, reduction: Reduction, boards: Sequence[Step]
) -> list[Step]:
    """Each rank folds its chunk of user array 0 and puts the result into all arrays lent to it.

    Who could not lend his fetches the others' chunks, window by window: in turns with the folds,
    and late enough that they have left their owner's own cache.
    """
    lent = nbytes // layout.page * layout.page
    windows = windows_of(nbytes, layout.window, max(1, MOST_CHUNKS // layout.size))
    ready = range(2, 2 + len(windows))  # the tick that tells that my chunk of a window is folded
    fetches = [_fetches(layout, *window, tick) for window, tick in zip(windows, ready, strict=True)]
    steps: list[Step] = []
    for number, (base, count) in enumerate(windows):
        low, length = _cut(layout, count, layout.rank)
        mine = user(0, base + low)
        if length:
            steps.append(fold_mates(layout, mine, mine, base + low, length, reduction, lent))
        steps.append(signal(ready[number]))
        if number >= AHEAD:
            steps += fetches[number - AHEAD]
    for behind in fetches[-AHEAD:]:
        steps += behind
    done = ready.stop
    steps += [signal(done), wait_all(done), recall(), end_round(done, done)]
    # More ranks than two would ask the kernel for twice as many pieces, and more than one may not
    # write (see nc10d_writable).
    access = access_for(nbytes, layout.reduced, layout.lending) if layout.size == 2 else 0
    return _either(layout, user(0), steps, boards, access=access, lent=lent)


def access_for(nbytes: int, reading: int, writing: int = NEVER) -> int:
    """Return the least access with which the kernel is quicker than boards; 0: with none.

    Reading alone is from `reading` bytes on, where peers write as well from `writing` bytes on.
    """
    if nbytes >= reading:
        return READS
    return WRITES if nbytes >= writing else 0


def windows_of(nbytes: int, least: int, most: int) -> list[tuple[int, int]]:
    """Cut an array into windows (offset, bytes) of equal size, but for the last; `most` at most."""
    each = max(least, line_up(-(-nbytes // most)))
    return [(base, min(each, nbytes - base)) for base in range(0, nbytes, each)]


def _fetches(layout: GroupShape, base: int, count: int, tick: int) -> list[Step]:
    """Fetch the others' chunks of a window, each when its owner has signalled `tick`."""
    steps = []
    for peer in layout.others:
        low, length = _cut(layout, count, peer)
        if length:
            steps += [wait(peer, tick), fetch(user(0, base + low), peer, base + low, length)]
    return steps


def reduce_scatter(
    layout: GroupShape,
    nbytes: int,
    out: At,
    inps: Sequence[At],
    reduction: Reduction,
    boards: Sequence[Step],
) -> list[Step]:
    """out := my chunk, of `nbytes`, of the fold of everyone's chunks `inps`.

    Who has them in several arrays can't expose them as one.
    """
    mine = inps[layout.rank]
    steps = [
        fold_mates(layout, out, mine, layout.rank * nbytes, nbytes, reduction),
        *all_have_read(2),
    ]
    if len({at.index for at in inps}) > 1:
        return ways([enter(flag=True)], steps, boards)
    access = READS if nbytes * layout.size >= layout.folding else 0
    return _either(layout, inps[0], steps, boards, access=access)


def all_gather(
    layout: GroupShape,
    sizes: Sequence[int],
    mine: At,
    outs: Sequence[At],
    boards: Sequence[Step],
) -> list[Step]:
    """outs[r] := rank r's array of sizes[r] bytes; mine is my own."""
    me = layout.rank
    steps = [copy(outs[me], mine, sizes[me])] if sizes[me] else []
    if layout.size == 2:
        theirs, much = outs[1 - me], (sizes[me], sizes[1 - me])
        return _swap(layout, mine, much, theirs, steps, boards)
    steps += [fetch(outs[p], p, 0, sizes[p]) for p in layout.others if sizes[p]]
    access = access_for(sum(sizes), layout.gathered)
    return _either(layout, mine, [*steps, *all_have_read(2)], boards, access=access)


def all_to_all(
    layout: GroupShape, nbytes: int, inp: At, recvs: Sequence[At], boards: Sequence[Step]
) -> list[Step]:
    """recvs[r] := chunk number my rank, of `nbytes`, of rank r's `inp`."""
    me = layout.rank
    chunks = [moved(inp, rank * nbytes) for rank in range(layout.size)]
    steps = [copy(recvs[me], chunks[me], nbytes)]
    if layout.size == 2:
        return _swap(layout, chunks[1 - me], (nbytes, nbytes), recvs[1 - me], steps, boards)
    steps += [fetch(recvs[p], p, me * nbytes, nbytes) for p in layout.others]
    access = access_for(nbytes * layout.size, layout.asked)
    return _either(layout, inp, [*steps, *all_have_read(2)], boards, access=access)


def _swap(
    layout: GroupShape,
    mine: At,
    sizes: tuple[int, int],
    theirs: At,
    own: Sequence[Step],
    boards: Sequence[Step],
) -> list[Step]:
    """Of two ranks, each puts `mine` to where the other lends it `theirs`; `own` is done besides.

    `sizes` are the bytes of the two. What is not lent is fetched.
    """
    me, peer = layout.rank, 1 - layout.rank
    given, lent = (size // layout.page * layout.page for size in sizes)
    access = access_for(sum(sizes), layout.exchanged, layout.swapped)
    # Of what is in no cache, reading is as quick as writing or quicker.
    lending = access if access == WRITES else 0
    opening = [
        enter(),
        expose(me, mine, access),
        expose(me, theirs, lending, flag=False, lent=lent, slot=SECOND),
    ]
    steps = [fill_lent(mine, given, SECOND), *own, fetch(theirs, peer, 0, sizes[1])]
    steps += [signal(2), wait(peer, 2), recall(), end_round(2, 2)]
    return ways(opening, steps, boards)


def broadcast(layout: GroupShape, nbytes: int, root: int, boards: Sequence[Step]) -> list[Step]:
    """User array 0 := the root's.

    The copying is shared: each rank lends the root one part in `size`, which the root fills in
    all arrays, and fetches the others.
    """
    lent = nbytes // layout.size // layout.page * layout.page
    if layout.rank == root:
        steps = [fill_lent(user(0), lent), *all_have_read(2)]
        access = access_for(nbytes, layout.spread, layout.shared if layout.size == 2 else NEVER)
        return _either(layout, user(0), steps, boards, access=access)
    lend = expose(layout.rank, user(0), WRITES, flag=False, lent=lent)
    steps = [fetch(user(0), root, 0, nbytes), signal(2), wait(root, 2), recall(), end_round(2, 2)]
    return ways([enter(), lend], steps, boards)


def all_have_read(tick: int) -> list[Step]:
    """Say by `tick` that I have all I wanted, and leave when everybody has."""
    return [signal(tick), wait_all(tick), end_round(tick, tick)]
