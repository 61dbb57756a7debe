"""The interpreter: carries out a channel's program until it has to wait, and never blocks.

`_advance` is compiled once and called by address, so that each entry point stays small. A packed
step is FIELDS integers (see program.py); operands are selector, offset, stride.
"""

from __future__ import annotations

from typing import Any

from numba import njit

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
from nc10d.backend.cpu.native.offsets import (
    AREA_RECORDS,
    C_AGREED,
    C_AREA,
    C_BLOCKED_ON,
    C_FLAGS,
    C_FREE,
    C_LEADING,
    C_LED,
    C_MESSAGE,
    C_MET,
    C_OPS,
    C_PARITY,
    C_PARITY_STEP,
    C_PC,
    C_PEER,
    C_PROCESS,
    C_RANK,
    C_RARE,
    C_ROUND,
    C_SEGMENT,
    C_SELF,
    C_SEQ,
    C_SITE,
    C_SIZE,
    C_STREAMS,
    C_USERS,
    D_TAG,
    DONE,
    FOLD_BLOCK,
    LINE_SLEEPERS,
    LINE_SLOTS,
    LINK_HEADER_BYTES,
    LINK_SITES,
    LINK_TAG,
    MISMATCH,
    P_BELLS,
    RECORD_BYTES,
    RECORD_RING,
    RECORD_SITE,
    RECORD_TEXT,
    S_STEP,
    SITE_BYTES,
    SLOT_BYTES,
    TEXT_BYTES,
)
from nc10d.backend.cpu.native.root_ahead import (
    nc10d_follow,
    nc10d_lead,
    nc10d_listen,
    nc10d_settle,
)
from nc10d.backend.cpu.native.step_format import (
    AGREE,
    ALSO,
    ARG,
    BOTH,
    DST,
    EXTRA,
    FILL,
    FLOW,
    KERNEL,
    LAST,
    NBYTES,
    NO_OPERAND,
    OWN,
    PACK,
    SRC,
    STEP,
    TICK,
    nc10d_block,
    nc10d_copy,
    nc10d_length,
    nc10d_place,
)
from nc10d.kernels.cache import compiled_callback, made_once

END, COPY, SIGNAL, WAIT, WAITALL, FREE, REDN, MAP = 0, 1, 2, 3, 4, 5, 6, 7
ROUND, ENTER, MEET, MEETALL, LOOP_AGREED, HEADER = 8, 9, 10, 11, 13, 14
BEGIN, LEAD, LISTEN, FOLLOW = 27, 28, 29, 30
PAIR, LOOP = 38, 39
ENDLESS = (1 << 63) - 1
_made: dict[str, Any] = {}


@njit(nogil=True)
def nc10d_ring(process: int, sleepers: int) -> None:
    """Ring the doorbell of every rank whose bit is set."""
    bells = load(process + P_BELLS)
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
    if load_acquire(flag + LINE_SLEEPERS) != 0:
        nc10d_ring(load(channel + C_PROCESS), exchange(flag + LINE_SLEEPERS, 0))


@njit(nogil=True)
def nc10d_everyone(channel: int, step: int, segment: int, target: int) -> int:
    """Return DONE when every peer's counter has come to `target`, else note whose has not.

    Who has led looks back once all have come: MISMATCH if a peer led in one of these rounds, too.
    """
    if load(channel + C_MET) >= target:
        return DONE
    size = load(channel + C_SIZE)
    me = load(channel + C_RANK)
    flags = load(channel + C_FLAGS)
    first = load(channel + C_PEER)
    lowest = ENDLESS
    for peer in range(first, size):
        if peer != me:
            flag = load(flags + 8 * peer)
            ticks = load_acquire(flag)
            if ticks < target:
                store(channel + C_PEER, peer)
                return nc10d_block(channel, step, segment, flag, target, peer)
            lowest = min(lowest, ticks)
    store(channel + C_PEER, 0)
    # All have come further, maybe: who leads need not look again so soon.
    store(channel + C_MET, lowest if first == 0 else target)
    return nc10d_settle(channel) if load(channel + C_LED) != 0 else DONE


