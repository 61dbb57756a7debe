"""Collectives on large arrays on one host: ranks access their peers' arrays in place.

Every program contains two alternatives. Each rank exposes its array as it enters, and signals
tick 1. If every array can be read, each rank copies or reduces straight from its peers' arrays, and
leaves when all peers have finished with its own. If any array cannot be read, a flag beside that
rank's fingerprint sends all ranks over the staging buffers.

An all_reduce, a broadcast, and a swap between two ranks also write into their peers' arrays, as
far as a peer has exposed its array for writing (native/peer_array_steps.py). The owner withdraws
the array at the end, when all peers have signalled that they have written.

The kernel copies plain arrays, each algorithm from the size on at which that is faster: see
`access_for`. The kernel brings a reduction's contributions to the result's place, or to spare
staging memory where the result overwrites this rank's own contribution.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nc10d.backend.cpu.algorithms.group_shape import BROADCAST_SHARE, NEVER, GroupShape
from nc10d.backend.cpu.algorithms.reduction import Reduction
from nc10d.backend.cpu.native.offsets import READS, WRITES
from nc10d.backend.cpu.program import steps as do
from nc10d.backend.cpu.program.program import LINE, At, Step, Steps, line_up, moved, staging, user

AHEAD = 2
"""Windows that a rank reduces before fetching the first: peers need not keep step."""
SECOND = 16
"""Where a staging buffer has the record that exposes a second array."""
MOST_CHUNKS = 256
"""The most chunks of all ranks in all windows, so that programs for large arrays stay short."""


def _exposed_or_staged(
    shape: GroupShape, mine: At, direct: Steps, staged: Steps, *, access: int, writable: int = 0
) -> list[Step]:
    """Expose an array; run `direct` if all ranks' arrays can be read, else `staged`."""
    # `access` is the access that the kernel must give to a plain array, 0 for none. Peers may write
    # the first `writable` bytes.
    # A rank can expose a single range of plain memory for writing, to a single peer.
    assert shape.size == 2 or not (access and writable), (access, writable)
    exposed = do.expose(shape.rank, mine, access, writable=writable)
    return ways([do.enter(), exposed], direct, staged)


def ways(opening: Steps, direct: Steps, staged: Steps) -> list[Step]:
    """Run `opening`; then `direct` if no rank has set the flag, else `staged`."""
    first = [*direct, do.jump(1 + len(staged))]
    steps = [do.free(), *opening, do.signal(1), do.branch_if_flagged(len(first))]
    return [*steps, *first, do.end_round(1, 2), *staged]


