"""The log: the latest calls and messages of one rank, in all its groups, in a fixed ring.

An entry describes a call, which may still run, or a message that has ended. A writer holds
the channel's lock and takes a place in the ring by an atomic add, so channels need no other order.
A reader trusts an entry only if the entry's stamp is the same before and after the read.
"""

from __future__ import annotations

from numba import njit

from nc10d.backend.cpu.native import offsets as at
from nc10d.backend.cpu.native.atomics import add, load, move, store, store_release


@njit(nogil=True)
def nc10d_log_end(channel: int, now: int) -> None:
    """Record the end of the call that a channel has logged last."""
    entry = load(channel + at.C_LOGGED)
    if entry != 0:
        # Another channel may have taken the entry since.
        if load(entry + at.E_STAMP) == load(channel + at.C_STAMP):
            store(entry + at.E_ENDED, now)
        store(channel + at.C_LOGGED, 0)


@njit(nogil=True)
def nc10d_take_entry(channel: int, begun: int, ended: int) -> int:
    """Take the next entry for a channel; the caller completes it and stores its stamp, C_STAMP."""
    rank_block = load(channel + at.C_RANK_BLOCK)
    place = add(rank_block + at.P_LOG_NEXT, 1)
    entry = load(rank_block + at.P_LOG) + at.LOG_BYTES * (place & (at.LOG_SLOTS - 1))
    # Stamp 0 first: a reader that catches the entry half written discards it.
    store_release(entry + at.E_STAMP, 0)
    store(entry + at.E_LABEL, load(channel + at.C_LABEL))
    store(entry + at.E_SEQ, load(channel + at.C_OPS))
    store(entry + at.E_BEGUN, begun)
    store(entry + at.E_ENDED, ended)
    store(entry + at.E_SITE, load(channel + at.C_SITE))
    store(channel + at.C_STAMP, place + 1)
    return entry


@njit(nogil=True)
def nc10d_log_call(channel: int, now: int, text: int) -> None:
    """Log the begin of a call; an earlier call in the batch has ended."""
    nc10d_log_end(channel, now)
    entry = nc10d_take_entry(channel, now, 0)
    move(entry + at.E_TEXT, text, at.TEXT_BYTES)
    store_release(entry + at.E_STAMP, load(channel + at.C_STAMP))
    store(channel + at.C_LOGGED, entry)


@njit(nogil=True)
def nc10d_log_message(channel: int, now: int) -> None:
    """Count and log a message that has ended."""
    store(channel + at.C_OPS, load(channel + at.C_OPS) + 1)
    begun = load(channel + at.C_BEGUN)
    entry = nc10d_take_entry(channel, begun if begun != 0 else now, now)
    move(entry + at.E_TEXT, load(channel + at.C_MESSAGE) + at.D_TAG, at.LINK_HEADER_BYTES)
    store_release(entry + at.E_STAMP, load(channel + at.C_STAMP))
