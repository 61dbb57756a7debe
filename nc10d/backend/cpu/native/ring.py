"""A channel's ring: the submissions that have not ended, in the order in which they run.

    word 0       capacity - 1 (the capacity is a power of two)
    word 1 + i   address of the descriptor number n, for n & (capacity - 1) == i

    change                                   needs
    append, reorder, replace the ring        C_SUBMITTING
    take from the head                       C_LOCK

A full ring is replaced by a ring with twice the length and stays allocated: another thread may
still read it. At that moment places C_HEAD to C_TAIL - 1 hold the same descriptors in both;
afterwards only the new ring changes.

Submissions run in ring order, but for receives. Messages with one tag arrive in order, as MPI's do:
the first posted receive with the tag gets the message at a link's head.
"""

from __future__ import annotations

from numba import njit

from nc10d.backend.cpu.native import atomics
from nc10d.backend.cpu.native import offsets as at
from nc10d.backend.cpu.native.atomics import load, load_acquire, store, store_release
from nc10d.backend.cpu.native.sites import nc10d_site
from nc10d.kernels.cache import entry_points, on_demand


@njit(nogil=True)
def nc10d_ring_word(channel: int, place: int) -> int:
    """Return the address of place `place`, counted over all descriptors ever appended."""
    # Acquire: a replaced ring is visible with all descriptors.
    ring = load_acquire(channel + at.C_RING)
    return ring + 8 + 8 * (place & load(ring))


@njit(nogil=True)
def nc10d_lock_ring(channel: int) -> None:
    """Lock the ring against other changes, for a few instructions."""
    # Yields instead of spinning: the holder may have lost its core in the middle.
    while atomics.swap_if(channel + at.C_SUBMITTING, 0, 1) != 0:
        atomics.yield_core()


@njit(nogil=True)
def nc10d_unlock_ring(channel: int) -> None:
    """Unlock the ring."""
    atomics.swap_if(channel + at.C_SUBMITTING, 1, 0)


@njit(nogil=True)
def nc10d_append(channel: int, descriptor: int) -> int:
    """Append a descriptor to the ring, without waking a thread.

    Returns DONE; BUSY if the ring is full; NEW_SITE, with nothing done, for the first call from a
    line in the user's program.
    """
    site = nc10d_site(channel)
    if site == at.NEW_SITE:
        return at.NEW_SITE
    # Before the append: from then on another thread may run the descriptor.
    store(descriptor + at.D_SITE, site)
    nc10d_lock_ring(channel)
    tail = load(channel + at.C_TAIL)
    full = tail - load_acquire(channel + at.C_HEAD) > load(load(channel + at.C_RING))
    if not full:
        store(nc10d_ring_word(channel, tail), descriptor)
        # Release: a thread that sees the new tail sees the place and the whole descriptor.
        store_release(channel + at.C_TAIL, tail + 1)
    nc10d_unlock_ring(channel)
    return at.BUSY if full else at.DONE


@njit(nogil=True)
def nc10d_match_head(channel: int) -> int:
    """Find the posted receive for the message at the head of a link; make it first in the ring.

    Returns DONE with the receive at the ring's head; UNMATCHED if no receive with the message's tag
    is posted; SIZES if bytes or dtypes differ. Without a message: BLOCKED, or IDLE if no receive is
    posted either, or LOST. The caller holds the channel's lock.
    """
    head = load(channel + at.C_HEAD)
    tail = load_acquire(channel + at.C_TAIL)
    sent = load(load(channel + at.C_COUNTERS))
    target = load(channel + at.C_TICKS) + 1
    if load_acquire(sent) < target and load(channel + at.C_STREAMS) != 0:
        answer = atomics.call_address(load(load(channel + at.C_STREAMS) + at.S_PULL), channel)
        if answer != at.DONE:
            return at.IDLE if head == tail else answer
    if load_acquire(sent) < target:
        store(channel + at.C_BLOCKED_AT, sent)
        store(channel + at.C_BLOCKED_FOR, target)
        store(channel + at.C_BLOCKED_ON, 0)
        return at.IDLE if head == tail else at.BLOCKED
    # The counter's acquire makes the header visible. The header stays until the message is taken.
    header = load(channel + at.C_CELL) + at.CELL_HEADER
    tag = load(header)
    store(channel + at.C_MESSAGE_TAG, tag)
    store(channel + at.C_MESSAGE_BYTES, load(header + 8))
    store(channel + at.C_MESSAGE_DTYPE, load(header + 16))
    place = head
    while place < tail:
        if load(load(nc10d_ring_word(channel, place)) + at.D_TAG) == tag:
            break
        place += 1
    if place == tail:
        # Python reads this without the lock, to move the message to the unexpected queue.
        store_release(channel + at.C_UNMATCHED, 1)
        return at.UNMATCHED
    store_release(channel + at.C_UNMATCHED, 0)
    found = load(nc10d_ring_word(channel, place))
    if place > head:
        # An appending thread may replace the ring by a longer one at the same time.
        nc10d_lock_ring(channel)
        while place > head:  # the other receives keep their order behind this one
            store(nc10d_ring_word(channel, place), load(nc10d_ring_word(channel, place - 1)))
            place -= 1
        store(nc10d_ring_word(channel, head), found)
        nc10d_unlock_ring(channel)
    if load(found + at.D_BYTES) != load(header + 8):
        return at.SIZES
    return at.DONE if load(found + at.D_DTYPE) == load(header + 16) else at.SIZES


@on_demand("int64(int64, int64)")
def _lengthen(channel: int, ring: int) -> int:
    """Replace the ring by a longer one; BUSY if as long already."""
    nc10d_lock_ring(channel)
    longer = load(ring) > load(load(channel + at.C_RING))
    if longer:
        for place in range(load_acquire(channel + at.C_HEAD), load(channel + at.C_TAIL)):
            store(ring + 8 + 8 * (place & load(ring)), load(nc10d_ring_word(channel, place)))
        store_release(channel + at.C_RING, ring)
    nc10d_unlock_ring(channel)
    return at.DONE if longer else at.BUSY


__getattr__ = entry_points(__name__)