def _cut(shape: GroupShape, nbytes: int, rank: int, how: Reduction) -> tuple[int, int]:
    """Return the offset of a rank's chunk, and the chunk's bytes."""
    chunk = how.up(-(-nbytes // shape.size))
    low = min(nbytes, rank * chunk)
    return low, min(nbytes, low + chunk) - low


def fold_peers(
    shape: GroupShape,
    dst: At,
    own: At,
    offset: int,
    nbytes: int,
    reduction: Reduction,
    writable: int = 0,
) -> Step:
    """Return the step that reduces a host's exposed arrays."""
    # Peers read only the first line of this rank's staging buffer, so the rest is spare memory.
    room, most = staging(shape.rank, LINE), reduction.down((shape.slot_bytes - LINE) // 2)
    return do.fold_exposed(dst, own, offset, nbytes, reduction.how, room, most, writable)


def all_reduce(shape: GroupShape, nbytes: int, reduction: Reduction, staged: Steps) -> list[Step]:
    """Each rank reduces its chunk of user array 0 and writes the result into the exposed arrays."""
    # A rank that could not expose its array for writing fetches the others' chunks. The rank does
    # so window by window, AHEAD windows late, when a chunk has left its owner's private cache.
    writable = nbytes // shape.page * shape.page
    most = max(1, MOST_CHUNKS // shape.size)
    windows = windows_of(nbytes, shape.window, most, reduction.up)
    ready = range(2, 2 + len(windows))  # ticks: this rank's chunk is reduced
    fetches = [
        _fetches(shape, *window, tick, reduction)
        for window, tick in zip(windows, ready, strict=True)
    ]
    steps: list[Step] = []
    for number, (base, count) in enumerate(windows):
        low, length = _cut(shape, count, shape.rank, reduction)
        mine = user(0, base + low)
        if length:
            steps.append(fold_peers(shape, mine, mine, base + low, length, reduction, writable))
        steps.append(do.signal(ready[number]))
        if number >= AHEAD:
            steps += fetches[number - AHEAD]
    for behind in fetches[-AHEAD:]:
        steps += behind
    done = ready.stop
    steps += [do.signal(done), do.wait_all(done), do.withdraw(), do.end_round(done, done)]
    # With more than two ranks several peers would write into an array, but an area describes a
    # single range. This line ensures that; nc10d_allows_writes does not check.
    access = access_for(shape, nbytes, writes=True) if shape.size == 2 else 0
    return _exposed_or_staged(shape, user(0), steps, staged, access=access, writable=writable)


def access_for(shape: GroupShape, nbytes: int, *, writes: bool = False) -> int:
    """Return the least access by which the kernel beats the staging buffers, 0 if none does."""
    # `writes`: the algorithm's ranks also write into each other's arrays.
    if nbytes >= shape.thresholds.read_from:
        return READS
    return WRITES if writes and nbytes >= shape.thresholds.write_from else 0


def _access_for_copies(shape: GroupShape, nbytes: int) -> int:
    # Several ranks read one array at once. Where the kernel never writes faster than the staging
    # buffers (write_from is NEVER), such an array is not read faster either.
    limits = shape.thresholds
    return READS if nbytes >= max(limits.read_from, limits.write_from) else 0


def windows_of(
    nbytes: int, least: int, most: int, up: Callable[[int], int] = line_up
) -> list[tuple[int, int]]:
    """Cut an array into up to `most` windows (offset, bytes), equal except for the last.

    `up` rounds up to a place where the array may be cut.
    """
    each = up(max(least, -(-nbytes // most)))
    return [(base, min(each, nbytes - base)) for base in range(0, nbytes, each)]


def _fetches(shape: GroupShape, base: int, count: int, tick: int, how: Reduction) -> list[Step]:
    """Return the steps that fetch the peers' chunks, each when the owner has signalled `tick`."""
    steps = []
    for peer in shape.peers:
        low, length = _cut(shape, count, peer, how)
        if length:
            steps += [do.wait(peer, tick), do.fetch(user(0, base + low), peer, base + low, length)]
    return steps


def reduce_scatter(
    shape: GroupShape, nbytes: int, out: At, inps: Sequence[At], reduction: Reduction, staged: Steps
) -> list[Step]:
    """out := this rank's chunk (`nbytes`) of the reduction over all ranks' `inps`."""
    # A rank that has its chunks in several arrays cannot expose them as a single array, and sets
    # the flag.
    mine = inps[shape.rank]
    steps = [
        fold_peers(shape, out, mine, shape.rank * nbytes, nbytes, reduction),
        *all_have_read(2),
    ]
    if len({at.index for at in inps}) > 1:
        return ways([do.enter(flag=True)], steps, staged)
    access = access_for(shape, nbytes * shape.size)
    return _exposed_or_staged(shape, inps[0], steps, staged, access=access)


def all_gather(
    shape: GroupShape, sizes: Sequence[int], mine: At, outs: Sequence[At], staged: Steps
) -> list[Step]:
    """outs[r] := rank r's array `mine` of sizes[r] bytes."""
    me = shape.rank
    steps = [do.copy(outs[me], mine, sizes[me])] if sizes[me] else []
    if shape.size == 2:
        theirs, much = outs[1 - me], (sizes[me], sizes[1 - me])
        return _swap(shape, mine, much, theirs, steps, staged)
    steps += [do.fetch(outs[p], p, 0, sizes[p]) for p in shape.peers if sizes[p]]
    access = _access_for_copies(shape, sum(sizes))
    return _exposed_or_staged(shape, mine, [*steps, *all_have_read(2)], staged, access=access)


def all_to_all(
    shape: GroupShape, nbytes: int, inp: At, recvs: Sequence[At], staged: Steps
) -> list[Step]:
    """recvs[r] := this rank's chunk of `nbytes` of rank r's `inp`."""
    me = shape.rank
    chunks = [moved(inp, rank * nbytes) for rank in range(shape.size)]
    steps = [do.copy(recvs[me], chunks[me], nbytes)]
    if shape.size == 2:
        return _swap(shape, chunks[1 - me], (nbytes, nbytes), recvs[1 - me], steps, staged)
    steps += [do.fetch(recvs[p], p, me * nbytes, nbytes) for p in shape.peers]
    access = access_for(shape, nbytes * shape.size)
    return _exposed_or_staged(shape, inp, [*steps, *all_have_read(2)], staged, access=access)


def _swap(
    shape: GroupShape, mine: At, sizes: tuple[int, int], theirs: At, own: Steps, staged: Steps
) -> list[Step]:
    """Write `mine` into the peer's `theirs` (`sizes` bytes), run `own`, and fetch the rest."""
    me, peer = shape.rank, 1 - shape.rank
    given, writable = (size // shape.page * shape.page for size in sizes)
    access = access_for(shape, sum(sizes), writes=True)
    # From READS on the arrays are in no cache, and reading is at least as fast as writing.
    writing = access if access == WRITES else 0
    opening = [
        do.enter(),
        do.expose(me, mine, access),
        do.expose(me, theirs, writing, flag=False, writable=writable, offset=SECOND),
    ]
    steps = [do.fill_exposed(mine, given, SECOND), *own, do.fetch(theirs, peer, 0, sizes[1])]
    steps += [do.signal(2), do.wait(peer, 2), do.withdraw(), do.end_round(2, 2)]
    return ways(opening, steps, staged)


def broadcast(shape: GroupShape, nbytes: int, root: int, staged: Steps) -> list[Step]:
    """User array 0 := the root's."""
    # The ranks share the copying: each exposes the first 1/`size` of its array for writing. The
    # root writes that part into all arrays, and each rank fetches the rest.
    writable = nbytes // shape.size // shape.page * shape.page
    if shape.rank == root:
        steps = [do.fill_exposed(user(0), writable), *all_have_read(2)]
        access = _access_for_copies(shape, nbytes)
        writing = shape.thresholds.write_from // BROADCAST_SHARE if shape.size == 2 else NEVER
        if not access and nbytes >= writing:
            access = WRITES
        return _exposed_or_staged(shape, user(0), steps, staged, access=access)
    exposed = do.expose(shape.rank, user(0), WRITES, flag=False, writable=writable)
    steps = [
        do.fetch(user(0), root, 0, nbytes),
        do.signal(2),
        do.wait(root, 2),
        do.withdraw(),
        do.end_round(2, 2),
    ]
    return ways([do.enter(), exposed], steps, staged)


def all_have_read(tick: int) -> list[Step]:
    """Return the steps that signal `tick`, and leave after all peers' same signal."""
    return [do.signal(tick), do.wait_all(tick), do.end_round(tick, tick)]
