"""The steps that most programs do without: compiled when a program that has one is linked.

The interpreter calls `advance_rare` for one such step, by an address that channels look up in RARE.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from nc10d.backend.cpu.native.atomics import load, load_acquire, move, store
from nc10d.backend.cpu.native.interpreter import nc10d_everyone, nc10d_post
from nc10d.backend.cpu.native.offsets import (
    C_AGREED,
    C_AWAITED,
    C_BLOCKED_ON,
    C_FLAGS,
    C_MESSAGE_BYTES,
    C_PARITY,
    C_PC,
    C_RANK,
    C_ROUND,
    C_SEGMENT,
    C_SELF,
    C_SEQ,
    C_SIZE,
    C_USERS,
    DONE,
    FLAG_BIT,
    LINE_SLOTS,
    MISMATCH,
    SIZES,
    SLOT_BYTES,
)
from nc10d.backend.cpu.native.peer_steps import (
    nc10d_expose,
    nc10d_fetch,
    nc10d_fill,
    nc10d_fold_exposed,
    nc10d_recall,
)
from nc10d.backend.cpu.native.step_format import (
    AGREE,
    ARG,
    DIVERT,
    DST,
    EXPOSE,
    EXTRA,
    FETCH,
    FILL,
    FOLD,
    GATE,
    JUMP,
    OPEN,
    OWN,
    PACK,
    PICK,
    RECALL,
    SRC,
    STEP,
    TICK,
    nc10d_block,
    nc10d_place,
)
from nc10d.kernels.cache import compiled_callback, compiling

RARE: npt.NDArray[np.int64] = np.zeros(1, np.int64)
"""The address of `advance_rare`, 0 while nobody needs it."""
_alive: list[Any] = []


@njit(nogil=True)
def nc10d_flagged(channel: int) -> int:
    """Return 1 if somebody's fingerprint has the flag, 0 if nobody's, or MISMATCH."""
    slot = LINE_SLOTS + SLOT_BYTES * (load(channel + C_ROUND) & 1)
    mine = load(load(channel + C_SELF) + slot)
    flags = load(channel + C_FLAGS)
    flagged = mine
    for peer in range(load(channel + C_SIZE)):
        theirs = load(load(flags + 8 * peer) + slot)
        if (theirs ^ mine) & ((1 << FLAG_BIT) - 1) != 0:
            store(channel + C_BLOCKED_ON, peer)
            return MISMATCH
        flagged |= theirs
    return flagged >> FLAG_BIT


@njit(nogil=True)
def nc10d_lines(flat: int, strided: int, shape: int, packing: bool) -> None:
    """Copy between contiguous and strided memory; see `pack` in program.py for `shape`."""
    item, dims = load(shape), load(shape + 8)
    sizes = shape + 16
    strides = sizes + 8 * dims
    place = strides + 8 * dims
    last = dims - 1
    length, step = load(sizes + 8 * last), load(strides + 8 * last)
    for d in range(dims):
        store(place + 8 * d, 0)
    while True:
        at = strided
        for _ in range(length):
            if packing:
                move(flat, at, item)
            else:
                move(at, flat, item)
            flat += item
            at += step
        # Go on like an odometer: the last line of a dimension steps the one before it.
        d = last - 1
        while d >= 0:
            strided += load(strides + 8 * d)
            turn = load(place + 8 * d) + 1
            store(place + 8 * d, turn)
            if turn < load(sizes + 8 * d):
                break
            strided -= turn * load(strides + 8 * d)
            store(place + 8 * d, 0)
            d -= 1
        if d < 0:
            return


@njit(nogil=True)
def nc10d_agree(channel: int, users: int, step: int, parity: int) -> int:
    """Compare announced sizes with those awaited; settle the number of rounds."""
    size = load(channel + C_SIZE)
    me = load(channel + C_RANK)
    table = channel - load(step + SRC) + parity
    expected = load(users + load(step + OWN))
    largest = 0
    for rank in range(size):
        shown = load(table + 8 * rank)
        if load(shown + 8 * me) != load(expected + 8 * rank):
            store(channel + C_BLOCKED_ON, rank)
            store(channel + C_MESSAGE_BYTES, load(shown + 8 * me))
            store(channel + C_AWAITED, load(expected + 8 * rank))
            return SIZES
        for peer in range(size):
            largest = max(largest, load(shown + 8 * peer))
    slot = load(step + ARG)
    store(channel + C_AGREED, max(1, (largest + slot - 1) // slot))
    return DONE


@njit(nogil=True)
def nc10d_divert(channel: int, step: int, segment: int) -> int:
    """Wait for everyone, compare fingerprints, and go the other way if somebody asks for it."""
    target = load(channel + C_SEQ) + load(step + TICK)
    answer = nc10d_everyone(channel, step, segment, target)
    if answer != DONE:
        return answer
    flagged = nc10d_flagged(channel)
    if flagged == MISMATCH:
        return MISMATCH
    if flagged == 1:
        nc10d_recall(channel)  # the other way, nobody writes there
        store(channel + C_PC, step + STEP * load(step + EXTRA))
    return DONE


@njit(nogil=True)
def nc10d_gate(channel: int, users: int, step: int, parity: int, segment: int) -> int:
    """Go on once a gate is open."""
    flag = nc10d_place(channel, users, step + DST, parity, segment)
    if load_acquire(flag) != 0:
        return DONE
    return nc10d_block(channel, step, segment, flag, 1, load(channel + C_RANK))


def _advance_rare(channel: int) -> int:
    """Carry out the step at C_PC: DONE, with C_PC just before the next one, or as `_advance`."""
    step = load(channel + C_PC)
    segment = load(channel + C_SEGMENT)
    users = load(channel + C_USERS)
    parity = load(channel + C_PARITY)
    kind = load(step)
    if kind == DIVERT:
        return nc10d_divert(channel, step, segment)
    if kind == FETCH:
        return nc10d_fetch(channel, users, step, parity, segment)
    if kind == FOLD:
        return nc10d_fold_exposed(channel, users, step, parity, segment)
    if kind == FILL:
        return nc10d_fill(channel, users, step, parity, segment)
    if kind == GATE:
        return nc10d_gate(channel, users, step, parity, segment)
    if kind == AGREE:
        return nc10d_agree(channel, users, step, parity)
    if kind == EXPOSE:
        nc10d_expose(channel, users, step, parity, segment)
    elif kind == JUMP:
        store(channel + C_PC, step + STEP * load(step + EXTRA))
    elif kind == PICK:
        if load(nc10d_place(channel, users, step + SRC, parity, segment) + 8) == 0:
            store(channel + C_PC, step + STEP * load(step + EXTRA))
    elif kind == RECALL:
        nc10d_recall(channel)
    elif kind == OPEN:
        nc10d_post(channel, nc10d_place(channel, users, step + DST, parity, segment), 1)
    else:
        dst = nc10d_place(channel, users, step + DST, parity, segment)
        src = nc10d_place(channel, users, step + SRC, parity, segment)
        shape = nc10d_place(channel, users, step + OWN, parity, segment)
        if kind == PACK:
            nc10d_lines(dst, src, shape, True)
        else:
            nc10d_lines(src, dst, shape, False)
    return DONE


def prepare() -> None:
    """Compile `advance_rare`, once; blocks for a second or two where it is not on disk yet."""
    with compiling:
        if not _alive:
            _alive.append(compiled_callback("int64(int64)")(_advance_rare))
            RARE[0] = _alive[0].address
