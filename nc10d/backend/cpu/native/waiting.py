"""Waiting for a counter: spin, then yield the core, then sleep on the process's doorbell.

Before sleeping, a thread sets its rank's bit beside the counter that it waits for and looks again;
who changes the counter rings. No wait is longer than the slice it was given: deadlines, signals
and the liveness of peers are looked at in between, by Python.
"""

from __future__ import annotations

from numba import njit

from nc10d.backend.cpu.native import offsets as at
from nc10d.backend.cpu.native.atomics import (
    add,
    add_32,
    call_engine,
    exchange,
    load,
    load_acquire,
    load_acquire_32,
    nc10d_futex_wait,
    nc10d_futex_wake,
    nc10d_now,
    pause,
    set_bits,
    store,
    swap_if,
    this_thread,
    yield_core,
)

SHORTEST_SPIN = 8
SOON_NS = 5_000  # about as long as the longest spin takes
LONG_NS = 1_000_000
"""How long a thread yields at most: where others want the core, one yield may last for 4 ms."""


@njit(nogil=True)
def nc10d_try_lock(channel: int) -> bool:
    """Take the channel if nobody has it; the lock tells which thread did."""
    return (
        load_acquire(channel + at.C_LOCK) == 0
        and swap_if(channel + at.C_LOCK, 0, this_thread()) == 0
    )


@njit(nogil=True)
def nc10d_wake_own(process: int) -> None:
    """Wake this rank's own sleepers: something changed inside the process."""
    if load_acquire(process + at.P_SLEEPING) != 0:
        bell = load(process + at.P_BELL)
        add_32(bell, 1)
        nc10d_futex_wake(bell)


@njit(nogil=True)
def nc10d_unlock(channel: int) -> None:
    """Give the channel back; if submissions wait in it, tell the worker."""
    exchange(channel + at.C_LOCK, 0)
    if load_acquire(channel + at.C_HEAD) != load_acquire(channel + at.C_TAIL):
        nc10d_wake_own(load(channel + at.C_PROCESS))


@njit(nogil=True)
def nc10d_sleep(process: int, bell_value: int, until: int) -> None:
    """Sleep until the doorbell rings (it has not since `bell_value` was read) or `until`."""
    left = until - nc10d_now()
    if left > 0:
        nc10d_futex_wait(load(process + at.P_BELL), bell_value, left)


@njit(nogil=True)
def nc10d_spin(channel: int, flag: int, target: int) -> bool:
    """Spin until a counter has come to `target`; False if the spin was in vain.

    A spin in vain halves the next one and a good one doubles it: where another program takes a
    core, or the partner computes, spinning only keeps somebody else from running. So does a wait
    that yielding ended soon (nc10d_yield): a short spin must not make all waits seem long.
    """
    limit = load(channel + at.C_SPIN_NOW)
    for _ in range(limit):
        if load_acquire(flag) >= target:
            store(channel + at.C_SPIN_NOW, min(2 * limit, load(channel + at.C_SPIN)))
            return True
        pause()
    store(channel + at.C_SPIN_NOW, max(limit >> 1, min(SHORTEST_SPIN, load(channel + at.C_SPIN))))
    return False


@njit(nogil=True)
def nc10d_yield(channel: int, flag: int, target: int, most: int) -> bool:
    """Yield the core, `most` times, until a counter has come to `target`; False if it has not.

    Where others want the core each time takes long: sleeping is better then, and no slower.
    """
    if load_acquire(flag) >= target:
        return True
    began = nc10d_now()
    for _ in range(most):
        yield_core()
        if load_acquire(flag) >= target:
            if nc10d_now() - began < SOON_NS:
                limit = max(SHORTEST_SPIN, 2 * load(channel + at.C_SPIN_NOW))
                store(channel + at.C_SPIN_NOW, min(limit, load(channel + at.C_SPIN)))
            return True
        if nc10d_now() - began > LONG_NS:
            return False
    return False


