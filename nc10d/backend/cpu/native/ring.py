"""A channel's ring: the submissions that have not ended, in the order in which they run.

    word 0       capacity - 1 (the capacity is a power of two)
    word 1 + i   address of the descriptor number n, for n & (capacity - 1) == i

    change                                   needs
    append, reorder, replace the ring        C_SUBMITTING
    take from the head                       C_LOCK

A full ring is replaced by a ring of twice the length and stays allocated: another thread may still
read it. Invariant: places C_HEAD to C_TAIL - 1 hold the same descriptors in both.
"""

from __future__ import annotations

from numba import njit

from nc10d.backend.cpu.native import offsets as at
from nc10d.backend.cpu.native.atomics import (
    load,
    load_acquire,
    store,
    store_release,
    swap_if,
    yield_core,
)
from nc10d.backend.cpu.native.sites import nc10d_site
from nc10d.kernels.lazy import EntryPoint, entry_points, on_demand


@njit(nogil=True)
def nc10d_slot(channel: int, place: int) -> int:
    """Return the address of place `place`, counted over all descriptors ever appended."""
    # Acquire: a replaced ring is visible with all of its descriptors.
    ring = load_acquire(channel + at.C_RING)
    return ring + 8 + 8 * (place & load(ring))


@njit(nogil=True)
def nc10d_begin_to_change(channel: int) -> None:
    """Lock the ring against other changes, for a few instructions."""
    # Yields instead of spinning: the holder may have lost its core in the middle.
    while swap_if(channel + at.C_SUBMITTING, 0, 1) != 0:
        yield_core()


@njit(nogil=True)
def nc10d_end_change(channel: int) -> None:
    """Unlock the ring."""
    swap_if(channel + at.C_SUBMITTING, 1, 0)


@njit(nogil=True)
def nc10d_append(channel: int, descriptor: int) -> int:
    """Append a descriptor to the ring, without waking a thread.

    Returns DONE; BUSY if the ring is full; NEW_SITE, with nothing done, for the first call from a
    line of the user's program.
    """
    site = nc10d_site(channel)
    if site == at.NEW_SITE:
        return at.NEW_SITE
    # Before the append: from then on another thread may run the descriptor.
    store(descriptor + at.D_SITE, site)
    nc10d_begin_to_change(channel)
    tail = load(channel + at.C_TAIL)
    full = tail - load_acquire(channel + at.C_HEAD) > load(load(channel + at.C_RING))
    if not full:
        store(nc10d_slot(channel, tail), descriptor)
        # Release: a thread that sees the new tail sees the place and the whole descriptor.
        store_release(channel + at.C_TAIL, tail + 1)
    nc10d_end_change(channel)
    return at.BUSY if full else at.DONE


@on_demand("int64(int64, int64)")
def _lengthen(channel: int, ring: int) -> int:
    nc10d_begin_to_change(channel)
    longer = load(ring) > load(load(channel + at.C_RING))
    if longer:
        for place in range(load_acquire(channel + at.C_HEAD), load(channel + at.C_TAIL)):
            store(ring + 8 + 8 * (place & load(ring)), load(nc10d_slot(channel, place)))
        store_release(channel + at.C_RING, ring)
    nc10d_end_change(channel)
    return at.DONE if longer else at.BUSY


lengthen: EntryPoint
"""lengthen(channel, ring): replace the ring by a longer one; BUSY if it is as long already."""

__getattr__ = entry_points(__name__)
