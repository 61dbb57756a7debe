"""The interpreter: run a channel's program until it ends, fails or has to wait for a peer.

`_advance` is the switch over the step kinds. The place in the program is kept in the channel, so
any thread that holds the channel's lock may go on where another thread stopped.

    published by a rank                 valid for its peers
    counter (C_SELF)                    only grows; release: all that the rank wrote before is there
    fingerprint, inline payload         from tick 1 of their round until the slot's FREE target
    staging buffer, by slot             as its step says, until the slot's FREE target
    record of a call (AREA_RECORDS)     from tick 1 of the call until RECORD_RING calls later

    answer of `_advance`    C_PC                                 goes on by
    DONE                    stale: the next program sets it      the next program
    BLOCKED                 the step that waits, to be redone    a thread, when C_BLOCKED_AT has
                                                                 come to C_BLOCKED_FOR
    negative (a failure)    undefined                            nothing: the channel is broken

Invariants:

- A rank writes to a slot only after all peers have left the round that used the slot last. FREE
  waits for that. In a program without FREE (links, later rounds) another wait implies it.
- A rank reads a peer's slot only after a wait for that peer's counter.
- A step that answers BLOCKED is repeated from the start. So such a step has changed nothing, or
  keeps its progress elsewhere (a FLOW does, in its wires). Only FETCH, FOLD_EXPOSED and
  FILL_EXPOSED may block after a write, and then only until the group's failure ends the wait.
- All ranks spend the same ticks for a round, so targets need no negotiation.
"""

from __future__ import annotations

from typing import Any

from numba import njit

from nc10d.backend.cpu.native import atomics
from nc10d.backend.cpu.native import offsets as at
from nc10d.backend.cpu.native import step_format as packed
from nc10d.backend.cpu.native.atomics import load, load_acquire, store
from nc10d.backend.cpu.native.log import nc10d_log_call
from nc10d.backend.cpu.native.step_format import (
    nc10d_block_on,
    nc10d_copy,
    nc10d_length,
    nc10d_operand,
)
from nc10d.backend.cpu.native.step_kinds import StepKind
from nc10d.kernels.cache import address_of, compiled_callback

_made: dict[str, Any] = {}


@njit(nogil=True)
def nc10d_ring_bells(rank_block: int, sleepers: int) -> None:
    """Ring the doorbell of every rank whose bit is set."""
    bells = load(rank_block + at.P_BELLS)
    rank = 0
    while sleepers != 0:
        if sleepers & 1:
            bell = load(bells + 8 * rank)
            # The value changes before the wake: a rank that is about to sleep sees the new value.
            atomics.add_32(bell, 1)
            atomics.nc10d_futex_wake(bell)
        # Rank 63's bit is the sign: an arithmetic shift would keep it for ever.
        sleepers = (sleepers >> 1) & 0x7FFFFFFFFFFFFFFF
        rank += 1


@njit(nogil=True)
def nc10d_publish(channel: int, counter: int, value: int) -> None:
    """Publish a new counter value and wake the ranks that sleep there."""
    # A full fence, not only a release: a sleeper sets its bit and then looks at the counter again,
    # this thread sets the counter and then looks at the bits. At least one of them sees the other's
    # store. With a release store both could miss it, and the sleeper would wait for a slice. The
    # exchange also releases: a rank that sees the value sees all that this rank wrote before.
    atomics.exchange(counter, value)
    if load_acquire(counter + at.LINE_SLEEPERS) != 0:
        # Taken by an exchange: two posts at the same time ring each bell once.
        nc10d_ring_bells(
            load(channel + at.C_RANK_BLOCK), atomics.exchange(counter + at.LINE_SLEEPERS, 0)
        )


@njit(nogil=True)
def nc10d_wait_all(channel: int, step: int, segment: int, target: int) -> int:
    """Return DONE once every peer's counter has come to `target`, else BLOCKED on a late peer."""
    # Counters only grow, so a target that all have reached once needs no second look (C_MET), and
    # a wait that blocked at a peer goes on with that peer: earlier peers have come (C_PEER).
    if load(channel + at.C_MET) >= target:
        return at.DONE
    size = load(channel + at.C_SIZE)
    me = load(channel + at.C_RANK)
    counters = load(channel + at.C_COUNTERS)
    first = load(channel + at.C_PEER)
    for peer in range(first, size):
        if peer != me:
            counter = load(counters + 8 * peer)
            if load_acquire(counter) < target:
                store(channel + at.C_PEER, peer)
                return nc10d_block_on(channel, step, segment, counter, target, peer)
    store(channel + at.C_PEER, 0)
    store(channel + at.C_MET, target)
    return at.DONE