@njit(nogil=True)
def nc10d_streaming(channel: int) -> bool:
    """Say whether what a blocked channel waits for is a socket."""
    streams = load(channel + at.C_STREAMS)
    return streams != 0 and load(channel + at.C_BLOCKED_AT) == load(streams + at.S_LINE)


@njit(nogil=True)
def nc10d_arm(channel: int) -> None:
    """Before the worker sleeps: have the net thread see to what a channel waits for."""
    if nc10d_streaming(channel):
        call_engine(load(load(channel + at.C_STREAMS) + at.S_ARM), channel)


@njit(nogil=True)
def nc10d_await_socket(channel: int, until: int) -> int:
    """Wait until a socket the channel is blocked on is ready: DONE, ABORTED or BLOCKED."""
    streams = load(channel + at.C_STREAMS)
    store(streams + at.S_UNTIL, until)
    return call_engine(load(streams + at.S_SLEEP), channel)


@njit(nogil=True)
def nc10d_linger(channel: int) -> bool:
    """Look after the time between two looks at sockets; False: sleep now."""
    return call_engine(load(load(channel + at.C_STREAMS) + at.S_LINGER), channel) != 0


@njit(nogil=True)
def nc10d_await_flag(channel: int, until: int) -> int:
    """Wait until the counter the channel is blocked on has come: DONE, ABORTED or BLOCKED."""
    flag = load(channel + at.C_BLOCKED_AT)
    target = load(channel + at.C_BLOCKED_FOR)
    if nc10d_streaming(channel):
        return nc10d_await_socket(channel, until)
    if nc10d_yield(channel, flag, target, load(channel + at.C_YIELD)):
        return at.DONE
    process = load(channel + at.C_PROCESS)
    abort = load(channel + at.C_AREA) + at.AREA_ABORT
    add(process + at.P_SLEEPING, 1)
    answer = at.BLOCKED
    while answer == at.BLOCKED:
        bell = load_acquire_32(load(process + at.P_BELL))
        set_bits(flag + at.LINE_SLEEPERS, load(channel + at.C_BELL_BIT))
        if load_acquire(flag) >= target:
            answer = at.DONE
        elif load_acquire(abort) != 0 or load_acquire(channel + at.C_BROKEN) != 0:
            answer = at.ABORTED
        elif nc10d_now() >= until:
            break
        else:
            nc10d_sleep(process, bell, until)
    add(process + at.P_SLEEPING, -1)
    return answer


@njit(nogil=True)
def nc10d_moved(channel: int) -> int:
    """Return a number that changes with every transfer of a channel's streams that got on."""
    streams = load(channel + at.C_STREAMS)
    return load(streams + at.S_MOVED) if streams != 0 else 0


@njit(nogil=True)
def nc10d_drive(channel: int, slice_ns: int) -> int:
    """Advance the program in hand until it is done, failed, or the slice is over (BLOCKED)."""
    until = 0
    waits = 0
    while True:
        answer = call_engine(load(channel + at.C_ADVANCE), channel)
        if answer != at.BLOCKED:
            return answer
        # Most waits are short: the clock is read only when one was not, and now and then, since
        # a long program may wait often and never long.
        waits += 1
        if waits & 15 == 0:
            now = nc10d_now()
            if until == 0:
                until = now + slice_ns
            elif now >= until:
                return at.BLOCKED
        if nc10d_streaming(channel):
            if nc10d_linger(channel):
                continue
            if until == 0:
                until = nc10d_now() + slice_ns
            answer = nc10d_await_flag(channel, until)
            if answer != at.DONE:
                return answer
        elif not nc10d_spin(
            channel, load(channel + at.C_BLOCKED_AT), load(channel + at.C_BLOCKED_FOR)
        ):
            if until == 0:
                until = nc10d_now() + slice_ns
            answer = nc10d_await_flag(channel, until)
            if answer != at.DONE:
                return answer
