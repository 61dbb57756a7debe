"""The log: what one rank has done last, in all of its groups, in a ring that never grows.

An entry belongs to a call from when it has entered until it has ended, or to a message that has
ended. Who writes holds the channel's lock; entries are taken one by one, so channels need no other
order. Who reads believes an entry only whose stamp is the same before and after.
"""

from __future__ import annotations

from numba import njit

from nc10d.backend.cpu.native import offsets as at
from nc10d.backend.cpu.native.atomics import add, load, move, store, store_release


@njit(nogil=True)
def nc10d_log_end(channel: int, now: int) -> None:
    """Note that the call which a channel has logged last is over."""
    entry = load(channel + at.C_LOGGED)
    if entry != 0:
        # The ring may have come round meanwhile.
        if load(entry + at.E_STAMP) == load(channel + at.C_STAMP):
            store(entry + at.E_ENDED, now)
        store(channel + at.C_LOGGED, 0)


@njit(nogil=True)
def nc10d_take_entry(channel: int, begun: int, ended: int) -> int:
    """Take the next entry for what a channel does; it counts when it has its stamp, C_STAMP."""
    process = load(channel + at.C_PROCESS)
    place = add(process + at.P_LOG_NEXT, 1)
    entry = load(process + at.P_LOG) + at.LOG_BYTES * (place & (at.LOG_SLOTS - 1))
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
    """Log a call that begins; the call before it in its batch, if there is one, is over."""
    nc10d_log_end(channel, now)
    entry = nc10d_take_entry(channel, now, 0)
    move(entry + at.E_TEXT, text, at.TEXT_BYTES)
    store_release(entry + at.E_STAMP, load(channel + at.C_STAMP))
    store(channel + at.C_LOGGED, entry)


@njit(nogil=True)
def nc10d_end_message(channel: int, now: int) -> None:
    """Count a message that is over, and log it."""
    store(channel + at.C_OPS, load(channel + at.C_OPS) + 1)
    begun = load(channel + at.C_BEGUN)
    entry = nc10d_take_entry(channel, begun if begun != 0 else now, now)
    move(entry + at.E_TEXT, load(channel + at.C_MESSAGE) + at.D_TAG, at.LINK_HEADER_BYTES)
    store_release(entry + at.E_STAMP, load(channel + at.C_STAMP))