@njit(nogil=True)
def nc10d_inline_slot(channel: int) -> int:
    """Return the offset, from a rank's counter, of the inline slot for this round."""
    return at.LINE_SLOTS + at.SLOT_BYTES * (load(channel + at.C_ROUND) & 1)


@njit(nogil=True)
def nc10d_compare_fingerprints(channel: int) -> int:
    """Return DONE if all ranks have this rank's fingerprint, else MISMATCH."""
    # C_BLOCKED_ON is then the other rank. The caller has waited for all ranks' tick 1, which makes
    # their fingerprints visible.
    slot = nc10d_inline_slot(channel)
    mine = load(load(channel + at.C_SELF) + slot)
    counters = load(channel + at.C_COUNTERS)
    for peer in range(load(channel + at.C_SIZE)):
        if load(load(counters + 8 * peer) + slot) != mine:
            store(channel + at.C_BLOCKED_ON, peer)
            return at.MISMATCH
    return at.DONE


@njit(nogil=True)
def nc10d_write_site(channel: int, place: int) -> None:
    """Write the running call's site, as text, to `place`; an empty text if unknown."""
    site = load(channel + at.C_SITE)
    if site != 0:
        atomics.move(place, site, at.SITE_BYTES)
    else:
        store(place, 0)


@njit(nogil=True)
def nc10d_write_fingerprint(channel: int, step: int) -> None:
    """Write the operation's fingerprint into this round's slot; the next signal publishes it."""
    # Mixed with the tick: a fingerprint that is left from an earlier use of the slot never passes
    # for this round's, not even a fingerprint of the same call.
    slot = load(channel + at.C_SELF) + nc10d_inline_slot(channel)
    store(slot, load(step + packed.FINGERPRINT) ^ load(channel + at.C_TICKS))


@njit(nogil=True)
def nc10d_begin_call(channel: int, step: int) -> None:
    """Count an operation and write the record, which peers read for their error messages."""
    # Plain stores: peers read a record only for an error, after tick 1 or when all has failed.
    ops = load(channel + at.C_OPS) + 1
    store(channel + at.C_OPS, ops)
    record = load(channel + at.C_AREA) + at.AREA_RECORDS + at.RECORD_BYTES * (ops % at.RECORD_RING)
    now = atomics.nc10d_now()
    store(record, ops)
    store(record + 8, now)
    atomics.move(record + at.RECORD_TEXT, load(step + packed.RECORD), at.TEXT_BYTES)
    nc10d_write_site(channel, record + at.RECORD_SITE)
    nc10d_log_call(channel, now, load(step + packed.RECORD))


@njit(nogil=True)
def nc10d_fold_staged(channel: int, users: int, step: int, parity: int, segment: int) -> None:
    """dst = all ranks' contributions folded in rank order, a block at a time."""
    # A result for the staging buffer is folded in the L1 cache and copied: a kernel writes vector
    # by vector, and would wait for each cache line that a peer on a distant core has read last.
    dst = nc10d_operand(channel, users, step + packed.DST, parity, segment)
    own = nc10d_operand(channel, users, step + packed.OWN, parity, segment)
    selector = load(step + packed.SRC)
    within = load(step + packed.SRC + 8) + segment * load(step + packed.SRC + 16)
    twice = load(step + packed.ALSO) != packed.NO_OPERAND
    also = nc10d_operand(channel, users, step + packed.ALSO, parity, segment) if twice else 0
    nbytes = nc10d_length(step, segment)
    kernel = load(step + packed.KERNEL)
    last = load(step + packed.LAST)
    arg = load(step + packed.ARG)
    copy = load(step + packed.COPIER)
    size = load(channel + at.C_SIZE)
    me = load(channel + at.C_RANK)
    table = channel - selector + parity  # the selector is rank 0's; the other ranks' words follow
    staged = load(step + packed.STAGED) != 0
    room = atomics.block_on_stack()
    # Blocks keep the partial result in the L1 cache. Two ranks have none: one pass suffices.
    in_one = size == 2 and not twice and not staged and last == 0
    block = nbytes if in_one else load(step + packed.BLOCK)
    done = 0
    while done < nbytes:
        count = min(block, nbytes - done)
        into = room if staged else dst + done
        a = own if me == 0 else load(table) + within
        b = own if me == 1 else load(table + 8) + within
        atomics.call_kernel(kernel, into, a + done, b + done, count)
        # In rank order on every rank: all get the same bits, whichever rank folds.
        for rank in range(2, size):
            part = own if me == rank else load(table + 8 * rank) + within
            atomics.call_kernel(kernel, into, into, part + done, count)
        if last != 0:
            atomics.call_kernel(last, into, into, arg, count)
        if staged:
            nc10d_copy(copy, dst + done, into, count)
        # From `into`, not from dst: that is still in this core's cache.
        if twice:
            nc10d_copy(copy, also + done, into, count)
        done += count


