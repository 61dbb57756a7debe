"""The interpreter: carries out a channel's program until it has to wait, and never blocks.

`_advance` is compiled once and called by address, so that each entry point stays small. A packed
step is FIELDS integers (see program.py); operands are selector, offset, stride.
"""

from __future__ import annotations

from typing import Any

from numba import njit

from nc10d.backend.cpu.native import offsets as at
from nc10d.backend.cpu.native import step_format as packed
from nc10d.backend.cpu.native.atomics import (
    add_32,
    block_on_stack,
    call_engine,
    call_kernel,
    exchange,
    load,
    load_acquire,
    move,
    nc10d_futex_wake,
    nc10d_now,
    store,
)
from nc10d.backend.cpu.native.log import nc10d_log_call
from nc10d.backend.cpu.native.step_format import nc10d_block, nc10d_copy, nc10d_length, nc10d_place
from nc10d.kernels.cache import compiled_callback, made_once

_made: dict[str, Any] = {}


@njit(nogil=True)
def nc10d_ring(process: int, sleepers: int) -> None:
    """Ring the doorbell of every rank whose bit is set."""
    bells = load(process + at.P_BELLS)
    rank = 0
    while sleepers != 0:
        if sleepers & 1:
            bell = load(bells + 8 * rank)
            add_32(bell, 1)
            nc10d_futex_wake(bell)
        sleepers = (sleepers >> 1) & 0x7FFFFFFFFFFFFFFF
        rank += 1


@njit(nogil=True)
def nc10d_post(channel: int, flag: int, value: int) -> None:
    """Show a new counter value, and wake those who sleep on it.

    The exchange is a full fence: either I see a sleeper's bit, or it sees my value.
    """
    exchange(flag, value)
    if load_acquire(flag + at.LINE_SLEEPERS) != 0:
        nc10d_ring(load(channel + at.C_PROCESS), exchange(flag + at.LINE_SLEEPERS, 0))


@njit(nogil=True)
def nc10d_everyone(channel: int, step: int, segment: int, target: int) -> int:
    """Return DONE when every peer's counter has come to `target`, else note whose has not."""
    if load(channel + at.C_MET) >= target:
        return at.DONE
    size = load(channel + at.C_SIZE)
    me = load(channel + at.C_RANK)
    flags = load(channel + at.C_FLAGS)
    first = load(channel + at.C_PEER)
    for peer in range(first, size):
        if peer != me:
            flag = load(flags + 8 * peer)
            if load_acquire(flag) < target:
                store(channel + at.C_PEER, peer)
                return nc10d_block(channel, step, segment, flag, target, peer)
    store(channel + at.C_PEER, 0)
    store(channel + at.C_MET, target)
    return at.DONE


@njit(nogil=True)
def nc10d_compare(channel: int, first: int, last: int) -> int:
    """Return DONE if peers first..last-1 show my fingerprint, else MISMATCH and name one."""
    slot = at.LINE_SLOTS + at.SLOT_BYTES * (load(channel + at.C_ROUND) & 1)
    mine = load(load(channel + at.C_SELF) + slot)
    flags = load(channel + at.C_FLAGS)
    for peer in range(first, last):
        if load(load(flags + 8 * peer) + slot) != mine:
            store(channel + at.C_BLOCKED_ON, peer)
            return at.MISMATCH
    return at.DONE


@njit(nogil=True)
def nc10d_show_site(channel: int, place: int) -> None:
    """Write where the running call was made; nothing (a text of length 0) if that is not known."""
    site = load(channel + at.C_SITE)
    if site != 0:
        move(place, site, at.SITE_BYTES)
    else:
        store(place, 0)


@njit(nogil=True)
def nc10d_show_call(channel: int, step: int) -> None:
    """Show the fingerprint of the operation: with the tick, so that an old one never passes."""
    slot = at.LINE_SLOTS + at.SLOT_BYTES * (load(channel + at.C_ROUND) & 1)
    store(load(channel + at.C_SELF) + slot, load(step + packed.EXTRA) ^ load(channel + at.C_SEQ))


