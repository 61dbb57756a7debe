"""Steps that cross to other hosts: transfers, and what is compared of what came.

A `FLOW` step drives the rows behind it (GIVE to a link, TAKE from one) all at once, as far as
their sockets go; it is done when all of them are, so no order of ranks can deadlock on full
sockets. Only a PUSH need not be: it goes as far as it can, and a later row goes on with it. A
link does what programs ask for in their order: it is the FIFO and the flow control.
"""

from __future__ import annotations

from numba import njit

from nc10d.backend.cpu.native.atomics import load, load_acquire, move, store
from nc10d.backend.cpu.native.layout import (
    BLOCKED,
    C_AWAITED,
    C_BLOCKED_AT,
    C_BLOCKED_FOR,
    C_BLOCKED_ON,
    C_DESCRIPTOR,
    C_MESSAGE_BYTES,
    C_OPS,
    C_STREAMS,
    D_TAG,
    DONE,
    HEADER_BYTES,
    L_RANK,
    L_SENT,
    L_TAKEN,
    LINK_HEADER_BYTES,
    LOST,
    MISMATCH,
    S_COUNT,
    S_ERROR,
    S_LINE,
    S_LINKS,
    S_MOVED,
    S_SEEN,
    SIZES,
    WANT_IN,
    WANT_OUT,
)
from nc10d.backend.cpu.native.operands import (
    DST,
    EXTRA,
    KERNEL,
    NBYTES,
    OWN,
    SRC,
    STEP,
    TICK,
    nc10d_block,
    nc10d_length,
    nc10d_place,
)
from nc10d.backend.cpu.native.sockets import nc10d_await_link, nc10d_transfer

FLOW, GIVE, TAKE, HEAD, SHOW, CHECK, EXPECT, PUSH = 40, 41, 42, 43, 44, 45, 46, 47


@njit(nogil=True)
def nc10d_stream(channel: int, users: int, step: int, parity: int, segment: int) -> int:
    """Carry out a step of this module: DONE, BLOCKED or a failure."""
    kind = load(step)
    if kind == FLOW:
        return nc10d_flow(channel, users, step, parity, segment)
    if kind == SHOW:
        header = nc10d_place(channel, users, step + DST, parity, segment)
        store(header, load(channel + C_OPS))
        store(header + 8, load(step + EXTRA))
        move(header + 16, load(step + KERNEL), HEADER_BYTES - 16)
        return DONE
    src = nc10d_place(channel, users, step + SRC, parity, segment)
    if kind == CHECK:
        return nc10d_check(channel, step, src)
    own = nc10d_place(channel, users, step + OWN, parity, segment)
    for i in range(load(step + NBYTES) >> 3):
        if load(src + 8 * i) != load(own + 8 * i):
            store(channel + C_BLOCKED_ON, ~load(step + EXTRA))
            store(channel + C_MESSAGE_BYTES, load(src + 8 * i))
            store(channel + C_AWAITED, load(own + 8 * i))
            return SIZES
    return DONE


@njit(nogil=True)
def nc10d_check(channel: int, step: int, header: int) -> int:
    """Compare what a rank of another host calls with what this one does."""
    same = load(header) == load(channel + C_OPS) and load(header + 8) == load(step + EXTRA)
    if same:
        return DONE
    move(load(channel + C_STREAMS) + S_SEEN, header, HEADER_BYTES)
    store(channel + C_BLOCKED_ON, ~load(step + TICK))
    return MISMATCH


@njit(nogil=True)
def nc10d_flow(channel: int, users: int, step: int, parity: int, segment: int) -> int:
    """Drive all rows behind `step` as far as their sockets go."""
    streams = load(channel + C_STREAMS)
    links = load(streams + S_LINKS)
    last = step + STEP * load(step + EXTRA)
    while True:
        # Read before looking: whatever gets ready after the look counts it up.
        target = load_acquire(load(streams + S_LINE)) + 1
        store(streams + S_COUNT, 0)
        moved, left, peer = 0, 0, 0
        row = step
        while row < last:
            row += STEP
            link = load(links + 8 * load(row + EXTRA))
            answer = nc10d_row(channel, users, row, parity, segment, link)
            if answer < 0:
                return answer
            moved += answer
            if nc10d_left(row, segment, link) > 0:
                if load(row) != PUSH:
                    left += 1
                    peer = load(link + L_RANK)
                want = WANT_IN if load(row) == TAKE else WANT_OUT
                nc10d_await_link(streams, link, want)
        if left == 0:
            nc10d_rewind(links, step, last)
            return DONE
        if moved == 0:
            return nc10d_block(channel, step, segment, load(streams + S_LINE), target, ~peer)
        store(streams + S_MOVED, load(streams + S_MOVED) + 1)


@njit(nogil=True)
def nc10d_left(row: int, segment: int, link: int) -> int:
    """Return the bytes that a row has not moved yet."""
    progress = L_TAKEN if load(row) == TAKE else L_SENT
    return nc10d_length(row, segment) - load(link + progress)


@njit(nogil=True)
def nc10d_row(channel: int, users: int, row: int, parity: int, segment: int, link: int) -> int:
    """Move one row on: how many bytes went, or LOST."""
    if nc10d_left(row, segment, link) == 0:
        return 0
    kind = load(row)
    if kind == HEAD:
        address = load(channel + C_DESCRIPTOR) + D_TAG
    else:
        address = nc10d_place(channel, users, row + (DST if kind == TAKE else SRC), parity, segment)
    progress = L_TAKEN if kind == TAKE else L_SENT
    moved = nc10d_transfer(link, progress, address, nc10d_length(row, segment))
    return moved if moved >= 0 else nc10d_lost(channel, link, moved)


@njit(nogil=True)
def nc10d_lost(channel: int, link: int, answer: int) -> int:
    """Note which link has failed, and how."""
    store(load(channel + C_STREAMS) + S_ERROR, -1 - answer)
    store(channel + C_BLOCKED_ON, ~load(link + L_RANK))
    return LOST


@njit(nogil=True)
def nc10d_rewind(links: int, step: int, last: int) -> None:
    """Make the links of a FLOW ready for the next one."""
    row = step
    while row < last:
        row += STEP
        if load(row) == PUSH:
            continue
        link = load(links + 8 * load(row + EXTRA))
        store(link + (L_TAKEN if load(row) == TAKE else L_SENT), 0)


@njit(nogil=True)
def nc10d_pull_header(channel: int, header: int) -> int:
    """Read the header of a link's next message: DONE, BLOCKED or LOST.

    Once it is here, the link is ready for what follows.
    """
    streams = load(channel + C_STREAMS)
    link = load(load(streams + S_LINKS))
    line = load(streams + S_LINE)
    while load(link + L_TAKEN) < LINK_HEADER_BYTES:
        target = load_acquire(line) + 1
        moved = nc10d_transfer(link, L_TAKEN, header, LINK_HEADER_BYTES)
        if moved < 0:
            return nc10d_lost(channel, link, moved)
        if moved == 0:
            store(streams + S_COUNT, 0)
            nc10d_await_link(streams, link, WANT_IN)
            store(channel + C_BLOCKED_AT, line)
            store(channel + C_BLOCKED_FOR, target)
            store(channel + C_BLOCKED_ON, ~load(link + L_RANK))
            return BLOCKED
    store(link + L_TAKEN, 0)
    return DONE
