"""Arrays that peers read where they lie: no copy on a board, and in large pieces.

A rank exposes an array by two words on its board: where it is, and how to get there. Registered
memory lies in its arena, which every mate has mapped. Other memory the kernel copies from process
to process (process_vm_readv, "CMA"); between ranks that are threads it can be read as it is.

An array can also be lent: then peers write results there as well. C_LENT tells of what until all
have; if it comes to nothing, what is lent has to be taken back before the caller has the array
again, because a peer that is only late may still write: see Arena.take_back, and reading.take_back
for private memory, into which the kernel copies (process_vm_writev). That reads where to and how
much from the owner's area as it begins, so that the owner can forbid it.
"""

from __future__ import annotations

from numba import njit

from nc10d.backend.cpu.native import offsets as at
from nc10d.backend.cpu.native import step_format as packed
from nc10d.backend.cpu.native.atomics import (
    call_kernel,
    load,
    load_acquire,
    nc10d_read_process,
    nc10d_write_process,
    store,
)
from nc10d.backend.cpu.native.step_format import nc10d_block, nc10d_copy, nc10d_place

# How to get to exposed memory.
NOT_AT_ALL, BY_ARENA, BY_KERNEL, LENT, LENT_BY_KERNEL = 0, 1, 2, 3, 4
PAGE = 4096
AT_A_TIME = 128 * 1024
"""Bytes that the kernel writes at a time at most: while it does, they can't be taken back."""
NEVER = 1 << 62


@njit(nogil=True)
def nc10d_writable(channel: int) -> bool:
    """Say whether my private memory can be lent: to mates that are all other processes.

    Only one of them may write: an area has words for one loan.
    """
    reach, me = load(channel + at.C_REACH), load(channel + at.C_RANK)
    if load(reach + at.R_ACCESS) != at.WRITES:
        return False
    for rank in range(load(channel + at.C_SIZE)):
        if rank != me and load(reach + at.R_ARENAS + at.R_ROW * rank + 8) == 0:
            return False
    return True


@njit(nogil=True)
def nc10d_recall(channel: int) -> None:
    """What I have lent is mine again: nobody writes there any more."""
    store(channel + at.C_LENT_BYTES, 0)
    store(load(channel + at.C_AREA) + at.AREA_LOAN_BYTES, 0)


