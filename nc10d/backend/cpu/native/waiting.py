"""Waiting for a counter: spin, then yield the core, then sleep on the rank's doorbell.

    order of a sleeper                     order of a rank that posts (interpreter.py)
    1. count itself in P_SLEEPING          1. change the counter (full fence)
    2. read the doorbell's value           2. look at the bits beside it
    3. set its rank's bit (full fence)     3. take them and ring each bell: change its value, wake
    4. look at the counter again
    5. sleep unless the bell has changed

Invariant: a change between 4 and 5 changes the bell's value, so the futex does not sleep. No wait
is longer than a slice: Python looks at deadlines, signals and peers' liveness in between.

Not done, because calls were no faster: longer spins; a second spin for a peer that has entered the
call; a worker that sleeps at once when another thread advances the channel.
"""

from __future__ import annotations

from numba import njit

from nc10d.backend.cpu.native import atomics
from nc10d.backend.cpu.native import offsets as at
from nc10d.backend.cpu.native.atomics import load, load_acquire, store

SLICE_NS = 50_000_000
"""The longest that an entry point waits before returning to Python."""
SHORTEST_SPIN = 8
SOON_NS = 5_000  # about as long as the longest spin takes
LONG_NS = 1_000_000
"""Longest time for yielding: where other threads want the core, a yield may last for 4 ms."""


@njit(nogil=True)
def nc10d_try_lock(channel: int) -> bool:
    """Lock a free channel; the lock word is the thread that holds the lock."""
    # The plain look first: a failed swap would take the cache line from the lock's holder.
    return (
        load_acquire(channel + at.C_LOCK) == 0
        and atomics.swap_if(channel + at.C_LOCK, 0, atomics.this_thread()) == 0
    )


@njit(nogil=True)
def nc10d_wake_own(rank_block: int) -> None:
    """Wake this rank's own sleepers after a change inside the process."""
    if load_acquire(rank_block + at.P_SLEEPING) != 0:
        bell = load(rank_block + at.P_BELL)
        atomics.add_32(bell, 1)
        atomics.nc10d_futex_wake(bell)


@njit(nogil=True)
def nc10d_unlock(channel: int) -> None:
    """Unlock the channel; wake the worker if submissions are in the ring."""
    # A full fence: a submitter appends and then tries the lock, this thread unlocks and then looks
    # at the ring. One of the two sees the other, so no submission is left without a thread.
    atomics.exchange(channel + at.C_LOCK, 0)
    if load_acquire(channel + at.C_HEAD) != load_acquire(channel + at.C_TAIL):
        nc10d_wake_own(load(channel + at.C_RANK_BLOCK))


@njit(nogil=True)
def nc10d_sleep(rank_block: int, bell_value: int, until: int) -> None:
    """Sleep until `until` (ns) or until the doorbell's value is no longer `bell_value`."""
    left = until - atomics.nc10d_now()
    if left > 0:
        atomics.nc10d_futex_wait(load(rank_block + at.P_BELL), bell_value, left)


@njit(nogil=True)
def nc10d_spin(channel: int, counter: int, target: int) -> bool:
    """Spin until a counter has come to `target`; False if the spin was in vain."""
    # A spin in vain halves the next spin and a good spin doubles the next: where another program
    # takes a core, or the peer computes, spinning only keeps other threads from running. A wait
    # that ends soon in nc10d_yield doubles the next, too: a short spin must not make all waits seem
    # long.
    limit = load(channel + at.C_SPIN_NOW)
    for _ in range(limit):
        if load_acquire(counter) >= target:
            store(channel + at.C_SPIN_NOW, min(2 * limit, load(channel + at.C_SPIN)))
            return True
        atomics.pause()
    store(channel + at.C_SPIN_NOW, max(limit >> 1, min(SHORTEST_SPIN, load(channel + at.C_SPIN))))
    return False


@njit(nogil=True)
def nc10d_spin_blocked(channel: int) -> bool:
    """Spin for the counter that blocks a channel; return whether it has come."""
    return nc10d_spin(channel, load(channel + at.C_BLOCKED_AT), load(channel + at.C_BLOCKED_FOR))


@njit(nogil=True)
def nc10d_yield(channel: int, counter: int, target: int, most: int) -> bool:
    """Yield the core, `most` times, until a counter has come to `target`; False if not."""
    # Where other threads want the core, each yield is long; then sleeping is better and no slower.
    if load_acquire(counter) >= target:
        return True
    # Yields are timed: one that comes back late means that other threads use this core.
    began = atomics.nc10d_now()
    for _ in range(most):
        atomics.yield_core()
        if load_acquire(counter) >= target:
            if atomics.nc10d_now() - began < SOON_NS:
                limit = max(SHORTEST_SPIN, 2 * load(channel + at.C_SPIN_NOW))
                store(channel + at.C_SPIN_NOW, min(limit, load(channel + at.C_SPIN)))
            return True
        if atomics.nc10d_now() - began > LONG_NS:
            return False
    return False


@njit(nogil=True)
def nc10d_wait_briefly(channel: int) -> bool:
    """Wait a moment for the counter that blocks a channel; return whether it has come."""
    yields = load(channel + at.C_LAUNCH_YIELDS)
    if yields == 0:
        return nc10d_spin_blocked(channel)
    counter, target = load(channel + at.C_BLOCKED_AT), load(channel + at.C_BLOCKED_FOR)
    began = atomics.nc10d_now()
    met = nc10d_yield(channel, counter, target, yields)
    ended = atomics.nc10d_now()
    if not met or ended - began > LONG_NS:  # yields in vain: none for some time
        store(channel + at.C_YIELD_FROM, ended + LONG_NS)
    return met


