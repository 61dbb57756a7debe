"""Wires to other hosts: sockets that never block, and how a thread arms them before a sleep.

A wire is a socket to a rank, with the progress of the current transfer in each direction. A channel
that is blocked on sockets waits for a counter like any other channel: the ready counter. A thread
that is about to sleep arms the wires that the channel waits for. The poller thread sleeps in epoll
for all channels of a rank, and raises the ready counter when a wire is ready. Addresses in,
integers out.

    W_ARMED of a wire        epoll watches it for          changed under W_LOCK by
    0                        nothing                       the poller thread, when it has fired
    WANT_IN, WANT_OUT, both  reading, writing, both        a thread that arms it

Invariant: a ready counter is read before the sockets are tried, so a socket that gets ready after
the try raises the counter to the awaited value or beyond.
"""

from __future__ import annotations

import errno
import platform
import select
import socket

import numpy as np
from numba import njit, types

from nc10d.backend.cpu.native import atomics, waiting
from nc10d.backend.cpu.native import offsets as at
from nc10d.backend.cpu.native.atomics import load, load_acquire, store, store_release
from nc10d.backend.cpu.native.interpreter import nc10d_ring_bells
from nc10d.backend.cpu.native.ring import nc10d_match_head
from nc10d.kernels.cache import entry_points, on_demand

# The kernel packs an epoll_event on x86-64 only: 4 bytes of events, 8 of data.
PACKED = platform.machine() in ("x86_64", "AMD64")
EVENT_BYTES = 12 if PACKED else 16
QUIET = int(socket.MSG_DONTWAIT) | int(socket.MSG_NOSIGNAL)
EAGAIN, EINTR = errno.EAGAIN, errno.EINTR
CTL_ADD, CTL_MOD, ONESHOT = 1, 3, int(select.EPOLLONESHOT)  # linux/eventpoll.h
EVENTS = 64
# Most bytes in a call, so that no direction starves the other. Smaller bursts cost more: a further
# call takes longer than bytes that have left the L2 cache.
BURST = 1024 * 1024

_L, _I = types.int64, types.int32
_send = types.ExternalFunction("send", _L(_I, _L, _L, _I))
_recv = types.ExternalFunction("recv", _L(_I, _L, _L, _I))
_epoll_ctl = types.ExternalFunction("epoll_ctl", _I(_I, _I, _I, _L))
_epoll_wait = types.ExternalFunction("epoll_wait", _I(_I, _L, _I, _I))
_poll_sockets = types.ExternalFunction("poll", _I(_L, _L, _I))
_errno = types.ExternalFunction("__errno_location", _L())


@njit(nogil=True)
def nc10d_transfer(wire: int, progress: int, address: int, nbytes: int) -> int:
    """Send or receive (`progress` is W_SENT or W_TAKEN) as much of `nbytes` as the socket takes.

    Returns the bytes moved, 0 if the socket is not ready, or -1 - errno; -1 is an orderly end.
    """
    fd, done = np.int32(load(wire + at.W_FD)), load(wire + progress)
    count = min(nbytes - done, BURST)
    if progress == at.W_SENT:
        moved = _send(fd, address + done, count, np.int32(QUIET))
    else:
        moved = _recv(fd, address + done, count, np.int32(QUIET))
    if moved > 0:
        store(wire + progress, done + moved)
        return moved
    if moved == 0:
        return -1
    error = atomics.load_acquire_32(_errno())
    return 0 if error in (EAGAIN, EINTR) else -1 - error


@njit(nogil=True)
def nc10d_record_wire(streams: int, wire: int, want: int) -> None:
    """Record that the channel waits for a wire; `nc10d_arm_sockets` arms all recorded wires."""
    count = load(streams + at.S_COUNT)
    place = load(streams + at.S_WAITING) + 16 * count
    store(place, wire)
    store(place + 8, want)
    store(streams + at.S_COUNT, count + 1)


@njit(nogil=True)
def nc10d_control_epoll(epoll: int, operation: int, fd: int, events: int, data: int) -> None:
    """Set the events for which epoll watches a descriptor."""
    event = atomics.scratch()
    if PACKED:
        store(event, events | (data << 32))
        store(event + 8, data >> 32)
    else:
        store(event, events)
        store(event + 8, data)
    _epoll_ctl(np.int32(epoll), np.int32(operation), np.int32(fd), event)


@njit(nogil=True)
def nc10d_lock_wire(wire: int) -> None:
    """Guard a wire's arming; held for a few instructions and one system call."""
    while atomics.swap_if(wire + at.W_LOCK, 0, 1) != 0:
        atomics.yield_core()


