"""Submissions: how a channel's ring is filled, advanced and emptied.

Whoever holds a channel's lock may advance it: the caller of a synchronous operation, a thread
that waits for a submission, or the worker. Submissions run in the order of the ring, except that
a link's receiving end first finds the receive that a message is for.
"""

from __future__ import annotations

from numba import njit

from nc10d.backend.cpu.native import offsets as at
from nc10d.backend.cpu.native.atomics import (
    add,
    call_engine,
    exchange,
    keep_bits,
    load,
    load_acquire,
    nc10d_now,
    nc10d_write_event,
    set_bits,
    store,
    store_release,
)
from nc10d.backend.cpu.native.interpreter import nc10d_post
from nc10d.backend.cpu.native.log import nc10d_end_message, nc10d_log_end
from nc10d.backend.cpu.native.matching import nc10d_match
from nc10d.backend.cpu.native.ring import nc10d_append, nc10d_slot
from nc10d.backend.cpu.native.sites import nc10d_site
from nc10d.backend.cpu.native.waiting import (
    nc10d_arm,
    nc10d_await_flag,
    nc10d_drive,
    nc10d_linger,
    nc10d_moved,
    nc10d_spin,
    nc10d_streaming,
    nc10d_try_lock,
    nc10d_unlock,
    nc10d_wake_own,
)

# How often a launching thread looks again before it leaves the rest to the worker.
LOOKS = 4


@njit(nogil=True)
def nc10d_trace(channel: int, event: int) -> None:
    """Note an event of a channel, if a trace is wanted."""
    process = load(channel + at.C_PROCESS)
    buffer = load(process + at.P_TRACE)
    if buffer != 0:
        place = add(process + at.P_TRACE_NEXT, 1)
        if place < load(process + at.P_TRACE_SIZE):
            entry = buffer + at.TRACE_BYTES * place
            store(entry, nc10d_now())
            store(entry + 8, load(channel + at.C_TRACE_ID))
            store(entry + 16, event)
            store(entry + 24, load(channel + at.C_DESCRIPTOR))


@njit(nogil=True)
def nc10d_begin(channel: int, program: int, users: int) -> None:
    """Point the channel at a program."""
    store(channel + at.C_PC, program)
    store(channel + at.C_SEGMENT, 0)
    store(channel + at.C_PEER, 0)
    store(channel + at.C_USERS, users)


@njit(nogil=True)
def nc10d_aborted(channel: int) -> bool:
    """Say whether the group has failed: what its peers have shown for a call counts no more."""
    return load_acquire(load(channel + at.C_AREA) + at.AREA_ABORT) != 0


@njit(nogil=True)
def nc10d_run(channel: int, program: int, x: int, y: int, slice_ns: int) -> int:
    """Run a program here and now if the channel is free; see `run`.

    Its arrays are x and y or, if x is 0, lie in a table at y.
    """
    site = nc10d_site(channel)
    if site == at.NEW_SITE:
        return at.NEW_SITE
    if not nc10d_try_lock(channel):
        return at.BUSY
    failed = load(channel + at.C_BROKEN) != 0 or nc10d_aborted(channel)
    if failed or load(channel + at.C_HEAD) != load_acquire(channel + at.C_TAIL):
        nc10d_unlock(channel)
        return at.BUSY
    store(channel + at.C_SITE, site)
    if x == 0:
        nc10d_begin(channel, program, y)
    else:
        store(channel + at.C_OWN_USERS, x)
        store(channel + at.C_OWN_USERS + 8, y)
        nc10d_begin(channel, program, channel + at.C_OWN_USERS)
    answer = nc10d_drive(channel, slice_ns)
    if answer == at.DONE:
        nc10d_log_end(channel, nc10d_now())
        nc10d_unlock(channel)
    return answer


@njit(nogil=True)
def nc10d_submit(channel: int, descriptor: int) -> int:
    """Append a descriptor to the ring, and have the worker look at it."""
    answer = nc10d_append(channel, descriptor)
    if answer != at.NEW_SITE:
        nc10d_wake_own(load(channel + at.C_PROCESS))
    return answer


