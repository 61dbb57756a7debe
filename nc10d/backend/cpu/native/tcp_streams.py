"""Steps that cross to other hosts: transfers, and checks of received headers.

A FLOW step drives the rows behind it (GIVE to a wire, TAKE from a wire) together, as far as their
sockets go. The step is done when all rows are, so no rank order can deadlock on full sockets. A
PUSH row need not be done: a later row continues the transfer. A wire moves bytes in program order:
the socket is the FIFO and the flow control.

    a FLOW         S_COUNT, table          counters
    moves          being rebuilt           S_MOVED grows
    is blocked     wires to wait for       C_BLOCKED_AT is S_READY, C_BLOCKED_FOR its next value
    is done        -                       W_SENT, W_TAKEN are 0 again (but for a PUSH)

Invariant: progress lives in W_SENT and W_TAKEN, so a FLOW may be repeated by any thread.
"""

from __future__ import annotations

from typing import Any

from numba import njit

from nc10d.backend.cpu.native import atomics, sockets
from nc10d.backend.cpu.native import offsets as at
from nc10d.backend.cpu.native import step_format as packed
from nc10d.backend.cpu.native.atomics import load, load_acquire, store, store_release
from nc10d.backend.cpu.native.interpreter import nc10d_write_site
from nc10d.backend.cpu.native.step_format import (
    nc10d_block_on,
    nc10d_length,
    nc10d_operand,
    nc10d_report_sizes,
)
from nc10d.backend.cpu.native.step_kinds import StepKind
from nc10d.kernels.cache import compiled_callback

# Sleeps on sockets are short: only the socket ends them, and failures must be seen.
POLL_MS = 10
PAUSES = 8
SHORTEST_LINGER = 32  # some 20 µs, more than a round trip
MUCH = 1024 * 1024
"""Bytes: while more are to come, later segments included, a thread sleeps at once. The sockets'
buffers fill meanwhile, and the processes that fill them may need the core."""


@njit(nogil=True)
def nc10d_check_header(channel: int, step: int, header: int) -> int:
    """Compare the call in another host's header with this rank's call; DONE or MISMATCH."""
    fingerprint = load(step + packed.FINGERPRINT)
    if load(header) == load(channel + at.C_OPS) and load(header + 8) == fingerprint:
        return at.DONE
    atomics.move(load(channel + at.C_STREAMS) + at.S_SEEN, header, at.HEADER_BYTES)
    store(channel + at.C_BLOCKED_ON, ~load(step + packed.PEER))
    return at.MISMATCH


@njit(nogil=True)
def nc10d_flow(channel: int, users: int, step: int, parity: int, segment: int) -> int:
    """Drive all rows behind `step` as far as their sockets go."""
    streams = load(channel + at.C_STREAMS)
    wires = load(streams + at.S_WIRES)
    last = step + packed.STEP * load(step + packed.ROWS)
    while True:
        # Read before the sockets are tried: a socket that gets ready later raises the counter.
        target = load_acquire(load(streams + at.S_READY)) + 1
        store(streams + at.S_COUNT, 0)  # the wires to wait for are collected anew
        moved, left, coming, peer = 0, 0, 0, 0
        row = step
        while row < last:
            row += packed.STEP
            wire = load(wires + 8 * load(row + packed.PEER))
            answer = nc10d_move_row(channel, users, row, parity, segment, wire)
            if answer < 0:
                return answer
            moved += answer
            if nc10d_bytes_left(row, segment, wire) > 0:
                if load(row) != StepKind.PUSH:
                    left += 1
                    coming = max(coming, nc10d_bytes_to_come(row, segment, wire))
                    peer = load(wire + at.W_RANK)
                want = at.WANT_IN if load(row) == StepKind.TAKE else at.WANT_OUT
                sockets.nc10d_record_wire(streams, wire, want)
        # Rows that only push do not count as left: the FLOW ends, a later row sends the rest.
        if left == 0:
            nc10d_rewind(wires, step, last)
            return at.DONE
        if moved == 0:
            store(streams + at.S_LEFT, coming)
            return nc10d_block_on(channel, step, segment, load(streams + at.S_READY), target, ~peer)
        store(streams + at.S_MOVED, load(streams + at.S_MOVED) + 1)