@njit(nogil=True)
def nc10d_expose(channel: int, users: int, step: int, parity: int, segment: int) -> None:
    """Tell peers where an array is; if they could not read it, ask for the other way.

    Within a page the kernel writes, too: there goes what is registered but can only be lent so.
    """
    reach, lent, read = (
        load(channel + at.C_REACH),
        load(step + packed.NBYTES),
        load(step + packed.TICK) != 0,
    )
    address = nc10d_place(channel, users, step + packed.SRC, parity, segment)
    board = nc10d_place(channel, users, step + packed.DST, parity, segment)
    inside = address - load(reach + at.R_ARENAS + at.R_ROW * load(channel + at.C_RANK))
    how = NOT_AT_ALL
    registered = load(load(channel + at.C_PROCESS) + at.P_FLOOR) <= inside < load(reach + at.R_SPAN)
    if registered and (read or inside % PAGE == 0):
        store(board, inside)
        how = BY_ARENA
        if lent != 0 and inside % PAGE == 0:
            store(channel + at.C_LENT, inside)
            store(channel + at.C_LENT_BYTES, lent)
            how = LENT
    elif load(reach + at.R_ACCESS) >= load(step + packed.ARG) > 0:
        store(board, address)
        how = BY_KERNEL
        if lent != 0 and nc10d_writable(channel):
            store(channel + at.C_LENT, -1)
            store(channel + at.C_LENT_BYTES, lent)
            # Equal pieces: the kernel looks for all pages of one, before it writes to some.
            pieces = (lent + AT_A_TIME - 1) // AT_A_TIME
            pages = (lent // PAGE + pieces - 1) // pieces
            store(load(channel + at.C_AREA) + at.AREA_LOAN_BYTES, pages * PAGE)
            how = LENT_BY_KERNEL
    elif read:
        slot = (
            load(channel + at.C_SELF)
            + at.LINE_SLOTS
            + at.SLOT_BYTES * (load(channel + at.C_ROUND) & 1)
        )
        store(slot, load(slot) | (1 << at.FLAG_BIT))
    store(board + 8, how)


@njit(nogil=True)
def nc10d_reach(channel: int, peer: int, board: int, offset: int, spare: int, nbytes: int) -> int:
    """Return where some bytes of a peer's exposed array can be read: as they lie, or in `spare`.

    0 if they can't be: the peer has died, or the kernel does not let me.
    """
    row = load(channel + at.C_REACH) + at.R_ARENAS + at.R_ROW * peer
    place = load(board) + offset
    if load(board + 8) in (BY_ARENA, LENT):
        return load(row) + place
    pid = load(row + 8)
    if pid == 0:  # another thread of this process
        return place
    if nc10d_read_process(pid, spare, place, nbytes) != at.DONE:
        store(channel + at.C_BLOCKED_ON, peer)
        return 0
    return spare


@njit(nogil=True)
def nc10d_hold(channel: int, step: int, segment: int, peer: int) -> int:
    """DONE if what has been read of a peer was still its operation's; else wait for the failure.

    A peer that has given up (or closed the group) may have handed the memory to somebody else.
    """
    area = load(load(channel + at.C_REACH) + at.R_ARENAS + at.R_ROW * peer + 16)
    # A peer leaves once its own word is set; mine may be set later.
    failed = load_acquire(area + at.AREA_ABORT) != 0
    if not failed and load_acquire(area + at.AREA_STATE) != at.CLOSED:
        return at.DONE
    flag = load(load(channel + at.C_FLAGS) + 8 * peer)
    return nc10d_block(channel, step, segment, flag, NEVER, peer)


@njit(nogil=True)
def nc10d_kept_off(channel: int, step: int, segment: int, boards: int, slot: int, peer: int) -> int:
    """UNREADABLE if the kernel keeps me off a peer's memory; if the peer does, wait for why."""
    area = load(load(channel + at.C_REACH) + at.R_ARENAS + at.R_ROW * peer + 16)
    lent = load(load(boards + 8 * peer) + slot + 8) == LENT_BY_KERNEL
    if lent and load_acquire(area + at.AREA_LOAN_BYTES) == 0:
        flag = load(load(channel + at.C_FLAGS) + 8 * peer)
        return nc10d_block(channel, step, segment, flag, NEVER, peer)
    held = nc10d_hold(channel, step, segment, peer)
    return at.UNREADABLE if held == at.DONE else held


@njit(nogil=True)
def nc10d_fetch(channel: int, users: int, step: int, parity: int, segment: int) -> int:
    """Copy from a peer's exposed array, but for what I have lent."""
    offset, nbytes = load(step + packed.ARG), load(step + packed.NBYTES)
    there = min(nbytes, max(0, load(channel + at.C_LENT_BYTES) - offset))
    if there == nbytes:
        return at.DONE
    offset, nbytes = offset + there, nbytes - there
    dst = nc10d_place(channel, users, step + packed.DST, parity, segment) + there
    board = nc10d_place(channel, users, step + packed.SRC, parity, segment)
    found = nc10d_reach(channel, load(step + packed.EXTRA), board, offset, dst, nbytes)
    if found == 0:  # what a peer that has left had exposed may be gone
        held = nc10d_hold(channel, step, segment, load(step + packed.EXTRA))
        return at.UNREADABLE if held == at.DONE else held
    if found != dst:
        nc10d_copy(load(step + packed.KERNEL), dst, found, nbytes)
    return nc10d_hold(channel, step, segment, load(step + packed.EXTRA))


@njit(nogil=True)
def nc10d_give(
    channel: int, boards: int, slot: int, src: int, offset: int, nbytes: int, copy: int
) -> int:
    """Put bytes into every array that is lent to me, as the boards show at `slot`.

    `offset` is where in those arrays. Returns who did not let me, or -1. See nc10d_copy for `copy`.
    """
    rows = load(channel + at.C_REACH) + at.R_ARENAS
    for rank in range(load(channel + at.C_SIZE)):
        board, row = load(boards + 8 * rank) + slot, rows + at.R_ROW * rank
        if rank == load(channel + at.C_RANK):
            continue
        how, dst = load(board + 8), load(board) + offset
        if how == LENT:
            nc10d_copy(copy, load(row) + dst, src, nbytes)
        elif how == LENT_BY_KERNEL and not nc10d_give_by_kernel(row, dst, src, nbytes):
            store(channel + at.C_BLOCKED_ON, rank)
            return rank
    return -1


@njit(nogil=True)
def nc10d_fill(channel: int, users: int, step: int, parity: int, segment: int) -> int:
    """Put bytes of mine into every array that a peer has lent."""
    own = nc10d_place(channel, users, step + packed.OWN, parity, segment)
    boards, slot = channel - load(step + packed.SRC) + parity, load(step + packed.SRC + 8)
    copy = load(step + packed.KERNEL)
    away = nc10d_give(channel, boards, slot, own, 0, load(step + packed.NBYTES), copy)
    return at.DONE if away < 0 else nc10d_kept_off(channel, step, segment, boards, slot, away)


@njit(nogil=True)
def nc10d_give_by_kernel(row: int, dst: int, src: int, nbytes: int) -> bool:
    """Have the kernel put bytes into a peer's private memory; False if that may not be."""
    pid, area = load(row + 8), load(row + 16)
    done = 0
    while done < nbytes:
        store(area + at.AREA_LOAN, dst + done)
        most = min(nbytes - done, AT_A_TIME)
        went = nc10d_write_process(
            pid, src + done, most, area + at.AREA_LOAN, area + at.AREA_WRITER
        )
        if went == 0:
            return False
        done += went
    return True


@njit(nogil=True)
def nc10d_asked(channel: int, boards: int) -> bool:
    """Say whether the kernel has to be asked for what a rank exposes."""
    rows = load(channel + at.C_REACH) + at.R_ARENAS
    for rank in range(load(channel + at.C_SIZE)):
        by_kernel = load(load(boards + 8 * rank) + 8) in (BY_KERNEL, LENT_BY_KERNEL)
        if by_kernel and load(rows + at.R_ROW * rank + 8) != 0:
            return True
    return False


@njit(nogil=True)
def nc10d_fold_some(
    channel: int, step: int, boards: int, dst: int, own: int, room: int, offset: int, count: int
) -> int:
    """dst = everyone's `count` bytes from `offset` on, folded; return who can't be read, or -1."""
    size, me = load(channel + at.C_SIZE), load(channel + at.C_RANK)
    kernel, last = load(step + packed.KERNEL), load(step + packed.LAST)
    # If dst is not my own part, what is folded so far goes there, and what is brought first.
    free = dst + count <= own or own + count <= dst
    so_far = dst if free else room
    folded = 0
    for rank in range(size):
        part = own
        if rank != me:
            first = rank == 0 or (rank == 1 and me == 0 and free)
            brought = so_far if first else room + load(step + packed.EXTRA)
            part = nc10d_reach(channel, rank, load(boards + 8 * rank), offset, brought, count)
            if part == 0:
                return rank
        if rank == 0:
            folded = part
            continue
        # My own part is read at my turn: the result goes to its place with the last one.
        target = dst if rank == size - 1 else so_far
        call_kernel(kernel, target, folded, part, count)
        folded = target
    if last != 0:
        call_kernel(last, dst, dst, load(step + packed.ARG), count)
    return -1


@njit(nogil=True)
def nc10d_fold_both(
    channel: int, step: int, boards: int, own: int, offset: int, nbytes: int
) -> int:
    """Fold what a single peer has lent into both arrays, in one pass; return how many bytes."""
    both, me = load(step + packed.BOTH), load(channel + at.C_RANK)
    board = load(boards + 8 * (1 - me)) if both != 0 else 0
    if both == 0 or load(board + 8) != LENT:
        return 0
    count = max(0, min(nbytes, load(step + packed.TICK) - offset))
    rows = load(channel + at.C_REACH) + at.R_ARENAS
    theirs = load(rows + at.R_ROW * (1 - me)) + load(board) + offset
    first, second = (own, theirs) if me == 0 else (theirs, own)
    call_kernel(both, first, second, 0, count)
    return count


@njit(nogil=True)
def nc10d_fold_exposed(channel: int, users: int, step: int, parity: int, segment: int) -> int:
    """dst = everyone's exposed bytes, folded in rank order.

    On my board there is room for what is folded so far (if dst is my own part), and for what the
    kernel brings.
    """
    dst = nc10d_place(channel, users, step + packed.DST, parity, segment)
    own = nc10d_place(channel, users, step + packed.OWN, parity, segment)
    room = nc10d_place(channel, users, step + packed.ALSO, parity, segment)
    boards = channel - load(step + packed.SRC) + parity
    offset, nbytes, most = (
        load(step + packed.TOTAL),
        load(step + packed.NBYTES),
        load(step + packed.EXTRA),
    )
    done = nc10d_fold_both(channel, step, boards, own, offset, nbytes)
    if not nc10d_asked(channel, boards):
        most = min(at.FOLD_BLOCK, most)
    while done < nbytes:
        count = min(most, nbytes - done)
        low = offset + done
        away = nc10d_fold_some(channel, step, boards, dst + done, own + done, room, low, count)
        lent = min(count, load(step + packed.TICK) - low)
        if away < 0 < lent:
            # What is lent begins a page, as registered arrays do: the C library is quick there.
            away = nc10d_give(channel, boards, 0, dst + done, low, lent, 0)
        if away >= 0:
            return nc10d_kept_off(channel, step, segment, boards, 0, away)
        done += count
    for rank in range(load(channel + at.C_SIZE)):
        if (
            rank != load(channel + at.C_RANK)
            and nc10d_hold(channel, step, segment, rank) != at.DONE
        ):
            return at.BLOCKED
    return at.DONE
