"""Steps that cross to other hosts: transfers, and what is compared of what came.

A `FLOW` step drives the rows behind it (GIVE to a link, TAKE from one) all at once, as far as
their sockets go; it is done when all of them are, so no order of ranks can deadlock on full
sockets. Only a PUSH need not be: it goes as far as it can, and a later row goes on with it. A
link does what programs ask for in their order: it is the FIFO and the flow control.
"""

from __future__ import annotations

from typing import Any

from numba import njit

from nc10d.backend.cpu.native.atomics import (
    load,
    load_acquire,
    move,
    nc10d_now,
    pause,
    store,
    store_release,
    yield_core,
)
from nc10d.backend.cpu.native.interpreter import nc10d_show_site
from nc10d.backend.cpu.native.offsets import (
    ABORTED,
    AREA_ABORT,
    AWAY_HEADER_BYTES,
    BLOCKED,
    C_AREA,
    C_AWAITED,
    C_BLOCKED_AT,
    C_BLOCKED_FOR,
    C_BLOCKED_ON,
    C_BROKEN,
    C_FLAGS,
    C_MESSAGE,
    C_MESSAGE_BYTES,
    C_OPS,
    C_PARITY,
    C_PC,
    C_ROUND,
    C_SEGMENT,
    C_SELF,
    C_SEQ,
    C_SPIN,
    C_STREAMS,
    C_USERS,
    C_YIELD,
    D_TAG,
    DONE,
    HEADER_BYTES,
    L_RANK,
    L_SENT,
    L_TAKEN,
    LINK_BOARD,
    LINK_HEADER_BYTES,
    LINK_SITES,
    LINK_TAG,
    LOST,
    MISMATCH,
    RECORD_SITE,
    RECORD_TEXT,
    S_ARM,
    S_COUNT,
    S_ERROR,
    S_LAST,
    S_LEFT,
    S_LINE,
    S_LINGER,
    S_LINKS,
    S_MOVED,
    S_PATIENCE,
    S_PULL,
    S_SEEN,
    S_SLEEP,
    S_STEP,
    S_TRIES,
    S_UNTIL,
    SITE_BYTES,
    SIZES,
    TEXT_BYTES,
    WANT_IN,
    WANT_OUT,
)
from nc10d.backend.cpu.native.sockets import (
    nc10d_await_link,
    nc10d_poll,
    nc10d_take,
    nc10d_transfer,
    nc10d_watch_all,
)
from nc10d.backend.cpu.native.step_format import (
    CHECK,
    DST,
    EXTRA,
    FLOW,
    HEAD,
    KERNEL,
    NBYTES,
    OWN,
    PUSH,
    SHOW,
    SRC,
    STEP,
    TAKE,
    TICK,
    TOTAL,
    nc10d_block,
    nc10d_length,
    nc10d_place,
)
from nc10d.kernels.cache import compiled_callback

# Sleeps on sockets are short: nothing but the socket ends them.
POLL_MS = 10
PAUSES = 8
SHORTEST_LINGER = 32  # some 20 µs, more than a round trip
MUCH = 1024 * 1024
"""Bytes: while more are to come, in this segment and those after it, one sleeps at once. Sockets'
buffers fill meanwhile, and whoever feeds them may need the core."""


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
        moved, left, coming, peer = 0, 0, 0, 0
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
                    coming = max(coming, nc10d_to_come(row, segment, link))
                    peer = load(link + L_RANK)
                want = WANT_IN if load(row) == TAKE else WANT_OUT
                nc10d_await_link(streams, link, want)
        if left == 0:
            nc10d_rewind(links, step, last)
            return DONE
        if moved == 0:
            store(streams + S_LEFT, coming)
            return nc10d_block(channel, step, segment, load(streams + S_LINE), target, ~peer)
        store(streams + S_MOVED, load(streams + S_MOVED) + 1)


@njit(nogil=True)
def nc10d_left(row: int, segment: int, link: int) -> int:
    """Return the bytes that a row has not moved yet."""
    progress = L_TAKEN if load(row) == TAKE else L_SENT
    return nc10d_length(row, segment) - load(link + progress)


@njit(nogil=True)
def nc10d_to_come(row: int, segment: int, link: int) -> int:
    """Return the bytes that a row has not moved yet, those of later segments included."""
    nbytes = load(row + NBYTES)
    later = max(load(row + TOTAL), nbytes) - segment * nbytes - nc10d_length(row, segment)
    return later + nc10d_left(row, segment, link)


@njit(nogil=True)
def nc10d_row(channel: int, users: int, row: int, parity: int, segment: int, link: int) -> int:
    """Move one row on: how many bytes went, or LOST."""
    if nc10d_left(row, segment, link) == 0:
        return 0
    kind = load(row)
    if kind == HEAD:
        address = load(channel + C_SELF) + LINK_BOARD
        if load(link + L_SENT) == 0:
            move(address, load(channel + C_MESSAGE) + D_TAG, LINK_HEADER_BYTES)
            nc10d_show_site(channel, address + LINK_HEADER_BYTES)
    else:
        address = nc10d_place(channel, users, row + (DST if kind == TAKE else SRC), parity, segment)
    nbytes = nc10d_length(row, segment)
    if kind == TAKE:
        moved = nc10d_take(load(channel + C_STREAMS), link, address, nbytes)
    else:
        moved = nc10d_transfer(link, L_SENT, address, nbytes)
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


