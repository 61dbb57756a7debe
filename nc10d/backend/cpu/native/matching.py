"""Matching: find the posted receive for the message at the head of a link.

Messages of one tag arrive in order, as MPI's do: the first posted receive with the message's tag
gets it. The caller holds the channel's lock; reordering the ring takes C_SUBMITTING as well, since
an appending thread may replace the ring by a longer one at the same time.
"""

from __future__ import annotations

from numba import njit

from nc10d.backend.cpu.native import offsets as at
from nc10d.backend.cpu.native.atomics import call_engine, load, load_acquire, store, store_release
from nc10d.backend.cpu.native.ring import nc10d_begin_to_change, nc10d_end_change, nc10d_slot


@njit(nogil=True)
def nc10d_match(channel: int) -> int:
    """Find the posted receive for the message at the head of a link; make it first in the ring.

    Returns DONE with the receive at the ring's head, IDLE if nothing is posted, BLOCKED if no
    message has come yet, UNMATCHED if no receive with its tag is posted, SIZES if the sizes differ.
    """
    head = load(channel + at.C_HEAD)
    tail = load_acquire(channel + at.C_TAIL)
    sent = load(load(channel + at.C_FLAGS))
    target = load(channel + at.C_SEQ) + 1
    if load_acquire(sent) < target and load(channel + at.C_STREAMS) != 0:
        answer = call_engine(load(load(channel + at.C_STREAMS) + at.S_PULL), channel)
        if answer != at.DONE:
            return at.IDLE if head == tail else answer
    if load_acquire(sent) < target:
        store(channel + at.C_BLOCKED_AT, sent)
        store(channel + at.C_BLOCKED_FOR, target)
        store(channel + at.C_BLOCKED_ON, 0)
        return at.IDLE if head == tail else at.BLOCKED
    # The acquire of the counter makes the header visible. It stays until the message is taken.
    header = sent + at.LINK_TAG + at.LINK_HEADER_BYTES * (load(channel + at.C_ROUND) & 1)
    tag = load(header)
    store(channel + at.C_MESSAGE_TAG, tag)
    store(channel + at.C_MESSAGE_BYTES, load(header + 8))
    store(channel + at.C_MESSAGE_DTYPE, load(header + 16))
    place = head
    while place < tail:
        if load(load(nc10d_slot(channel, place)) + at.D_TAG) == tag:
            break
        place += 1
    if place == tail:
        # Python reads this without the lock, to move the message to the unexpected queue.
        store_release(channel + at.C_UNMATCHED, 1)
        return at.UNMATCHED
    store_release(channel + at.C_UNMATCHED, 0)
    found = load(nc10d_slot(channel, place))
    if place > head:
        nc10d_begin_to_change(channel)
        while place > head:  # the other receives keep their order behind it
            store(nc10d_slot(channel, place), load(nc10d_slot(channel, place - 1)))
            place -= 1
        store(nc10d_slot(channel, head), found)
        nc10d_end_change(channel)
    same = load(found + at.D_BYTES) == load(header + 8) and load(found + at.D_DTYPE) == load(
        header + 16
    )
    return at.DONE if same else at.SIZES