@njit(nogil=True)
def nc10d_bytes_left(row: int, segment: int, wire: int) -> int:
    """Return the bytes that a row has not moved yet."""
    progress = at.W_TAKEN if load(row) == StepKind.TAKE else at.W_SENT
    return nc10d_length(row, segment) - load(wire + progress)


@njit(nogil=True)
def nc10d_bytes_to_come(row: int, segment: int, wire: int) -> int:
    """Return the bytes that a row has not moved yet, later segments included."""
    nbytes = load(row + packed.NBYTES)
    later = max(load(row + packed.TOTAL), nbytes) - segment * nbytes - nc10d_length(row, segment)
    return later + nc10d_bytes_left(row, segment, wire)


@njit(nogil=True)
def nc10d_move_row(channel: int, users: int, row: int, parity: int, segment: int, wire: int) -> int:
    """Move the bytes of a row that the socket takes; return how many, or LOST."""
    if nc10d_bytes_left(row, segment, wire) == 0:
        return 0
    kind = load(row)
    if kind == StepKind.SEND_HEADER:
        address = load(channel + at.C_SELF) + at.AWAY_HEADER
        # Written once: a header that has gone in part must not change.
        if load(wire + at.W_SENT) == 0:
            atomics.move(address, load(channel + at.C_MESSAGE) + at.D_TAG, at.LINK_HEADER_BYTES)
            nc10d_write_site(channel, address + at.LINK_HEADER_BYTES)
    else:
        operand = row + (packed.DST if kind == StepKind.TAKE else packed.SRC)
        address = nc10d_operand(channel, users, operand, parity, segment)
    nbytes = nc10d_length(row, segment)
    progress = at.W_TAKEN if kind == StepKind.TAKE else at.W_SENT
    moved = sockets.nc10d_transfer(wire, progress, address, nbytes)
    return moved if moved >= 0 else nc10d_record_loss(channel, wire, moved)


@njit(nogil=True)
def nc10d_record_loss(channel: int, wire: int, answer: int) -> int:
    """Record the failed wire and the errno; return LOST."""
    store(load(channel + at.C_STREAMS) + at.S_ERROR, -1 - answer)
    store(channel + at.C_BLOCKED_ON, ~load(wire + at.W_RANK))
    return at.LOST


@njit(nogil=True)
def nc10d_rewind(wires: int, step: int, last: int) -> None:
    """Make a FLOW's wires ready for the next one."""
    row = step
    while row < last:
        row += packed.STEP
        if load(row) == StepKind.PUSH:
            continue  # the progress belongs to the row that goes on
        wire = load(wires + 8 * load(row + packed.PEER))
        store(wire + (at.W_TAKEN if load(row) == StepKind.TAKE else at.W_SENT), 0)


@compiled_callback("int64(int64)")
def _step(channel: int) -> int:
    step, segment = load(channel + at.C_PC), load(channel + at.C_SEGMENT)
    users, parity = load(channel + at.C_USERS), load(channel + at.C_PARITY)
    kind = load(step)
    if kind == StepKind.FLOW:
        return nc10d_flow(channel, users, step, parity, segment)
    if kind == StepKind.CALL_HEADER:
        header = nc10d_operand(channel, users, step + packed.DST, parity, segment)
        store(header, load(channel + at.C_OPS))
        store(header + 8, load(step + packed.FINGERPRINT))
        atomics.move(header + at.RECORD_TEXT, load(step + packed.RECORD), at.TEXT_BYTES)
        nc10d_write_site(channel, header + at.RECORD_SITE)
        return at.DONE
    src = nc10d_operand(channel, users, step + packed.SRC, parity, segment)
    if kind == StepKind.CHECK_HEADER:
        return nc10d_check_header(channel, step, src)
    own = nc10d_operand(channel, users, step + packed.OWN, parity, segment)
    # CHECK_SIZES: what one of the two ranks sends against what the other awaits, both ways.
    me, peer = load(channel + at.C_RANK), ~load(step + packed.PEER)
    if load(src) != load(own + 8):
        return nc10d_report_sizes(channel, peer, load(src), me, load(own + 8))
    if load(own) != load(src + 8):
        return nc10d_report_sizes(channel, me, load(own), peer, load(src + 8))
    return at.DONE