@compiled_callback("int64(int64)")
def _step(channel: int) -> int:
    step, segment = load(channel + C_PC), load(channel + C_SEGMENT)
    users, parity = load(channel + C_USERS), load(channel + C_PARITY)
    kind = load(step)
    if kind == FLOW:
        return nc10d_flow(channel, users, step, parity, segment)
    if kind == SHOW:
        header = nc10d_place(channel, users, step + DST, parity, segment)
        store(header, load(channel + C_OPS))
        store(header + 8, load(step + EXTRA))
        move(header + RECORD_TEXT, load(step + KERNEL), TEXT_BYTES)
        nc10d_show_site(channel, header + RECORD_SITE)
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


@compiled_callback("int64(int64)")
def _pull(channel: int) -> int:
    sent = load(load(channel + C_FLAGS))
    header = sent + LINK_BOARD
    streams = load(channel + C_STREAMS)
    link = load(load(streams + S_LINKS))
    line = load(streams + S_LINE)
    while load(link + L_TAKEN) < AWAY_HEADER_BYTES:
        target = load_acquire(line) + 1
        moved = nc10d_transfer(link, L_TAKEN, header, AWAY_HEADER_BYTES)
        if moved < 0:
            return nc10d_lost(channel, link, moved)
        if moved == 0:
            store(streams + S_COUNT, 0)
            store(streams + S_LEFT, 0)
            nc10d_await_link(streams, link, WANT_IN)
            store(channel + C_BLOCKED_AT, line)
            store(channel + C_BLOCKED_FOR, target)
            store(channel + C_BLOCKED_ON, ~load(link + L_RANK))
            return BLOCKED
    store(link + L_TAKEN, 0)
    # As if its sender had put it here.
    half = load(channel + C_ROUND) & 1
    move(sent + LINK_TAG + LINK_HEADER_BYTES * half, header, LINK_HEADER_BYTES)
    move(sent + LINK_SITES + SITE_BYTES * half, header + LINK_HEADER_BYTES, SITE_BYTES)
    store_release(sent, load(channel + C_SEQ) + 1)
    return DONE


@compiled_callback("int64(int64)")
def _linger(channel: int) -> int:
    # Patience that was in vain halves; it doubles when something came while it lasted. Where ranks
    # share a core, looking again only keeps somebody else from running.
    streams = load(channel + C_STREAMS)
    if load(streams + S_LEFT) > MUCH:
        store(streams + S_TRIES, -1)  # what moves next has come while this thread slept
        return 0
    moved, patience = load(streams + S_MOVED), load(streams + S_PATIENCE)
    tries = load(streams + S_TRIES)
    if moved != load(streams + S_LAST):
        store(streams + S_LAST, moved)
        if tries >= 0:
            longest = load(channel + C_SPIN) + load(channel + C_YIELD)
            store(streams + S_PATIENCE, min(max(2 * patience, SHORTEST_LINGER), longest))
        tries = 0
    elif tries > patience:
        store(streams + S_TRIES, -1)
        store(streams + S_PATIENCE, max(patience >> 1, SHORTEST_LINGER))
        return 0
    store(streams + S_TRIES, max(tries, 0) + 1)
    # A look is a system call: a pause between two is soon too short to be worth keeping the core.
    if tries < PAUSES:
        pause()
    else:
        yield_core()
    return 1


@compiled_callback("int64(int64)")
def _sleep(channel: int) -> int:
    until = load(load(channel + C_STREAMS) + S_UNTIL)
    abort = load(channel + C_AREA) + AREA_ABORT
    while True:
        if load_acquire(abort) != 0 or load_acquire(channel + C_BROKEN) != 0:
            return ABORTED
        if nc10d_poll(channel, POLL_MS):
            return DONE
        if nc10d_now() >= until:
            return BLOCKED


@compiled_callback("int64(int64)")
def _arm(channel: int) -> int:
    nc10d_watch_all(channel)
    return DONE


FUNCTIONS: dict[int, Any] = {
    S_STEP: _step,
    S_PULL: _pull,
    S_LINGER: _linger,
    S_SLEEP: _sleep,
    S_ARM: _arm,
}
"""What the engine calls by address, so that who has no other hosts need not compile it.

Each takes a channel. `_step` carries out the step at C_PC: DONE, BLOCKED or a failure. `_pull`
takes the header of a link's next message: DONE, BLOCKED or LOST. `_linger` looks after the time
between two looks at sockets: 0 when it is time to sleep. `_sleep` does, until S_UNTIL: DONE,
ABORTED or BLOCKED. `_arm` has the net thread watch.
"""