@njit(nogil=True)
def nc10d_pass_received(channel: int, number: int) -> int:
    """Leave the rounds after `number` whose messages have been received; return the last.

    The caller then leaves that round.
    """
    received, mask = load(channel + at.C_RECEIVED), load(channel + at.C_CELL_MASK)
    first = number
    while received & (1 << ((number + 1) & mask)) != 0:
        number += 1
        received &= ~(1 << (number & mask))
    if number != first:
        ticks = load(channel + at.C_TICKS) + at.LINK_TICKS * (number - first)
        store(channel + at.C_TICKS, ticks)
        store(channel + at.C_RECEIVED, received)
        # The sender may use the cells again.
        nc10d_publish(channel, load(channel + at.C_SELF), ticks + at.LINK_TICKS)
    return number


@njit(nogil=True)
def nc10d_end_round(channel: int, step: int) -> None:
    """Spend the round's ticks and turn to the other slot."""
    number = load(channel + at.C_ROUND)
    if load(channel + at.C_RECEIVED) != 0:
        number = nc10d_pass_received(channel, number)
    seq = load(channel + at.C_TICKS)
    # The next round that uses this slot waits (FREE) until all peers have left this one.
    store(channel + at.C_FREE + 8 * (number & 1), seq + load(step + packed.FREE_AT))
    store(channel + at.C_TICKS, seq + load(step + packed.TICK))
    store(channel + at.C_ROUND, number + 1)
    # Operands of shared memory go by the slot: one addition turns all of them (nc10d_operand).
    odd = (number + 1) & 1
    parity = load(channel + at.C_PARITY_STEP) if odd else 0
    store(channel + at.C_PARITY, parity)
    if load(channel + at.C_CELLS) != 0:
        cell = load(channel + at.C_CELLS)
        cell += at.CELL_BYTES * ((number + 1) & load(channel + at.C_CELL_MASK))
        store(channel + at.C_CELL, cell)
        store(channel + at.LINK_ROW + parity, cell + at.CELL_DATA)


