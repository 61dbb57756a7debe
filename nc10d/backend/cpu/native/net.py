"""The net thread: sleeps in epoll for all channels of a process that wait for other hosts."""

from __future__ import annotations

import numpy as np
from numba import njit, types

from nc10d.backend.cpu.native.atomics import (
    add,
    exchange,
    load,
    load_acquire,
    store,
    store_release,
)
from nc10d.backend.cpu.native.layout import (
    L_ARMED,
    L_LINE_IN,
    L_LINE_OUT,
    L_LOCK,
    P_STOP,
)
from nc10d.backend.cpu.native.sockets import (
    EVENT_BYTES,
    PACKED,
    nc10d_lock_link,
    nc10d_watch,
)
from nc10d.backend.cpu.native.waiting import nc10d_wake_own
from nc10d.kernels.cache import compiled, entry_point

EVENTS = 64
_I = types.int32
_epoll_wait = types.ExternalFunction("epoll_wait", _I(_I, types.int64, _I, _I))


@njit(nogil=True)
def nc10d_ready(link: int) -> None:
    """A link that was armed is ready: count up the lines of those who wait for it."""
    nc10d_lock_link(link)
    armed = exchange(link + L_ARMED, 0)  # it fires once, whatever for
    inward, outward = load(link + L_LINE_IN), load(link + L_LINE_OUT)
    store(link + L_LINE_IN, 0)
    store(link + L_LINE_OUT, 0)
    store_release(link + L_LOCK, 0)
    if armed != 0:
        if inward != 0:
            add(inward, 1)
        if outward != 0:
            add(outward, 1)


@compiled("int64(int64, int64, int64, int64)")
def _net(process: int, epoll: int, events: int, slice_ms: int) -> int:
    while load_acquire(process + P_STOP) == 0:
        count = _epoll_wait(np.int32(epoll), events, np.int32(EVENTS), np.int32(slice_ms))
        for i in range(count):
            at = events + EVENT_BYTES * i
            link = load(at + (4 if PACKED else 8))
            if link != 0:
                nc10d_ready(link)
        if count > 0:
            nc10d_wake_own(process)
    return 0


@compiled("int64(int64, int64, int64, int64)")
def _watch(epoll: int, link: int, want: int, line: int) -> int:
    nc10d_watch(epoll, link, want, line)
    return 0


net = entry_point(_net)
"""net(process, epoll, events, slice_ms): the net thread; ends when the process stops."""
watch = entry_point(_watch)
"""watch(epoll, link, want, line): have `line` counted up once, as soon as the link is ready."""
