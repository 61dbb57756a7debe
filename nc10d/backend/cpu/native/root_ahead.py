"""Rounds in which one rank leads: it shows its call and what peers get, and goes on.

Each rank has a ring of lines in its area, one a round. Who follows compares calls when it comes;
who leads looks back once all have left the round. Steps: `lead`, `listen`, `follow` in steps.py.
"""

from __future__ import annotations

from numba import njit

from nc10d.backend.cpu.native.atomics import exchange, load, load_acquire, move, store
from nc10d.backend.cpu.native.offsets import (
    AHEAD_BYTES,
    AHEAD_CALL,
    AHEAD_OPS,
    AHEAD_PAYLOAD,
    AHEAD_RING,
    AREA_AHEAD,
    C_BLOCKED_ON,
    C_DISAGREED,
    C_LED,
    C_MET,
    C_OPS,
    C_RANK,
    C_REACH,
    C_ROUND,
    C_SEQ,
    C_SIZE,
    DONE,
    MISMATCH,
    R_ARENAS,
    R_ROW,
)


@njit(nogil=True)
def nc10d_entry(channel: int, rank: int, number: int) -> int:
    """Return a rank's line for round `number`."""
    area = load(load(channel + C_REACH) + R_ARENAS + R_ROW * rank + 16)
    return area + AREA_AHEAD + AHEAD_BYTES * (number % AHEAD_RING)


@njit(nogil=True)
def nc10d_lead(channel: int, src: int, nbytes: int, call: int) -> None:
    """Show what my peers get, for them to take when they come: I need not wait for them."""
    number = load(channel + C_ROUND)
    entry = nc10d_entry(channel, load(channel + C_RANK), number)
    store(entry, load(channel + C_SEQ) + 1)
    store(entry + AHEAD_CALL, call)
    store(entry + AHEAD_OPS, load(channel + C_OPS))
    move(entry + AHEAD_PAYLOAD, src, nbytes)
    if load(channel + C_LED) == 0:
        store(channel + C_LED, number + 1)


@njit(nogil=True)
def nc10d_listen(channel: int, peer: int) -> int:
    """Show that I follow a peer in this round; MISMATCH if that shows that it follows, too.

    Of ranks that follow each other in a circle one shows it last, and sees it.
    """
    number, tick = load(channel + C_ROUND), load(channel + C_SEQ) + 1
    exchange(nc10d_entry(channel, load(channel + C_RANK), number), -tick)
    if load_acquire(nc10d_entry(channel, peer, number)) == -tick:
        store(channel + C_BLOCKED_ON, peer)
        return MISMATCH
    return DONE


@njit(nogil=True)
def nc10d_follow(channel: int, dst: int, peer: int, nbytes: int, call: int) -> int:
    """Take what a peer shows; MISMATCH if it doesn't lead in this round, or in another call."""
    entry = nc10d_entry(channel, peer, load(channel + C_ROUND))
    if load(entry) != load(channel + C_SEQ) + 1 or load(entry + AHEAD_CALL) != call:
        store(channel + C_BLOCKED_ON, peer)
        return MISMATCH
    move(dst, entry + AHEAD_PAYLOAD, nbytes)
    return DONE


@njit(nogil=True)
def nc10d_settle(channel: int) -> int:
    """Look at the rounds I led in and all have left: MISMATCH if a peer has led there, too.

    Whoever followed somebody else, or called anything else, has found that out by itself. Of two
    that led one did so before it knew that the other had left that round. It has to learn that
    before it is MOST_AHEAD further, when neither line can have been used again, and then it looks.
    """
    me, met, end = load(channel + C_RANK), load(channel + C_MET), load(channel + C_ROUND)
    for number in range(load(channel + C_LED) - 1, end):
        mine = nc10d_entry(channel, me, number)
        tick = load(mine)
        if abs(tick) > met:
            store(channel + C_LED, number + 1)
            return DONE
        for peer in range(load(channel + C_SIZE) if tick > 0 else 0):
            if peer != me and load(nc10d_entry(channel, peer, number)) == tick:
                store(channel + C_BLOCKED_ON, peer)
                store(channel + C_DISAGREED, load(mine + AHEAD_OPS))
                return MISMATCH
    store(channel + C_LED, 0)
    return DONE
