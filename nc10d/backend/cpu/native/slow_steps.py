"""Slow-path steps: those that most programs do without, compiled when a program first needs one.

The interpreter calls `_advance_slow_step` for one such step at C_PC, by the address in ADDRESS.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from nc10d.backend.cpu.native import offsets as at
from nc10d.backend.cpu.native import peer_array_steps
from nc10d.backend.cpu.native import step_format as packed
from nc10d.backend.cpu.native.atomics import load, load_acquire, move, store
from nc10d.backend.cpu.native.interpreter import nc10d_inline_slot, nc10d_publish, nc10d_wait_all
from nc10d.backend.cpu.native.step_format import nc10d_block_on, nc10d_operand, nc10d_report_sizes
from nc10d.backend.cpu.native.step_kinds import StepKind
from nc10d.kernels.cache import address_of, compiled_callback

ADDRESS: npt.NDArray[np.int64] = np.zeros(1, np.int64)
"""The address of `_advance_slow_step`, 0 until compiled."""
_made: dict[str, Any] = {}


@njit(nogil=True)
def nc10d_flagged(channel: int) -> int:
    """Return 1 if a rank's fingerprint has the flag, else 0; MISMATCH if they differ otherwise."""
    slot = nc10d_inline_slot(channel)
    mine = load(load(channel + at.C_SELF) + slot)
    counters = load(channel + at.C_COUNTERS)
    flagged = mine
    for peer in range(load(channel + at.C_SIZE)):
        theirs = load(load(counters + 8 * peer) + slot)
        if (theirs ^ mine) & ((1 << at.FLAG_BIT) - 1) != 0:
            store(channel + at.C_BLOCKED_ON, peer)
            return at.MISMATCH
        flagged |= theirs
    return flagged >> at.FLAG_BIT


@njit(nogil=True)
def nc10d_copy_lines(flat: int, strided: int, shape: int, packing: bool) -> None:
    """Copy between contiguous and strided memory; see `pack` in steps.py for `shape`."""
    item, dims = load(shape), load(shape + 8)
    sizes = shape + 16
    strides = sizes + 8 * dims
    place = strides + 8 * dims
    last = dims - 1
    length, step = load(sizes + 8 * last), load(strides + 8 * last)
    for d in range(dims):
        store(place + 8 * d, 0)
    while True:
        element = strided
        for _ in range(length):
            if packing:
                move(flat, element, item)
            else:
                move(element, flat, item)
            flat += item
            element += step
        # Like an odometer: the end of a dimension moves the dimension before.
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
def nc10d_agree_on_rounds(channel: int, step: int, parity: int) -> int:
    """Compare announced with awaited sizes; compute C_AGREED, the round count.

    Every rank compares all pairs' sizes: no rank writes to an array if any pair disagrees.
    """
    size = load(channel + at.C_SIZE)
    table = channel - load(step + packed.SRC) + parity
    offset = load(step + packed.SRC + 8)
    largest = 0
    for rank in range(size):
        for peer in range(size):
            sent = load(load(table + 8 * rank) + offset + 16 * peer)
            awaited = load(load(table + 8 * peer) + offset + 16 * rank + 8)
            if sent != awaited:
                return nc10d_report_sizes(channel, rank, sent, peer, awaited)
            largest = max(largest, sent)
    piece = load(step + packed.PIECE)
    store(channel + at.C_AGREED, max(1, (largest + piece - 1) // piece))
    return at.DONE


@njit(nogil=True)
def nc10d_branch_if_flagged(channel: int, step: int, segment: int) -> int:
    """Wait for all ranks, compare fingerprints, and branch if any rank has set a flag."""
    target = load(channel + at.C_TICKS) + load(step + packed.TICK)
    answer = nc10d_wait_all(channel, step, segment, target)
    if answer != at.DONE:
        return answer
    flagged = nc10d_flagged(channel)
    if flagged == at.MISMATCH:
        return at.MISMATCH
    if flagged == 1:
        # In the other branch no peer writes to exposed memory.
        peer_array_steps.nc10d_withdraw(channel)
        store(channel + at.C_PC, step + packed.STEP * load(step + packed.SKIP))
    return at.DONE


@njit(nogil=True)
def nc10d_wait_gate(channel: int, users: int, step: int, parity: int, segment: int) -> int:
    """Return DONE once a gate is open, else BLOCKED on it."""
    counter = nc10d_operand(channel, users, step + packed.DST, parity, segment)
    if load_acquire(counter) != 0:
        return at.DONE
    return nc10d_block_on(channel, step, segment, counter, 1, load(channel + at.C_RANK))


def _advance_slow_step(channel: int) -> int:
    """Carry out the step at C_PC, which a branch moves; return DONE, BLOCKED or a failure."""
    step = load(channel + at.C_PC)
    segment = load(channel + at.C_SEGMENT)
    users = load(channel + at.C_USERS)
    parity = load(channel + at.C_PARITY)
    kind = load(step)
    if kind == StepKind.BRANCH_IF_FLAGGED:
        return nc10d_branch_if_flagged(channel, step, segment)
    if kind == StepKind.FETCH:
        return peer_array_steps.nc10d_fetch(channel, users, step, parity, segment)
    if kind == StepKind.FOLD_EXPOSED:
        return peer_array_steps.nc10d_fold_exposed(channel, users, step, parity, segment)
    if kind == StepKind.FILL_EXPOSED:
        return peer_array_steps.nc10d_fill_exposed(channel, users, step, parity, segment)
    if kind == StepKind.GATE:
        return nc10d_wait_gate(channel, users, step, parity, segment)
    if kind == StepKind.AGREE:
        return nc10d_agree_on_rounds(channel, step, parity)
    if kind == StepKind.EXPOSE:
        peer_array_steps.nc10d_expose(channel, users, step, parity, segment)
    elif kind == StepKind.JUMP:
        store(channel + at.C_PC, step + packed.STEP * load(step + packed.SKIP))
    elif kind == StepKind.BRANCH_IF_UNREADABLE:
        if load(nc10d_operand(channel, users, step + packed.SRC, parity, segment) + 8) == 0:
            store(channel + at.C_PC, step + packed.STEP * load(step + packed.SKIP))
    elif kind == StepKind.WITHDRAW:
        peer_array_steps.nc10d_withdraw(channel)
    elif kind == StepKind.OPEN_GATE:
        nc10d_publish(channel, nc10d_operand(channel, users, step + packed.DST, parity, segment), 1)
    else:
        dst = nc10d_operand(channel, users, step + packed.DST, parity, segment)
        src = nc10d_operand(channel, users, step + packed.SRC, parity, segment)
        shape = nc10d_operand(channel, users, step + packed.OWN, parity, segment)
        if kind == StepKind.PACK:
            nc10d_copy_lines(dst, src, shape, True)
        else:
            nc10d_copy_lines(src, dst, shape, False)
    return at.DONE


def prepare() -> None:
    """Compile `_advance_slow_step` once; blocks for seconds if not on disk yet."""
    ADDRESS[0] = address_of(
        _made, "slow", lambda: compiled_callback("int64(int64)")(_advance_slow_step)
    )
