"""The net thread: it sleeps in epoll for all channels of a process that wait for other hosts."""

from __future__ import annotations

import numpy as np
from numba import njit, types

from nc10d.backend.cpu.native import offsets as at
from nc10d.backend.cpu.native.atomics import add, exchange, load, load_acquire, store, store_release
from nc10d.backend.cpu.native.interpreter import nc10d_ring
from nc10d.backend.cpu.native.matching import nc10d_match
from nc10d.backend.cpu.native.sockets import EVENT_BYTES, PACKED, nc10d_control, nc10d_lock_link
from nc10d.backend.cpu.native.waiting import nc10d_arm, nc10d_try_lock, nc10d_unlock, nc10d_wake_own
from nc10d.kernels.lazy import EntryPoint, entry_points, on_demand

EVENTS = 64
CTL_ADD = 1  # linux/eventpoll.h
_I = types.int32
_epoll_wait = types.ExternalFunction("epoll_wait", _I(_I, types.int64, _I, _I))


@njit(nogil=True)
def nc10d_ready(process: int, link: int) -> None:
    """Count up the lines of the channels that wait for a link; it was armed and is ready."""
    nc10d_lock_link(link)
    armed = exchange(link + at.L_ARMED, 0)  # one-shot: it has fired for both directions
    inward, outward = load(link + at.L_LINE_IN), load(link + at.L_LINE_OUT)
    store(link + at.L_LINE_IN, 0)
    store(link + at.L_LINE_OUT, 0)
    store_release(link + at.L_LOCK, 0)
    if armed != 0:
        nc10d_count_up(process, inward)
        nc10d_count_up(process, outward)


@njit(nogil=True)
def nc10d_count_up(process: int, line: int) -> None:
    """Count a line up and wake the ranks that sleep on it; 0 is no line."""
    if line != 0:
        add(line, 1)
        if load_acquire(line + at.LINE_SLEEPERS) != 0:
            nc10d_ring(process, exchange(line + at.LINE_SLEEPERS, 0))


@on_demand("int64(int64, int64, int64, int64)")
def _net(process: int, epoll: int, events: int, slice_ms: int) -> int:
    while load_acquire(process + at.P_STOP) == 0:
        count = _epoll_wait(np.int32(epoll), events, np.int32(EVENTS), np.int32(slice_ms))
        for i in range(count):
            event = events + EVENT_BYTES * i
            link = load(event + (4 if PACKED else 8))
            if link != 0:
                nc10d_ready(process, link)
        if count > 0:
            nc10d_wake_own(process)
    return 0


@on_demand("int64(int64, int64, int64, int64)")
def _add_to_epoll(epoll: int, fd: int, events: int, data: int) -> int:
    nc10d_control(epoll, CTL_ADD, fd, events, data)
    return 0


@on_demand("int64(int64)")
def _peek(channel: int) -> int:
    if nc10d_try_lock(channel):
        if load(channel + at.C_DESCRIPTOR) == 0 and load(channel + at.C_BROKEN) == 0:
            nc10d_match(channel)
            nc10d_arm(channel)
        nc10d_unlock(channel)
    return 0


net: EntryPoint
"""net(process, epoll, events, slice_ms): the net thread; ends when the process stops."""
add_to_epoll: EntryPoint
"""add_to_epoll(epoll, fd, events, data): register a descriptor; data is its link's block."""
peek: EntryPoint
"""peek(channel): take the header of a link's next message, or arm the link for it."""

__getattr__ = entry_points(__name__)
