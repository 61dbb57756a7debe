"""Steps that access peers' arrays directly: no copy over a staging buffer, and in large pieces.

A rank exposes an array by a two-word record in its staging buffer: an address, and a way to get
there.

    way (word 2)        word 1                       a peer
    NOT_AT_ALL          -                            can't access the array
    BY_ARENA            offset in the owner's arena  reads it in its mapping of the arena
    BY_KERNEL           address in the owner         has the kernel copy it (process_vm_readv,
                                                     "CMA"), or reads it if both are threads
    WRITABLE            as BY_ARENA                  reads it and may write results there
    WRITABLE_BY_KERNEL  as BY_KERNEL                 as BY_KERNEL, and by process_vm_writev

Invariant: peers write to exposed memory only between two ticks: the owner's tick that publishes the
memory, and the peers' ticks that say they are done. C_WRITABLE and C_WRITABLE_BYTES hold the range
meanwhile. If the operation fails in between, a peer that is only late may still write. So the owner
withdraws the memory before the caller gets the array back: by Arena.make_private, or for private
memory by `withdraw` in memory/peer_access.py. Each write by the kernel begins by reading place and
length from the owner's area, so a length of 0 there forbids the write.
"""

from __future__ import annotations

from numba import njit

from nc10d.backend.cpu.native import atomics
from nc10d.backend.cpu.native import offsets as at
from nc10d.backend.cpu.native import step_format as packed
from nc10d.backend.cpu.native.atomics import load, load_acquire, store
from nc10d.backend.cpu.native.interpreter import nc10d_inline_slot
from nc10d.backend.cpu.native.step_format import nc10d_block_on, nc10d_copy, nc10d_operand

# The ways to exposed memory.
NOT_AT_ALL, BY_ARENA, BY_KERNEL, WRITABLE, WRITABLE_BY_KERNEL = 0, 1, 2, 3, 4
AT_A_TIME = 128 * 1024
"""Most bytes that the kernel writes at a time; memory can't be withdrawn during a write."""
NEVER = 1 << 62


@njit(nogil=True)
def nc10d_reach_row(channel: int, rank: int) -> int:
    """Return the address of a rank's row: the arena as mapped here, the pid, the area."""
    return load(channel + at.C_REACH) + at.R_ARENAS + at.R_ROW * rank


@njit(nogil=True)
def nc10d_allows_writes(channel: int) -> bool:
    """Return whether peers may write this rank's private memory: all are other processes."""
    # The algorithm ensures that a single peer writes: an area has words for one range.
    if load(load(channel + at.C_REACH) + at.R_ACCESS) != at.WRITES:
        return False
    me = load(channel + at.C_RANK)
    for rank in range(load(channel + at.C_SIZE)):
        if rank != me and load(nc10d_reach_row(channel, rank) + 8) == 0:
            return False
    return True


@njit(nogil=True)
def nc10d_withdraw(channel: int) -> None:
    """End the time in which peers may write this rank's exposed array."""
    store(channel + at.C_WRITABLE_BYTES, 0)
    store(load(channel + at.C_AREA) + at.AREA_WRITABLE_BYTES, 0)


