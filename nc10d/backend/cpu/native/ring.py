"""A channel's ring: what was submitted and has not ended, in the order in which it is to run.

It is a word that is one less than how many it holds (a power of two), and their descriptors. A full
one gives way to one that is twice as long, and stays as it is: somebody may still be reading it.
Who appends, changes the order or replaces the ring holds C_SUBMITTING; who takes from it, the
channel's lock.
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
    """Return where the descriptor number `place` of all that were ever appended is kept."""
    ring = load_acquire(channel + at.C_RING)
    return ring + 8 + 8 * (place & load(ring))


@njit(nogil=True)
def nc10d_begin_to_change(channel: int) -> None:
    """Be the only one who changes the ring, for a few instructions."""
    while swap_if(channel + at.C_SUBMITTING, 0, 1) != 0:
        yield_core()


@njit(nogil=True)
def nc10d_end_change(channel: int) -> None:
    """Let others change the ring."""
    swap_if(channel + at.C_SUBMITTING, 1, 0)


@njit(nogil=True)
def nc10d_append(channel: int, descriptor: int) -> int:
    """Append a descriptor to the ring: DONE, or BUSY if it is full; wakes nobody.

    NEW_SITE, and nothing has happened, if it is the first call of its line of the program.
    """
    site = nc10d_site(channel)
    if site == at.NEW_SITE:
        return at.NEW_SITE
    store(descriptor + at.D_SITE, site)
    nc10d_begin_to_change(channel)
    tail = load(channel + at.C_TAIL)
    full = tail - load_acquire(channel + at.C_HEAD) > load(load(channel + at.C_RING))
    if not full:
        store(nc10d_slot(channel, tail), descriptor)
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
"""lengthen(channel, ring): go on with a longer ring; BUSY if another one is as long already."""

__getattr__ = entry_points(__name__)