@njit(nogil=True)
def nc10d_finish(channel: int, descriptor: int) -> None:
    """Publish the end of a submission and tell those who wait for it."""
    process = load(channel + at.C_PROCESS)
    now = nc10d_now()
    store(descriptor + at.D_ENDED, now)
    if load(descriptor + at.D_GATE) != 0:
        nc10d_post(channel, load(descriptor + at.D_GATE), 1)
    if load(channel + at.C_KIND) == at.COLLECTIVE:
        nc10d_log_end(channel, now)
    else:
        nc10d_end_message(channel, now)
    store(channel + at.C_DESCRIPTOR, 0)
    store_release(channel + at.C_HEAD, load(channel + at.C_HEAD) + 1)
    # From here on the descriptor belongs to whoever waits for it.
    watched = exchange(descriptor + at.D_STATUS, at.FINISHED) & at.WATCHED
    # The worker need not look: what else it has to do, it is told by who submits or signals.
    if load_acquire(process + at.P_WAITING) != 0:
        nc10d_wake_own(process)
    if watched != 0:
        nc10d_write_event(load(process + at.P_EVENT_FD))


@njit(nogil=True)
def nc10d_progress(channel: int) -> int:
    """Run the ring's submissions as far as they go; the caller holds the lock.

    IDLE when the ring is empty, else what the interpreter said (BLOCKED, a failure), or what
    matching a message said.
    """
    while True:
        if load(channel + at.C_BROKEN) != 0:
            return at.ABORTED
        descriptor = load(channel + at.C_DESCRIPTOR)
        if descriptor == 0:
            if load(channel + at.C_KIND) == at.RECEIVER:
                answer = nc10d_match(channel)
                if answer != at.DONE:
                    return answer
            elif load(channel + at.C_HEAD) == load_acquire(channel + at.C_TAIL):
                return at.IDLE
            descriptor = load(nc10d_slot(channel, load(channel + at.C_HEAD)))
            store(channel + at.C_DESCRIPTOR, descriptor)
            store(channel + at.C_MESSAGE, descriptor)
            store(channel + at.C_SITE, load(descriptor + at.D_SITE))
            store(channel + at.C_BEGUN, nc10d_now())
            store(descriptor + at.D_STARTED, load(channel + at.C_BEGUN))
            nc10d_begin(channel, load(descriptor + at.D_PROGRAM), load(descriptor + at.D_USERS))
            nc10d_trace(channel, at.TRACE_START)
        step = load(channel + at.C_PC)
        answer = call_engine(load(channel + at.C_ADVANCE), channel)
        if answer != at.DONE:
            if load(channel + at.C_PC) != step:
                nc10d_trace(channel, at.TRACE_BLOCKED)
            if answer < 0:  # nobody begins it once more before the channel is stopped
                store(channel + at.C_BROKEN, at.FAILING)
            return answer
        nc10d_trace(channel, at.TRACE_DONE)
        nc10d_finish(channel, descriptor)


@njit(nogil=True)
def nc10d_awake(channel: int) -> None:
    """Take my bit away from the counter that is waited for: I am looking, nobody need ring.

    A link's may have other waiters too: one that comes meanwhile gets the bit back, and looks anew.
    A gate may be waited for by several channels, so there the bit stays.
    """
    if load(channel + at.C_BLOCKED_ON) == load(channel + at.C_RANK):
        return
    sleepers = load(channel + at.C_BLOCKED_AT) + at.LINE_SLEEPERS
    bit, others = load(channel + at.C_BELL_BIT), load(channel + at.C_PROCESS) + at.P_LINK_WAITERS
    if load_acquire(sleepers) & bit != 0 and load_acquire(others) == 0:
        keep_bits(sleepers, ~bit)
        if load_acquire(others) != 0:
            set_bits(sleepers, bit)
            nc10d_wake_own(load(channel + at.C_PROCESS))


@njit(nogil=True)
def nc10d_help(channel: int, descriptor: int, until: int) -> int:
    """Advance the channel, whose lock is held, until a submission of it has ended."""
    while True:
        answer = nc10d_progress(channel)
        if load_acquire(descriptor + at.D_STATUS) & at.FINISHED:
            return at.FINISHED
        if answer != at.BLOCKED:
            return answer
        nc10d_awake(channel)
        if nc10d_streaming(channel):
            if nc10d_linger(channel) and nc10d_now() < until:
                continue
        elif nc10d_spin(channel, load(channel + at.C_BLOCKED_AT), load(channel + at.C_BLOCKED_FOR)):
            continue
        answer = nc10d_await_flag(channel, until)
        if answer == at.BLOCKED:
            return 0
        if answer != at.DONE:
            return answer