@njit(nogil=True)
def nc10d_waits_for_socket(channel: int) -> bool:
    """Return whether a blocked channel waits for sockets."""
    streams = load(channel + at.C_STREAMS)
    return streams != 0 and load(channel + at.C_BLOCKED_AT) == load(streams + at.S_READY)


@njit(nogil=True)
def nc10d_arm_sockets(channel: int) -> None:
    """Have the poller thread watch a channel's sockets; before the worker sleeps."""
    if nc10d_waits_for_socket(channel):
        atomics.call_address(load(load(channel + at.C_STREAMS) + at.S_ARM), channel)


@njit(nogil=True)
def nc10d_await_socket(channel: int, until: int) -> int:
    """Wait until a socket the channel is blocked on is ready: DONE, ABORTED or BLOCKED."""
    streams = load(channel + at.C_STREAMS)
    store(streams + at.S_UNTIL, until)
    return atomics.call_address(load(streams + at.S_SLEEP), channel)


@njit(nogil=True)
def nc10d_linger(channel: int) -> bool:
    """Pause between two looks at sockets; False when a sleep is due."""
    return atomics.call_address(load(load(channel + at.C_STREAMS) + at.S_LINGER), channel) != 0


@njit(nogil=True)
def nc10d_group_failed(channel: int) -> bool:
    """Return whether the group has failed; no new program begins then."""
    return load_acquire(load(channel + at.C_AREA) + at.AREA_ABORT) != 0


@njit(nogil=True)
def nc10d_has_come(channel: int) -> bool:
    """Return whether the counter that blocks a channel has come to the awaited value."""
    return load_acquire(load(channel + at.C_BLOCKED_AT)) >= load(channel + at.C_BLOCKED_FOR)


@njit(nogil=True)
def nc10d_sleep_for_either(one: int, other: int, until: int) -> int:
    """Sleep until the counter that blocks either channel has come: DONE, ABORTED or BLOCKED.

    Both channels are the same for a thread that waits for one.
    """
    rank_block = load(one + at.C_RANK_BLOCK)
    # Counted first: a thread in this process that changes something wakes only counted sleepers.
    atomics.add(rank_block + at.P_SLEEPING, 1)
    answer = at.BLOCKED
    while answer == at.BLOCKED:
        # The bell's value is read before the looks below: a later ring changes the value, and the
        # futex returns at once. The bit is set anew each time, since a post takes the bit away.
        bell = atomics.load_acquire_32(load(rank_block + at.P_BELL))
        for channel in (one, other):
            sleepers = load(channel + at.C_BLOCKED_AT) + at.LINE_SLEEPERS
            atomics.set_bits(sleepers, load(channel + at.C_BELL_BIT))
        broken = load_acquire(one + at.C_BROKEN) | load_acquire(other + at.C_BROKEN)
        if nc10d_has_come(one) or nc10d_has_come(other):
            answer = at.DONE
        elif broken != 0 or nc10d_group_failed(one):
            answer = at.ABORTED
        elif atomics.nc10d_now() >= until:
            break
        else:
            nc10d_sleep(rank_block, bell, until)
    atomics.add(rank_block + at.P_SLEEPING, -1)
    return answer


@njit(nogil=True)
def nc10d_await_counter(channel: int, until: int) -> int:
    """Wait until the counter the channel is blocked on has come: DONE, ABORTED or BLOCKED."""
    if nc10d_waits_for_socket(channel):
        return nc10d_await_socket(channel, until)
    counter, target = load(channel + at.C_BLOCKED_AT), load(channel + at.C_BLOCKED_FOR)
    if nc10d_yield(channel, counter, target, load(channel + at.C_YIELD)):
        return at.DONE
    return nc10d_sleep_for_either(channel, channel, until)


@njit(nogil=True)
def nc10d_transfer_count(channel: int) -> int:
    """Return a number that changes whenever a transfer on a channel's streams makes progress."""
    streams = load(channel + at.C_STREAMS)
    return load(streams + at.S_MOVED) if streams != 0 else 0


@njit(nogil=True)
def nc10d_drive(channel: int, slice_ns: int) -> int:
    """Advance the running program until done, failed, or the slice is over (BLOCKED)."""
    until = 0
    waits = 0
    while True:
        answer = atomics.call_address(load(channel + at.C_ADVANCE), channel)
        if answer != at.BLOCKED:
            return answer
        # Most waits are short: the clock is read only after a long wait, and now and then because
        # a long program may wait often and never long.
        waits += 1
        if waits & 15 == 0:
            now = atomics.nc10d_now()
            if until == 0:
                until = now + slice_ns
            elif now >= until:
                return at.BLOCKED
        # A socket's counter grows only while the socket is armed: a look runs the step again.
        if nc10d_waits_for_socket(channel):
            if nc10d_linger(channel):
                continue
        elif nc10d_spin_blocked(channel):
            continue
        if until == 0:
            until = atomics.nc10d_now() + slice_ns
        answer = nc10d_await_counter(channel, until)
        if answer != at.DONE:
            return answer
