"""The log: what one rank has done last, in all of its groups, in a ring that never grows.

An entry belongs to a call from when it has entered until it has ended, or to a message that has
ended. Who writes holds the channel's lock; entries are taken one by one, so channels need no other
order. Who reads believes an entry only whose stamp is the same before and after.
"""

from __future__ import annotations

from numba import njit

from nc10d.backend.cpu.native.atomics import add, load, move, store, store_release
from nc10d.backend.cpu.native.offsets import (
    C_BEGUN,
    C_LABEL,
    C_LOGGED,
    C_MESSAGE,
    C_OPS,
    C_PROCESS,
    C_SITE,
    C_STAMP,
    D_TAG,
    E_BEGUN,
    E_ENDED,
    E_LABEL,
    E_SEQ,
    E_SITE,
    E_STAMP,
    E_TEXT,
    LINK_HEADER_BYTES,
    LOG_BYTES,
    LOG_SLOTS,
    P_LOG,
    P_LOG_NEXT,
    TEXT_BYTES,
)


@njit(nogil=True)
def nc10d_log_end(channel: int, now: int) -> None:
    """Note that the call which a channel has logged last is over."""
    entry = load(channel + C_LOGGED)
    if entry != 0:
        # The ring may have come round meanwhile.
        if load(entry + E_STAMP) == load(channel + C_STAMP):
            store(entry + E_ENDED, now)
        store(channel + C_LOGGED, 0)


@njit(nogil=True)
def nc10d_take_entry(channel: int, begun: int, ended: int) -> int:
    """Take the next entry for what a channel does; it counts when it has its stamp, C_STAMP."""
    process = load(channel + C_PROCESS)
    place = add(process + P_LOG_NEXT, 1)
    entry = load(process + P_LOG) + LOG_BYTES * (place & (LOG_SLOTS - 1))
    store_release(entry + E_STAMP, 0)
    store(entry + E_LABEL, load(channel + C_LABEL))
    store(entry + E_SEQ, load(channel + C_OPS))
    store(entry + E_BEGUN, begun)
    store(entry + E_ENDED, ended)
    store(entry + E_SITE, load(channel + C_SITE))
    store(channel + C_STAMP, place + 1)
    return entry


@njit(nogil=True)
def nc10d_log_call(channel: int, now: int, text: int) -> None:
    """Log a call that begins; the call before it in its batch, if there is one, is over."""
    nc10d_log_end(channel, now)
    entry = nc10d_take_entry(channel, now, 0)
    move(entry + E_TEXT, text, TEXT_BYTES)
    store_release(entry + E_STAMP, load(channel + C_STAMP))
    store(channel + C_LOGGED, entry)


@njit(nogil=True)
def nc10d_end_message(channel: int, now: int) -> None:
    """Count a message that is over, and log it."""
    store(channel + C_OPS, load(channel + C_OPS) + 1)
    begun = load(channel + C_BEGUN)
    entry = nc10d_take_entry(channel, begun if begun != 0 else now, now)
    move(entry + E_TEXT, load(channel + C_MESSAGE) + D_TAG, LINK_HEADER_BYTES)
    store_release(entry + E_STAMP, load(channel + C_STAMP))