@njit(nogil=True)
def nc10d_waiting(channel: int) -> bool:
    """Say whether a channel has submissions that the worker may advance."""
    if load_acquire(channel + at.C_BROKEN) != 0:
        return False
    return load_acquire(channel + at.C_HEAD) != load_acquire(channel + at.C_TAIL)


@njit(nogil=True)
def nc10d_soon_there(channel: int) -> bool:
    """Say whether the counter that a channel is blocked on comes while this thread spins."""
    if nc10d_streaming(channel):
        return False
    return nc10d_spin(channel, load(channel + at.C_BLOCKED_AT), load(channel + at.C_BLOCKED_FOR))


@njit(nogil=True)
def nc10d_attend(channel: int, sleepy: bool, spins: int) -> int:
    """Advance one channel: DONE if something moved, BLOCKED, BUSY (another thread is at it), or a
    failure.

    A `sleepy` thread will do no more if nothing moves: sockets are armed. It spins for a peer up to
    `spins` times, and then leaves the rest to whom the peer will wake.
    """
    if not nc10d_waiting(channel):
        return at.BLOCKED
    if nc10d_aborted(channel):
        return at.ABORTED
    if not nc10d_try_lock(channel):
        return at.BUSY
    head = load(channel + at.C_HEAD)
    step = load(channel + at.C_PC)
    known = load(channel + at.C_UNMATCHED)
    transfers = nc10d_moved(channel)
    answer = nc10d_progress(channel)
    while answer == at.BLOCKED and spins > 0 and nc10d_soon_there(channel):
        answer = nc10d_progress(channel)
        spins -= 1
    moved = load(channel + at.C_HEAD) != head or load(channel + at.C_PC) != step
    moved = moved or nc10d_moved(channel) != transfers
    stray = answer == at.UNMATCHED and (moved or known == 0)
    if answer == at.BLOCKED:
        flag = load(channel + at.C_BLOCKED_AT)
        set_bits(flag + at.LINE_SLEEPERS, load(channel + at.C_BELL_BIT))
        if sleepy:
            nc10d_arm(channel)
        moved = moved or load_acquire(flag) >= load(channel + at.C_BLOCKED_FOR)
        descriptor = load(nc10d_slot(channel, load(channel + at.C_HEAD)))
        deadline = load(descriptor + at.D_DEADLINE)
        if not moved and deadline != 0 and nc10d_now() > deadline:
            answer = at.LATE
    exchange(channel + at.C_LOCK, 0)
    # Whoever appended meanwhile found the channel taken, and left it to the one who had it.
    moved = moved or (answer == at.IDLE and nc10d_waiting(channel))
    if stray:
        # Only Python can take a message aside that nobody asked for: call who waits or watches.
        nc10d_wake_own(load(channel + at.C_PROCESS))
        nc10d_write_event(load(load(channel + at.C_PROCESS) + at.P_EVENT_FD))
    if answer < 0:
        return answer
    return at.DONE if moved else at.BLOCKED


@njit(nogil=True)
def nc10d_submit_here(channel: int, descriptor: int, spins: int) -> int:
    """Append a descriptor, and advance the channel in this thread as far as it goes.

    It may wait a moment for peers that come at the same time: that leaves nobody to wake. Where
    it stops at a peer's counter, my bit is set beside that: the peer wakes the worker, which so
    need not wake up only to find that there is nothing to do yet.
    """
    if load_acquire(channel + at.C_BROKEN) != 0 or nc10d_aborted(channel):
        return at.BUSY
    answer = nc10d_append(channel, descriptor)
    if answer != at.DONE:
        return answer
    answer = nc10d_attend(channel, True, spins)
    tries = 1
    while answer == at.DONE and tries < LOOKS and nc10d_waiting(channel):
        answer = nc10d_attend(channel, True, 0)
        tries += 1
    if answer in (at.DONE, at.BUSY) and nc10d_waiting(channel):
        nc10d_wake_own(load(channel + at.C_PROCESS))
    return min(answer, at.DONE)