def _advance(channel: int) -> int:
    """Run the channel's program, whose lock is the caller's: DONE, BLOCKED or a failure."""
    # Kept in registers; nc10d_block_on and the calls below write them back where others need them.
    step = load(channel + at.C_PC)
    segment = load(channel + at.C_SEGMENT)
    users = load(channel + at.C_USERS)
    parity = load(channel + at.C_PARITY)
    seq = load(channel + at.C_TICKS)
    while True:
        kind = load(step)
        if kind == StepKind.COPY:
            dst = nc10d_operand(channel, users, step + packed.DST, parity, segment)
            src = nc10d_operand(channel, users, step + packed.SRC, parity, segment)
            if dst != src:  # in place: a call whose input is also the output
                nc10d_copy(load(step + packed.COPIER), dst, src, nc10d_length(step, segment))
        elif kind == StepKind.SIGNAL:
            nc10d_publish(channel, load(channel + at.C_SELF), seq + load(step + packed.TICK))
        elif kind == StepKind.WAIT:
            peer = load(step + packed.PEER)
            counter = load(load(channel + at.C_COUNTERS) + 8 * peer)
            target = seq + load(step + packed.TICK)
            # Acquire: all that the peer wrote before the signal is visible from here on.
            if load_acquire(counter) < target:
                return nc10d_block_on(channel, step, segment, counter, target, peer)
        elif kind in (StepKind.WAIT_ALL, StepKind.MEET_ALL):
            answer = nc10d_wait_all(channel, step, segment, seq + load(step + packed.TICK))
            if answer != at.DONE:
                return answer
            if kind == StepKind.MEET_ALL and nc10d_compare_fingerprints(channel) != at.DONE:
                return at.MISMATCH
        elif kind == StepKind.FREE:
            # The slot's last round may still be read: writing before that would tear a peer's copy.
            slot = load(channel + at.C_ROUND) & 1
            target = load(channel + at.C_FREE + 8 * slot)
            answer = nc10d_wait_all(channel, step, segment, target)
            if answer != at.DONE:
                return answer
        elif kind == StepKind.FOLD_STAGED:
            nc10d_fold_staged(channel, users, step, parity, segment)
        elif kind == StepKind.APPLY:
            dst = nc10d_operand(channel, users, step + packed.DST, parity, segment)
            src = nc10d_operand(channel, users, step + packed.SRC, parity, segment)
            nbytes = nc10d_length(step, segment)
            kernel, arg = load(step + packed.KERNEL), load(step + packed.ARG)
            atomics.call_kernel(kernel, dst, src, arg, nbytes)
        elif kind == StepKind.ENTER:  # before the signal that makes both visible
            nc10d_write_fingerprint(channel, step)
            nc10d_begin_call(channel, step)
        elif kind == StepKind.WRITE_HEADER:
            cell = load(channel + at.C_CELL)
            header = load(channel + at.C_MESSAGE) + at.D_TAG
            atomics.move(cell + at.CELL_HEADER, header, at.LINK_HEADER_BYTES)
            nc10d_write_site(channel, cell + at.CELL_SITE)
        elif StepKind.AGREE <= kind < StepKind.FLOW:
            # By address, through a word that stays 0 until a program needs this code: a first
            # collective does not wait for the compilation.
            store(channel + at.C_PC, step)
            store(channel + at.C_SEGMENT, segment)
            answer = atomics.call_address(load(load(channel + at.C_SLOW_STEPS)), channel)
            if answer != at.DONE:
                return answer
            step = load(channel + at.C_PC)  # a branch has moved the place
        elif kind in (StepKind.ROUND, StepKind.LOOP_AGREED):
            nc10d_end_round(channel, step)
            seq = load(channel + at.C_TICKS)
            parity = load(channel + at.C_PARITY)
            segment += 1
            repeat = load(step + packed.REPEAT if kind == StepKind.ROUND else channel + at.C_AGREED)
            # The body runs again, a segment further: operands with a stride advance by themselves.
            if segment < repeat:
                step -= packed.STEP * (load(step + packed.BACK) + 1)
            else:
                segment = 0
        elif kind == StepKind.PAIR:
            dst = nc10d_operand(channel, users, step + packed.DST, parity, segment)
            a = nc10d_operand(channel, users, step + packed.SRC, parity, segment)
            b = nc10d_operand(channel, users, step + packed.OWN, parity, segment)
            atomics.call_kernel(load(step + packed.KERNEL), dst, a, b, nc10d_length(step, segment))
        elif kind == StepKind.LOOP:
            segment += 1
            if segment < load(step + packed.REPEAT):
                step -= packed.STEP * (load(step + packed.BACK) + 1)
            else:
                segment = 0
        elif kind >= StepKind.FLOW:  # to other hosts: by address too, compiled where there are any
            store(channel + at.C_PC, step)
            store(channel + at.C_SEGMENT, segment)
            answer = atomics.call_address(load(load(channel + at.C_STREAMS) + at.S_STEP), channel)
            if answer != at.DONE:
                return answer
            if kind == StepKind.FLOW:
                step += packed.STEP * load(step + packed.ROWS)  # past the step's rows
        else:
            return at.DONE
        step += packed.STEP


def advance_address() -> int:
    """Return the address of `_advance`, for C_ADVANCE; may block to compile."""
    # Called by address: otherwise each entry point would contain, and compile, a copy.
    return address_of(_made, "advance", lambda: compiled_callback("int64(int64)")(_advance))