@njit(nogil=True)
def nc10d_watch(epoll: int, wire: int, want: int, ready: int) -> None:
    """Have the poller thread raise the counter `ready` once, as soon as a wire is ready."""
    nc10d_lock_wire(wire)
    store(wire + (at.W_READY_IN if want == at.WANT_IN else at.W_READY_OUT), ready)
    armed = load(wire + at.W_ARMED)
    if armed & want == 0:
        armed |= want
        store(wire + at.W_ARMED, armed)
        # Level-triggered: a socket that got ready between the try and this call fires at once.
        nc10d_control_epoll(epoll, CTL_MOD, load(wire + at.W_FD), armed | ONESHOT, wire)
    store_release(wire + at.W_LOCK, 0)


@njit(nogil=True)
def nc10d_poll(channel: int, timeout_ms: int) -> bool:
    """Sleep until a wire that a channel waits for is ready; False after the timeout."""
    # For a thread that waits for nothing else: the kernel wakes it directly, not the poller.
    streams = load(channel + at.C_STREAMS)
    waiting, table = load(streams + at.S_WAITING), load(streams + at.S_POLL)
    count = load(streams + at.S_COUNT)
    for i in range(count):
        # struct pollfd: int fd, short events, short revents
        wire, want = load(waiting + 16 * i), load(waiting + 16 * i + 8)
        store(table + 8 * i, load(wire + at.W_FD) | (want << 32))
    return _poll_sockets(table, count, np.int32(timeout_ms)) > 0


@njit(nogil=True)
def nc10d_watch_all(channel: int) -> None:
    """Have the poller thread watch every wire that a channel blocked on sockets waits for."""
    streams = load(channel + at.C_STREAMS)
    table = load(streams + at.S_WAITING)
    epoll, ready = load(streams + at.S_EPOLL), load(streams + at.S_READY)
    for i in range(load(streams + at.S_COUNT)):
        nc10d_watch(epoll, load(table + 16 * i), load(table + 16 * i + 8), ready)


@njit(nogil=True)
def nc10d_report_ready(rank_block: int, wire: int) -> None:
    """Raise the ready counters of the channels that wait for a wire; it was armed and is ready."""
    nc10d_lock_wire(wire)
    armed = atomics.exchange(wire + at.W_ARMED, 0)  # one-shot: epoll has disarmed both directions
    inward, outward = load(wire + at.W_READY_IN), load(wire + at.W_READY_OUT)
    store(wire + at.W_READY_IN, 0)
    store(wire + at.W_READY_OUT, 0)
    store_release(wire + at.W_LOCK, 0)
    if armed != 0:
        nc10d_count_up(rank_block, inward)
        nc10d_count_up(rank_block, outward)


@njit(nogil=True)
def nc10d_count_up(rank_block: int, ready: int) -> None:
    """Raise a ready counter and wake the ranks that sleep there; 0 is no counter."""
    if ready != 0:
        atomics.add(ready, 1)
        if load_acquire(ready + at.LINE_SLEEPERS) != 0:
            nc10d_ring_bells(rank_block, atomics.exchange(ready + at.LINE_SLEEPERS, 0))


@on_demand("int64(int64, int64, int64, int64)")
def _poll(rank_block: int, epoll: int, events: int, slice_ms: int) -> int:
    """Run the poller thread's loop, which ends on P_STOP."""
    while load_acquire(rank_block + at.P_STOP) == 0:
        count = _epoll_wait(np.int32(epoll), events, np.int32(EVENTS), np.int32(slice_ms))
        for i in range(count):
            event = events + EVENT_BYTES * i
            wire = load(event + (4 if PACKED else 8))
            if wire != 0:
                nc10d_report_ready(rank_block, wire)
        if count > 0:
            waiting.nc10d_wake_own(rank_block)
    return 0


@on_demand("int64(int64, int64, int64, int64)")
def _add_to_epoll(epoll: int, fd: int, events: int, data: int) -> int:
    """Register a descriptor; `data` is the wire's block."""
    nc10d_control_epoll(epoll, CTL_ADD, fd, events, data)
    return 0


@on_demand("int64(int64)")
def _peek(channel: int) -> int:
    """Take the header of a wire's next message, or arm the wire for it."""
    if waiting.nc10d_try_lock(channel):
        if load(channel + at.C_DESCRIPTOR) == 0 and load(channel + at.C_BROKEN) == 0:
            nc10d_match_head(channel)
            waiting.nc10d_arm_sockets(channel)
        waiting.nc10d_unlock(channel)
    return 0


__getattr__ = entry_points(__name__)