@njit(nogil=True)
def nc10d_compare(channel: int, first: int, last: int) -> int:
    """Return DONE if peers first..last-1 show my fingerprint, else MISMATCH and name one."""
    slot = LINE_SLOTS + SLOT_BYTES * (load(channel + C_ROUND) & 1)
    mine = load(load(channel + C_SELF) + slot)
    flags = load(channel + C_FLAGS)
    for peer in range(first, last):
        if load(load(flags + 8 * peer) + slot) != mine:
            store(channel + C_BLOCKED_ON, peer)
            return MISMATCH
    return DONE


@njit(nogil=True)
def nc10d_show_site(channel: int, place: int) -> None:
    """Write where the running call was made; nothing (a text of length 0) if that is not known."""
    site = load(channel + C_SITE)
    if site != 0:
        move(place, site, SITE_BYTES)
    else:
        store(place, 0)


@njit(nogil=True)
def nc10d_show_call(channel: int, step: int) -> None:
    """Show the fingerprint of the operation: with the tick, so that an old one never passes."""
    slot = LINE_SLOTS + SLOT_BYTES * (load(channel + C_ROUND) & 1)
    store(load(channel + C_SELF) + slot, load(step + EXTRA) ^ load(channel + C_SEQ))


@njit(nogil=True)
def nc10d_begin_call(channel: int, step: int) -> None:
    """Count an operation, and write its record for whoever asks later."""
    ops = load(channel + C_OPS) + 1
    store(channel + C_OPS, ops)
    record = load(channel + C_AREA) + AREA_RECORDS + RECORD_BYTES * (ops % RECORD_RING)
    now = nc10d_now()
    store(record, ops)
    store(record + 8, now)
    move(record + RECORD_TEXT, load(step + KERNEL), TEXT_BYTES)
    nc10d_show_site(channel, record + RECORD_SITE)
    nc10d_log_call(channel, now, load(step + KERNEL))


@njit(nogil=True)
def nc10d_fold(channel: int, users: int, step: int, parity: int, segment: int) -> None:
    """dst = contributions of all ranks folded in rank order, a block at a time.

    What goes on a board is folded in the first cache and copied there: a kernel writes a vector at
    a time, and would wait for each line that a mate on a core far away has read last.
    """
    dst = nc10d_place(channel, users, step + DST, parity, segment)
    own = nc10d_place(channel, users, step + OWN, parity, segment)
    selector = load(step + SRC)
    within = load(step + SRC + 8) + segment * load(step + SRC + 16)
    twice = load(step + ALSO) != NO_OPERAND
    also = nc10d_place(channel, users, step + ALSO, parity, segment) if twice else 0
    nbytes = nc10d_length(step, segment)
    kernel = load(step + KERNEL)
    last = load(step + LAST)
    arg = load(step + ARG)
    copy = load(step + BOTH)
    size = load(channel + C_SIZE)
    me = load(channel + C_RANK)
    table = channel - selector + parity  # selector of rank 0; the others follow
    shown = load(step + EXTRA) != 0
    room = block_on_stack()
    block = nbytes if size == 2 and not twice and not shown and last == 0 else FOLD_BLOCK
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
    number = load(channel + C_ROUND)
    seq = load(channel + C_SEQ)
    if load(step + LAST) != 0:  # else the half was not used
        store(channel + C_FREE + 8 * (number & 1), seq + load(step + LAST))
    store(channel + C_SEQ, seq + load(step + TICK))
    store(channel + C_ROUND, number + 1)
    odd = (number + 1) & 1
    store(channel + C_PARITY, load(channel + C_PARITY_STEP) if odd else 0)


