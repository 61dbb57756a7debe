"""A channel's ring: what was submitted and has not ended, in the order in which it is to run.

It holds as much as there is: a full one gives way to one that is twice as long. Who appends holds
C_SUBMITTING, who takes from it the channel's lock, who replaces it both.
"""

from __future__ import annotations

from numba import njit

from nc10d.backend.cpu.native.atomics import (
    load,
    load_acquire,
    nc10d_now,
    store,
    store_release,
    swap_if,
    yield_core,
)
from nc10d.backend.cpu.native.layout import (
    ABORTED,
    BUSY,
    C_BROKEN,
    C_HEAD,
    C_RING,
    C_SLOTS,
    C_SUBMITTING,
    C_TAIL,
    D_SITE,
    DONE,
    NEW_SITE,
)
from nc10d.backend.cpu.native.sites import nc10d_site
from nc10d.backend.cpu.native.waiting import nc10d_try_lock, nc10d_unlock
from nc10d.kernels.lazy import EntryPoint, entry_points, on_demand


@njit(nogil=True)
def nc10d_slot(channel: int, place: int) -> int:
    """Return where the descriptor number `place` of all that were ever appended is kept."""
    return load(channel + C_RING) + 8 * (place & (load(channel + C_SLOTS) - 1))


@njit(nogil=True)
def nc10d_begin_to_append(channel: int) -> None:
    """Be the only one who appends, for a few instructions."""
    while swap_if(channel + C_SUBMITTING, 0, 1) != 0:
        yield_core()


@njit(nogil=True)
def nc10d_append(channel: int, descriptor: int) -> int:
    """Append a descriptor to the ring: DONE, or BUSY if it is full; wakes nobody.

    NEW_SITE, and nothing has happened, if it is the first call of its line of the program.
    """
    site = nc10d_site(channel)
    if site == NEW_SITE:
        return NEW_SITE
    store(descriptor + D_SITE, site)
    nc10d_begin_to_append(channel)
    tail = load(channel + C_TAIL)
    full = tail - load_acquire(channel + C_HEAD) >= load(channel + C_SLOTS)
    if not full:
        store(nc10d_slot(channel, tail), descriptor)
        store_release(channel + C_TAIL, tail + 1)
    swap_if(channel + C_SUBMITTING, 1, 0)
    return BUSY if full else DONE


@on_demand("int64(int64, int64, int64, int64)")
def _lengthen(channel: int, slots: int, count: int, slice_ns: int) -> int:
    until = nc10d_now() + slice_ns
    while not nc10d_try_lock(channel):
        if load_acquire(channel + C_BROKEN) != 0:
            return ABORTED
        if nc10d_now() >= until:
            return BUSY
        yield_core()
    nc10d_begin_to_append(channel)
    longer = count > load(channel + C_SLOTS)
    if longer:
        for place in range(load(channel + C_HEAD), load(channel + C_TAIL)):
            store(slots + 8 * (place & (count - 1)), load(nc10d_slot(channel, place)))
        store(channel + C_RING, slots)
        store(channel + C_SLOTS, count)
    swap_if(channel + C_SUBMITTING, 1, 0)
    nc10d_unlock(channel)
    return DONE if longer else BUSY


lengthen: EntryPoint
"""lengthen(channel, slots, count, slice_ns): go on with a ring of `count` words at `slots`.

DONE; BUSY if it is that long already, or others have used the channel for all of a slice; ABORTED
if it is stopped.
"""

__getattr__ = entry_points(__name__)