@njit(nogil=True)
def nc10d_begin_call(channel: int, step: int) -> None:
    """Count an operation, and write its record for whoever asks later."""
    ops = load(channel + at.C_OPS) + 1
    store(channel + at.C_OPS, ops)
    record = load(channel + at.C_AREA) + at.AREA_RECORDS + at.RECORD_BYTES * (ops % at.RECORD_RING)
    now = nc10d_now()
    store(record, ops)
    store(record + 8, now)
    move(record + at.RECORD_TEXT, load(step + packed.KERNEL), at.TEXT_BYTES)
    nc10d_show_site(channel, record + at.RECORD_SITE)
    nc10d_log_call(channel, now, load(step + packed.KERNEL))


@njit(nogil=True)
def nc10d_fold(channel: int, users: int, step: int, parity: int, segment: int) -> None:
    """dst = contributions of all ranks folded in rank order, a block at a time.

    What goes on a board is folded in the first cache and copied there: a kernel writes a vector at
    a time, and would wait for each line that a mate on a core far away has read last.
    """
    dst = nc10d_place(channel, users, step + packed.DST, parity, segment)
    own = nc10d_place(channel, users, step + packed.OWN, parity, segment)
    selector = load(step + packed.SRC)
    within = load(step + packed.SRC + 8) + segment * load(step + packed.SRC + 16)
    twice = load(step + packed.ALSO) != packed.NO_OPERAND
    also = nc10d_place(channel, users, step + packed.ALSO, parity, segment) if twice else 0
    nbytes = nc10d_length(step, segment)
    kernel = load(step + packed.KERNEL)
    last = load(step + packed.LAST)
    arg = load(step + packed.ARG)
    copy = load(step + packed.BOTH)
    size = load(channel + at.C_SIZE)
    me = load(channel + at.C_RANK)
    table = channel - selector + parity  # selector of rank 0; the others follow
    shown = load(step + packed.EXTRA) != 0
    room = block_on_stack()
    block = nbytes if size == 2 and not twice and not shown and last == 0 else at.FOLD_BLOCK
    done = 0
    while done < nbytes:
        count = min(block, nbytes - done)
        into = room if shown else dst + done
        a = own if me == 0 else load(table) + within
        b = own if me == 1 else load(table + 8) + within
        call_kernel(kernel, into, a + done, b + done, count)
        for rank in range(2, size):
            part = own if me == rank else load(table + 8 * rank) + within
            call_kernel(kernel, into, into, part + done, count)
        if last != 0:
            call_kernel(last, into, into, arg, count)
        if shown:
            nc10d_copy(copy, dst + done, into, count)
        if twice:
            nc10d_copy(copy, also + done, into, count)
        done += count


@njit(nogil=True)
def nc10d_end_round(channel: int, step: int) -> None:
    """Spend the round's ticks and turn to the other half."""
    number = load(channel + at.C_ROUND)
    seq = load(channel + at.C_SEQ)
    store(channel + at.C_FREE + 8 * (number & 1), seq + load(step + packed.LAST))
    store(channel + at.C_SEQ, seq + load(step + packed.TICK))
    store(channel + at.C_ROUND, number + 1)
    odd = (number + 1) & 1
    store(channel + at.C_PARITY, load(channel + at.C_PARITY_STEP) if odd else 0)