def _advance(channel: int) -> int:
    """Run the channel's program as far as it goes: DONE, BLOCKED, MISMATCH or SIZES."""
    step = load(channel + C_PC)
    segment = load(channel + C_SEGMENT)
    users = load(channel + C_USERS)
    parity = load(channel + C_PARITY)
    seq = load(channel + C_SEQ)
    while True:
        kind = load(step)
        if kind == COPY:
            dst = nc10d_place(channel, users, step + DST, parity, segment)
            src = nc10d_place(channel, users, step + SRC, parity, segment)
            if dst != src:
                nc10d_copy(load(step + KERNEL), dst, src, nc10d_length(step, segment))
        elif kind == SIGNAL:
            nc10d_post(channel, load(channel + C_SELF), seq + load(step + TICK))
        elif kind in (WAIT, MEET):
            peer = load(step + EXTRA)
            flag = load(load(channel + C_FLAGS) + 8 * peer)
            target = seq + load(step + TICK)
            if load_acquire(flag) < target:
                return nc10d_block(channel, step, segment, flag, target, peer)
            if kind == MEET and nc10d_compare(channel, peer, peer + 1) != DONE:
                return MISMATCH
        elif kind in (WAITALL, MEETALL):
            answer = nc10d_everyone(channel, step, segment, seq + load(step + TICK))
            if answer != DONE:
                return answer
            if kind == MEETALL and nc10d_compare(channel, 0, load(channel + C_SIZE)) != DONE:
                return MISMATCH
        elif kind == FREE:
            half = load(channel + C_ROUND) & 1
            target = load(channel + C_FREE + 8 * half)
            answer = nc10d_everyone(channel, step, segment, target)
            if answer != DONE:
                return answer
        elif kind == REDN:
            nc10d_fold(channel, users, step, parity, segment)
        elif kind == MAP:
            dst = nc10d_place(channel, users, step + DST, parity, segment)
            src = nc10d_place(channel, users, step + SRC, parity, segment)
            nbytes = nc10d_length(step, segment)
            call_kernel(load(step + KERNEL), dst, src, load(step + ARG), nbytes)
        elif kind in (ENTER, BEGIN):
            if kind == ENTER:
                nc10d_show_call(channel, step)
            store(channel + C_LEADING, 1 if kind == BEGIN else 0)
            nc10d_begin_call(channel, step)
        elif kind == LEAD:
            src = nc10d_place(channel, users, step + SRC, parity, segment)
            nc10d_lead(channel, src, load(step + NBYTES), load(step + LAST))
        elif kind == LISTEN:
            if nc10d_listen(channel, load(step + EXTRA)) != DONE:
                return MISMATCH
        elif kind == FOLLOW:
            dst = nc10d_place(channel, users, step + DST, parity, segment)
            nbytes, call = load(step + NBYTES), load(step + LAST)
            if nc10d_follow(channel, dst, load(step + EXTRA), nbytes, call) != DONE:
                return MISMATCH
        elif kind == HEADER:
            half = load(channel + C_ROUND) & 1
            header = load(channel + C_SELF) + LINK_TAG + LINK_HEADER_BYTES * half
            move(header, load(channel + C_MESSAGE) + D_TAG, LINK_HEADER_BYTES)
            nc10d_show_site(channel, load(channel + C_SELF) + LINK_SITES + SITE_BYTES * half)
        elif kind == AGREE or PACK <= kind <= FILL:
            store(channel + C_PC, step)
            store(channel + C_SEGMENT, segment)
            answer = call_engine(load(load(channel + C_RARE)), channel)
            if answer != DONE:
                return answer
            step = load(channel + C_PC)
        elif kind in (ROUND, LOOP_AGREED):
            nc10d_end_round(channel, step)
            seq = load(channel + C_SEQ)
            parity = load(channel + C_PARITY)
            segment += 1
            repeat = load(step + KERNEL) if kind == ROUND else load(channel + C_AGREED)
            if segment < repeat:
                step -= STEP * (load(step + EXTRA) + 1)
            else:
                segment = 0
        elif kind == PAIR:
            dst = nc10d_place(channel, users, step + DST, parity, segment)
            a = nc10d_place(channel, users, step + SRC, parity, segment)
            b = nc10d_place(channel, users, step + OWN, parity, segment)
            call_kernel(load(step + KERNEL), dst, a, b, nc10d_length(step, segment))
        elif kind == LOOP:
            segment += 1
            if segment < load(step + KERNEL):
                step -= STEP * (load(step + EXTRA) + 1)
            else:
                segment = 0
        elif kind >= FLOW:
            store(channel + C_PC, step)
            store(channel + C_SEGMENT, segment)
            answer = call_engine(load(load(channel + C_STREAMS) + S_STEP), channel)
            if answer != DONE:
                return answer
            if kind == FLOW:
                step += STEP * load(step + EXTRA)
        else:
            return DONE
        step += STEP


def advance_address() -> int:
    """Return the address of `_advance`, which C_ADVANCE holds; may block to compile it."""
    made = made_once(_made, "advance", lambda: compiled_callback("int64(int64)")(_advance))
    return int(made.address)