@compiled_callback("int64(int64)")
def _pull(channel: int) -> int:
    sent = load(load(channel + at.C_COUNTERS))
    header = sent + at.AWAY_HEADER
    streams = load(channel + at.C_STREAMS)
    wire = load(load(streams + at.S_WIRES))
    ready = load(streams + at.S_READY)
    while load(wire + at.W_TAKEN) < at.AWAY_HEADER_BYTES:
        target = load_acquire(ready) + 1
        moved = sockets.nc10d_transfer(wire, at.W_TAKEN, header, at.AWAY_HEADER_BYTES)
        if moved < 0:
            return nc10d_record_loss(channel, wire, moved)
        if moved == 0:
            store(streams + at.S_COUNT, 0)
            store(streams + at.S_LEFT, 0)
            sockets.nc10d_record_wire(streams, wire, at.WANT_IN)
            store(channel + at.C_BLOCKED_AT, ready)
            store(channel + at.C_BLOCKED_FOR, target)
            store(channel + at.C_BLOCKED_ON, ~load(wire + at.W_RANK))
            return at.BLOCKED
    store(wire + at.W_TAKEN, 0)
    # Copied to where a sender on this host would have put the header: nc10d_match_head reads there.
    cell = load(channel + at.C_CELL)
    atomics.move(cell + at.CELL_HEADER, header, at.LINK_HEADER_BYTES)
    atomics.move(cell + at.CELL_SITE, header + at.LINK_HEADER_BYTES, at.SITE_BYTES)
    # Last: other threads that match look at the counter first.
    store_release(sent, load(channel + at.C_TICKS) + 1)
    return at.DONE


@compiled_callback("int64(int64)")
def _linger(channel: int) -> int:
    # Patience in vain halves; patience in which bytes came doubles. Where ranks share a core,
    # looking again only keeps another rank from running.
    streams = load(channel + at.C_STREAMS)
    if load(streams + at.S_LEFT) > MUCH:
        store(streams + at.S_TRIES, -1)  # the next bytes will have come while this thread sleeps
        return 0
    moved, patience = load(streams + at.S_MOVED), load(streams + at.S_PATIENCE)
    tries = load(streams + at.S_TRIES)
    if moved != load(streams + at.S_LAST):
        store(streams + at.S_LAST, moved)
        if tries >= 0:
            longest = load(channel + at.C_SPIN) + load(channel + at.C_YIELD)
            store(streams + at.S_PATIENCE, min(max(2 * patience, SHORTEST_LINGER), longest))
        tries = 0
    elif tries > patience:
        store(streams + at.S_TRIES, -1)
        store(streams + at.S_PATIENCE, max(patience >> 1, SHORTEST_LINGER))
        return 0
    store(streams + at.S_TRIES, max(tries, 0) + 1)
    # Each look is a system call: after some, a pause is too short to be worth keeping the core.
    if tries < PAUSES:
        atomics.pause()
    else:
        atomics.yield_core()
    return 1


@compiled_callback("int64(int64)")
def _sleep(channel: int) -> int:
    until = load(load(channel + at.C_STREAMS) + at.S_UNTIL)
    abort = load(channel + at.C_AREA) + at.AREA_ABORT
    while True:
        if load_acquire(abort) != 0 or load_acquire(channel + at.C_BROKEN) != 0:
            return at.ABORTED
        if sockets.nc10d_poll(channel, POLL_MS):
            return at.DONE
        if atomics.nc10d_now() >= until:
            return at.BLOCKED


@compiled_callback("int64(int64)")
def _arm(channel: int) -> int:
    sockets.nc10d_watch_all(channel)
    return at.DONE


FUNCTIONS: dict[int, Any] = {
    at.S_STEP: _step,
    at.S_PULL: _pull,
    at.S_LINGER: _linger,
    at.S_SLEEP: _sleep,
    at.S_ARM: _arm,
}
"""Functions that the engine calls by address, so that jobs on one host need not compile them.

Each takes a channel. `_step` carries out the step at C_PC: DONE, BLOCKED or a failure. `_pull`
takes the header of a wire's next message: DONE, BLOCKED or LOST. `_linger` pauses between two looks
at sockets: 0 when a sleep is due. `_sleep` sleeps until S_UNTIL: DONE, ABORTED or BLOCKED. `_arm`
has the poller thread watch the sockets.
"""