def _advance(channel: int) -> int:
    """Run the channel's program as far as it goes: DONE, BLOCKED, MISMATCH or SIZES."""
    step = load(channel + at.C_PC)
    segment = load(channel + at.C_SEGMENT)
    users = load(channel + at.C_USERS)
    parity = load(channel + at.C_PARITY)
    seq = load(channel + at.C_SEQ)
    while True:
        kind = load(step)
        if kind == packed.COPY:
            dst = nc10d_place(channel, users, step + packed.DST, parity, segment)
            src = nc10d_place(channel, users, step + packed.SRC, parity, segment)
            if dst != src:
                nc10d_copy(load(step + packed.KERNEL), dst, src, nc10d_length(step, segment))
        elif kind == packed.SIGNAL:
            nc10d_post(channel, load(channel + at.C_SELF), seq + load(step + packed.TICK))
        elif kind in (packed.WAIT, packed.MEET):
            peer = load(step + packed.EXTRA)
            flag = load(load(channel + at.C_FLAGS) + 8 * peer)
            target = seq + load(step + packed.TICK)
            if load_acquire(flag) < target:
                return nc10d_block(channel, step, segment, flag, target, peer)
            if kind == packed.MEET and nc10d_compare(channel, peer, peer + 1) != at.DONE:
                return at.MISMATCH
        elif kind in (packed.WAITALL, packed.MEETALL):
            answer = nc10d_everyone(channel, step, segment, seq + load(step + packed.TICK))
            if answer != at.DONE:
                return answer
            if (
                kind == packed.MEETALL
                and nc10d_compare(channel, 0, load(channel + at.C_SIZE)) != at.DONE
            ):
                return at.MISMATCH
        elif kind == packed.FREE:
            half = load(channel + at.C_ROUND) & 1
            target = load(channel + at.C_FREE + 8 * half)
            answer = nc10d_everyone(channel, step, segment, target)
            if answer != at.DONE:
                return answer
        elif kind == packed.REDN:
            nc10d_fold(channel, users, step, parity, segment)
        elif kind == packed.MAP:
            dst = nc10d_place(channel, users, step + packed.DST, parity, segment)
            src = nc10d_place(channel, users, step + packed.SRC, parity, segment)
            nbytes = nc10d_length(step, segment)
            call_kernel(load(step + packed.KERNEL), dst, src, load(step + packed.ARG), nbytes)
        elif kind == packed.ENTER:
            nc10d_show_call(channel, step)
            nc10d_begin_call(channel, step)
        elif kind == packed.HEADER:
            half = load(channel + at.C_ROUND) & 1
            header = load(channel + at.C_SELF) + at.LINK_TAG + at.LINK_HEADER_BYTES * half
            move(header, load(channel + at.C_MESSAGE) + at.D_TAG, at.LINK_HEADER_BYTES)
            nc10d_show_site(
                channel, load(channel + at.C_SELF) + at.LINK_SITES + at.SITE_BYTES * half
            )
        elif kind == packed.AGREE or packed.PACK <= kind <= packed.FILL:
            store(channel + at.C_PC, step)
            store(channel + at.C_SEGMENT, segment)
            answer = call_engine(load(load(channel + at.C_RARE)), channel)
            if answer != at.DONE:
                return answer
            step = load(channel + at.C_PC)
        elif kind in (packed.ROUND, packed.LOOP_AGREED):
            nc10d_end_round(channel, step)
            seq = load(channel + at.C_SEQ)
            parity = load(channel + at.C_PARITY)
            segment += 1
            repeat = (
                load(step + packed.KERNEL) if kind == packed.ROUND else load(channel + at.C_AGREED)
            )
            if segment < repeat:
                step -= packed.STEP * (load(step + packed.EXTRA) + 1)
            else:
                segment = 0
        elif kind == packed.PAIR:
            dst = nc10d_place(channel, users, step + packed.DST, parity, segment)
            a = nc10d_place(channel, users, step + packed.SRC, parity, segment)
            b = nc10d_place(channel, users, step + packed.OWN, parity, segment)
            call_kernel(load(step + packed.KERNEL), dst, a, b, nc10d_length(step, segment))
        elif kind == packed.LOOP:
            segment += 1
            if segment < load(step + packed.KERNEL):
                step -= packed.STEP * (load(step + packed.EXTRA) + 1)
            else:
                segment = 0
        elif kind >= packed.FLOW:
            store(channel + at.C_PC, step)
            store(channel + at.C_SEGMENT, segment)
            answer = call_engine(load(load(channel + at.C_STREAMS) + at.S_STEP), channel)
            if answer != at.DONE:
                return answer
            if kind == packed.FLOW:
                step += packed.STEP * load(step + packed.EXTRA)
        else:
            return at.DONE
        step += packed.STEP


def advance_address() -> int:
    """Return the address of `_advance`, which C_ADVANCE holds; may block to compile it."""
    made = made_once(_made, "advance", lambda: compiled_callback("int64(int64)")(_advance))
    return int(made.address)