@njit(nogil=True)
def nc10d_expose(channel: int, users: int, step: int, parity: int, segment: int) -> None:
    """Expose an array to peers, or ask for the other branch if peers could not read the array."""
    # Peers write to the arena only from the start of a page on. A registered array that begins
    # inside a page goes by the kernel if the step sets no flag (a message, or an array for writes
    # only).
    reach, writable = load(channel + at.C_REACH), load(step + packed.WRITABLE)
    sets_flag = load(step + packed.FLAG) != 0
    address = nc10d_operand(channel, users, step + packed.SRC, parity, segment)
    record = nc10d_operand(channel, users, step + packed.DST, parity, segment)
    inside = address - load(nc10d_reach_row(channel, load(channel + at.C_RANK)))
    way = NOT_AT_ALL
    floor = load(load(channel + at.C_RANK_BLOCK) + at.P_FLOOR)
    registered = floor <= inside < load(reach + at.R_ARENA_BYTES)
    if registered and (sets_flag or inside % at.PAGE == 0):
        store(record, inside)
        way = BY_ARENA
        if writable != 0 and inside % at.PAGE == 0:
            store(channel + at.C_WRITABLE, inside)
            store(channel + at.C_WRITABLE_BYTES, writable)
            way = WRITABLE
    elif load(reach + at.R_ACCESS) >= load(step + packed.ACCESS) > 0:
        store(record, address)
        way = BY_KERNEL
        if writable != 0 and nc10d_allows_writes(channel):
            store(channel + at.C_WRITABLE, -1)
            store(channel + at.C_WRITABLE_BYTES, writable)
            # Equal pieces: the kernel looks up all of a piece's pages before writing to the first.
            pieces = (writable + AT_A_TIME - 1) // AT_A_TIME
            pages = (writable // at.PAGE + pieces - 1) // pieces
            store(load(channel + at.C_AREA) + at.AREA_WRITABLE_BYTES, pages * at.PAGE)
            way = WRITABLE_BY_KERNEL
    elif sets_flag:
        # In the fingerprint, before the signal: every rank sees the flag, so all take one branch.
        slot = load(channel + at.C_SELF) + nc10d_inline_slot(channel)
        store(slot, load(slot) | (1 << at.FLAG_BIT))
    # The signal that follows publishes both words.
    store(record + 8, way)


@njit(nogil=True)
def nc10d_has_given_up(area: int) -> bool:
    """Return whether an area's owner has failed or has closed the group."""
    # The owner gives up once the abort word in that area is set; this rank's word may follow.
    failed = load_acquire(area + at.AREA_ABORT) != 0
    return failed or load_acquire(area + at.AREA_STATE) == at.CLOSED


@njit(nogil=True)
def nc10d_bring(channel: int, peer: int, record: int, offset: int, buffer: int, nbytes: int) -> int:
    """Return where bytes of a peer's exposed array are: in place, or in `buffer`; 0: unreadable."""
    # Unreadable: the peer has died, or the kernel refuses.
    row = nc10d_reach_row(channel, peer)
    place = load(record) + offset
    if load(record + 8) in (BY_ARENA, WRITABLE):
        return load(row) + place
    pid = load(row + 8)
    if pid == 0:  # another thread in this process: a read of freed memory would crash
        if nc10d_has_given_up(load(row + 16)):
            store(channel + at.C_BLOCKED_ON, peer)
            return 0
        return place
    if atomics.nc10d_read_process(pid, buffer, place, nbytes) != at.DONE:
        store(channel + at.C_BLOCKED_ON, peer)
        return 0
    return buffer


@njit(nogil=True)
def nc10d_check_owner(channel: int, step: int, segment: int, peer: int) -> int:
    """Return DONE if bytes read from a peer belonged to its operation; else wait for a failure."""
    # A peer that has given up (or closed the group) may have reused the memory since.
    area = load(nc10d_reach_row(channel, peer) + 16)
    if not nc10d_has_given_up(area):
        return at.DONE
    # Blocks for ever on the peer's counter: the failure, which is on its way, ends the wait.
    counter = load(load(channel + at.C_COUNTERS) + 8 * peer)
    return nc10d_block_on(channel, step, segment, counter, NEVER, peer)


@njit(nogil=True)
def nc10d_refusal(channel: int, step: int, segment: int, record: int, peer: int) -> int:
    """Return UNREADABLE if the kernel refuses a peer's memory; BLOCKED if the peer has given up."""
    area = load(nc10d_reach_row(channel, peer) + 16)
    writable = load(record + 8) == WRITABLE_BY_KERNEL
    if writable and load_acquire(area + at.AREA_WRITABLE_BYTES) == 0:
        counter = load(load(channel + at.C_COUNTERS) + 8 * peer)
        return nc10d_block_on(channel, step, segment, counter, NEVER, peer)
    held = nc10d_check_owner(channel, step, segment, peer)
    return at.UNREADABLE if held == at.DONE else held


@njit(nogil=True)
def nc10d_fetch(channel: int, users: int, step: int, parity: int, segment: int) -> int:
    """Copy from a peer's exposed array, except the bytes that the peer has written here itself."""
    offset, nbytes = load(step + packed.OFFSET), load(step + packed.NBYTES)
    there = min(nbytes, max(0, load(channel + at.C_WRITABLE_BYTES) - offset))
    if there == nbytes:
        return at.DONE
    offset, nbytes = offset + there, nbytes - there
    dst = nc10d_operand(channel, users, step + packed.DST, parity, segment) + there
    record = nc10d_operand(channel, users, step + packed.SRC, parity, segment)
    found = nc10d_bring(channel, load(step + packed.PEER), record, offset, dst, nbytes)
    if found == 0:  # the exposed memory of a peer that has left may be gone
        held = nc10d_check_owner(channel, step, segment, load(step + packed.PEER))
        return at.UNREADABLE if held == at.DONE else held
    if found != dst:
        nc10d_copy(load(step + packed.COPIER), dst, found, nbytes)
    # Checked after the copy: a peer reuses an array only after setting the abort word.
    return nc10d_check_owner(channel, step, segment, load(step + packed.PEER))


@njit(nogil=True)
def nc10d_fill_peers(
    channel: int, staging: int, place: int, src: int, offset: int, nbytes: int, copy: int
) -> int:
    """Write bytes into every peer's array that is exposed for writes, at `offset` there.

    `staging` is the table of staging buffers, which have the records at `place`. Returns the rank
    whose memory could not be written, or -1. See nc10d_copy for `copy`.
    """
    for rank in range(load(channel + at.C_SIZE)):
        if rank == load(channel + at.C_RANK):
            continue
        record, row = load(staging + 8 * rank) + place, nc10d_reach_row(channel, rank)
        way, dst = load(record + 8), load(record) + offset
        if way == WRITABLE:
            nc10d_copy(copy, load(row) + dst, src, nbytes)
        elif way == WRITABLE_BY_KERNEL and not nc10d_fill_by_kernel(row, dst, src, nbytes):
            store(channel + at.C_BLOCKED_ON, rank)
            return rank
    return -1


@njit(nogil=True)
def nc10d_fill_exposed(channel: int, users: int, step: int, parity: int, segment: int) -> int:
    """Write this rank's bytes into every array that a peer has exposed for writes."""
    own = nc10d_operand(channel, users, step + packed.OWN, parity, segment)
    staging, place = channel - load(step + packed.SRC) + parity, load(step + packed.SRC + 8)
    nbytes, copy = load(step + packed.NBYTES), load(step + packed.COPIER)
    refused = nc10d_fill_peers(channel, staging, place, own, 0, nbytes, copy)
    if refused < 0:
        return at.DONE
    return nc10d_refusal(channel, step, segment, load(staging + 8 * refused) + place, refused)


@njit(nogil=True)
def nc10d_fill_by_kernel(row: int, dst: int, src: int, nbytes: int) -> bool:
    """Have the kernel write bytes into a peer's private memory; False if not allowed."""
    pid, area = load(row + 8), load(row + 16)
    done = 0
    while done < nbytes:
        # Only the place: the owner alone writes the length (0 withdraws the memory).
        store(area + at.AREA_WRITABLE, dst + done)
        most = min(nbytes - done, AT_A_TIME)
        place, writer = area + at.AREA_WRITABLE, area + at.AREA_WRITER
        went = atomics.nc10d_write_process(pid, src + done, most, place, writer)
        if went == 0:
            return False
        done += went
    return True


@njit(nogil=True)
def nc10d_any_by_kernel(channel: int, staging: int) -> bool:
    """Return whether any peer's exposed array needs the kernel."""
    for rank in range(load(channel + at.C_SIZE)):
        by_kernel = load(load(staging + 8 * rank) + 8) in (BY_KERNEL, WRITABLE_BY_KERNEL)
        if by_kernel and load(nc10d_reach_row(channel, rank) + 8) != 0:
            return True
    return False


@njit(nogil=True)
def nc10d_fold_some(
    channel: int, step: int, staging: int, dst: int, own: int, room: int, offset: int, count: int
) -> int:
    """dst = all ranks' bytes at `offset`, folded; return a rank that can't be read, or -1."""
    size, me = load(channel + at.C_SIZE), load(channel + at.C_RANK)
    kernel, last = load(step + packed.KERNEL), load(step + packed.LAST)
    # The partial result, and the first part that the kernel brings, go to dst unless it is `own`.
    free = dst + count <= own or own + count <= dst
    so_far = dst if free else room
    folded = 0
    for rank in range(size):
        part = own
        if rank != me:
            first = rank == 0 or (rank == 1 and me == 0 and free)
            brought = so_far if first else room + load(step + packed.MOST)
            part = nc10d_bring(channel, rank, load(staging + 8 * rank), offset, brought, count)
            if part == 0:
                return rank
        if rank == 0:
            folded = part
            continue
        # `own` is read at this rank's turn; only the last fold writes to dst, which may be `own`.
        target = dst if rank == size - 1 else so_far
        atomics.call_kernel(kernel, target, folded, part, count)
        folded = target
    if last != 0:
        atomics.call_kernel(last, dst, dst, load(step + packed.ARG), count)
    return -1


@njit(nogil=True)
def nc10d_fold_both(
    channel: int, step: int, staging: int, own: int, offset: int, nbytes: int
) -> int:
    """Fold this array and a single peer's in one pass, into both; return the bytes folded."""
    both, me = load(step + packed.BOTH), load(channel + at.C_RANK)
    record = load(staging + 8 * (1 - me)) if both != 0 else 0
    if both == 0 or load(record + 8) != WRITABLE:
        return 0
    count = max(0, min(nbytes, load(step + packed.WRITABLE) - offset))
    theirs = load(nc10d_reach_row(channel, 1 - me)) + load(record) + offset
    first, second = (own, theirs) if me == 0 else (theirs, own)
    atomics.call_kernel(both, first, first, second, count)
    return count


@njit(nogil=True)
def nc10d_fold_exposed(channel: int, users: int, step: int, parity: int, segment: int) -> int:
    """dst = all ranks' exposed bytes, folded in rank order."""
    # This rank's staging buffer has room for the partial result (if dst is `own`) and for the bytes
    # that the kernel brings.
    dst = nc10d_operand(channel, users, step + packed.DST, parity, segment)
    own = nc10d_operand(channel, users, step + packed.OWN, parity, segment)
    room = nc10d_operand(channel, users, step + packed.ALSO, parity, segment)
    staging = channel - load(step + packed.SRC) + parity
    offset, nbytes = load(step + packed.OFFSET), load(step + packed.NBYTES)
    most = load(step + packed.MOST)
    done = nc10d_fold_both(channel, step, staging, own, offset, nbytes)
    if not nc10d_any_by_kernel(channel, staging):
        most = min(load(step + packed.BLOCK), most)
    while done < nbytes:
        count = min(most, nbytes - done)
        low = offset + done
        refused = nc10d_fold_some(channel, step, staging, dst + done, own + done, room, low, count)
        writable = min(count, load(step + packed.WRITABLE) - low)
        if refused < 0 < writable:
            # Arrays exposed for writes begin a page: the C library is fast there.
            refused = nc10d_fill_peers(channel, staging, 0, dst + done, low, writable, 0)
        if refused >= 0:
            return nc10d_refusal(channel, step, segment, load(staging + 8 * refused), refused)
        done += count
    me = load(channel + at.C_RANK)
    for rank in range(load(channel + at.C_SIZE)):
        if rank != me and nc10d_check_owner(channel, step, segment, rank) != at.DONE:
            return at.BLOCKED
    return at.DONE
