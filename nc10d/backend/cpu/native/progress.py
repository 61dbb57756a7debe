"""Submissions: how threads advance a channel's ring and empty it; submitting.py fills it.

Any thread that holds the channel's lock (C_LOCK) may advance the channel: the caller of a
synchronous operation, a thread that waits for a submission, or the worker. Submissions run in ring
order. A link's receiving end is the exception: it first looks for the receive that fits the message
at its head (ring.py).

    state of a submission     where it is                              set by
    appended                  ring, between C_HEAD and C_TAIL          holder of C_SUBMITTING
    running                   C_DESCRIPTOR, still at C_HEAD            holder of C_LOCK
    FINISHED                  out of the ring (C_HEAD is past it)      holder of C_LOCK

    state of a channel        mark                                     ends by
    free                      C_LOCK 0, ring empty                     run or submit
    to be advanced            C_LOCK 0, ring not empty                 a thread that takes the lock
    advanced                  C_LOCK is a thread                       unlocking
    blocked                   C_BLOCKED_AT, _FOR, _ON                  that counter (or a failure)
    broken                    C_BROKEN                                 never: the group has failed

Invariant: for a ring that is not empty, one of these holds: a thread is advancing the channel; a
bell has rung for a thread that will look; this rank's bit (C_BELL_BIT) is set beside the counter
that blocks the channel.

A function that unlocks the channel keeps the invariant in two steps. It sets the bit before it
unlocks, or looks at the ring again afterwards. After setting the bit, the function also compares
the bell's value: a thread that the bit has woken meanwhile found the channel locked and went to
sleep again. The worker needs no such comparison, since it looks at all channels before sleeping.
"""

from __future__ import annotations

from numba import njit

from nc10d.backend.cpu.native import atomics, waiting
from nc10d.backend.cpu.native import offsets as at
from nc10d.backend.cpu.native.atomics import load, load_acquire, store, store_release
from nc10d.backend.cpu.native.interpreter import nc10d_publish
from nc10d.backend.cpu.native.log import nc10d_log_end, nc10d_log_message
from nc10d.backend.cpu.native.ring import nc10d_match_head, nc10d_ring_word
from nc10d.backend.cpu.native.sites import nc10d_site


@njit(nogil=True)
def nc10d_load_program(channel: int, program: int, users: int) -> None:
    """Point the channel at a program."""
    # C_ROUND, C_TICKS and C_PARITY stay: rounds count through all the channel's programs.
    store(channel + at.C_PC, program)
    store(channel + at.C_SEGMENT, 0)
    store(channel + at.C_PEER, 0)
    store(channel + at.C_USERS, users)


@njit(nogil=True)
def nc10d_claim_channel(channel: int) -> int:
    """Take a free channel's lock, to run a program in this thread.

    Returns DONE, BUSY if the channel has other work, or NEW_SITE; the lock is held after DONE.
    """
    site = nc10d_site(channel)
    if site == at.NEW_SITE:
        return at.NEW_SITE
    if not waiting.nc10d_try_lock(channel):
        return at.BUSY
    # Looked at under the lock: break_channel sets C_BROKEN and then takes the lock, so a thread
    # that has the lock and sees no C_BROKEN may go on.
    failed = load(channel + at.C_BROKEN) != 0 or waiting.nc10d_group_failed(channel)
    if failed or load(channel + at.C_HEAD) != load_acquire(channel + at.C_TAIL):
        # Submissions in the ring were called earlier and must run first.
        waiting.nc10d_unlock(channel)
        return at.BUSY
    store(channel + at.C_SITE, site)
    return at.DONE


@njit(nogil=True)
def nc10d_run_claimed(channel: int, program: int, users: int) -> int:
    """Run a program on the arrays in the table at `users`; the caller has taken the channel.

    After any answer but DONE the caller still holds the lock.
    """
    nc10d_load_program(channel, program, users)
    answer = waiting.nc10d_drive(channel, waiting.SLICE_NS)
    if answer == at.DONE:
        nc10d_log_end(channel, atomics.nc10d_now())
        waiting.nc10d_unlock(channel)
    return answer


@njit(nogil=True)
def nc10d_finish_submission(channel: int, descriptor: int) -> None:
    """Publish a submission's end and wake the waiting threads."""
    rank_block = load(channel + at.C_RANK_BLOCK)
    now = atomics.nc10d_now()
    # Before FINISHED: afterwards the gate's memory may be gone with the descriptor.
    if load(descriptor + at.D_GATE) != 0:
        nc10d_publish(channel, load(descriptor + at.D_GATE), 1)
    if load(channel + at.C_KIND) == at.COLLECTIVE:
        nc10d_log_end(channel, now)
    else:
        nc10d_log_message(channel, now)
    store(channel + at.C_DESCRIPTOR, 0)
    # Release: a submitter that sees the new head may use the ring's place again.
    store_release(channel + at.C_HEAD, load(channel + at.C_HEAD) + 1)
    # The status comes last. A waiting thread that sees FINISHED may free the descriptor at once, so
    # nothing here touches it after the exchange; WATCHED is read by the exchange itself.
    watched = atomics.exchange(descriptor + at.D_STATUS, at.FINISHED) & at.WATCHED
    # The bell rings only for a thread that awaits this end. Submitters and peers wake the worker.
    if load_acquire(rank_block + at.P_WAITING) != 0:
        waiting.nc10d_wake_own(rank_block)
    if watched != 0:
        atomics.nc10d_write_event(load(rank_block + at.P_EVENT_FD))


@njit(nogil=True)
def nc10d_advance_ring(channel: int) -> int:
    """Run the ring's submissions as far as they go; the caller holds the lock.

    Returns IDLE if nothing is left to run, BLOCKED, UNMATCHED (see nc10d_match_head), or a failure.
    """
    while True:
        if load(channel + at.C_BROKEN) != 0:
            return at.ABORTED
        descriptor = load(channel + at.C_DESCRIPTOR)
        if descriptor == 0:
            if load(channel + at.C_KIND) == at.RECEIVER:
                answer = nc10d_match_head(channel)
                if answer != at.DONE:
                    return answer
            elif load(channel + at.C_HEAD) == load_acquire(channel + at.C_TAIL):
                return at.IDLE
            # The acquire above makes the ring's place visible. Nothing may reorder the head from
            # here on: the program below has begun to change shared memory.
            descriptor = load(nc10d_ring_word(channel, load(channel + at.C_HEAD)))
            store(channel + at.C_DESCRIPTOR, descriptor)
            store(channel + at.C_MESSAGE, descriptor)
            store(channel + at.C_SITE, load(descriptor + at.D_SITE))
            store(channel + at.C_BEGUN, atomics.nc10d_now())
            nc10d_load_program(
                channel, load(descriptor + at.D_PROGRAM), load(descriptor + at.D_USERS)
            )
        answer = atomics.call_address(load(channel + at.C_ADVANCE), channel)
        if answer != at.DONE:
            if answer < 0:  # no thread may begin it again before Python breaks the channel
                store(channel + at.C_BROKEN, at.FAILING)
            return answer
        nc10d_finish_submission(channel, descriptor)


@njit(nogil=True)
def nc10d_cancel_wakeup(channel: int) -> None:
    """Take back nc10d_request_wakeup: this thread looks at the counter itself."""
    # That saves the peer a system call. This rank's other threads (wait_any) may wait for a link's
    # counter too; a gate, which several channels may wait for, keeps the bit.
    if load(channel + at.C_BLOCKED_ON) == load(channel + at.C_RANK):  # a gate: see nc10d_wait_gate
        return
    sleepers = load(channel + at.C_BLOCKED_AT) + at.LINE_SLEEPERS
    bit, others = load(channel + at.C_BELL_BIT), load(channel + at.C_RANK_BLOCK) + at.P_LINK_WAITERS
    if load_acquire(sleepers) & bit != 0 and load_acquire(others) == 0:
        # Clear, then look again: a thread that begins to wait counts itself (P_LINK_WAITERS) before
        # setting the bit. If such a thread came between, the bit just cleared may be that thread's:
        # set the bit again, and wake the thread for another look.
        atomics.keep_bits(sleepers, ~bit)
        if load_acquire(others) != 0:
            atomics.set_bits(sleepers, bit)
            waiting.nc10d_wake_own(load(channel + at.C_RANK_BLOCK))


@njit(nogil=True)
def nc10d_request_wakeup(channel: int, sleepy: bool) -> bool:
    """Have the peer that blocks the channel ring this rank; return whether the counter has come.

    Sockets are armed only for a `sleepy` thread.
    """
    # The order matters: set the bit, then look at the counter again. The set is a full fence, as
    # the exchange in nc10d_publish is. So the peer sees the bit, or this thread sees the value.
    counter = load(channel + at.C_BLOCKED_AT)
    atomics.set_bits(counter + at.LINE_SLEEPERS, load(channel + at.C_BELL_BIT))
    if sleepy:  # arming is a system call: a thread that looks again soon saves the call
        waiting.nc10d_arm_sockets(channel)
    return load_acquire(counter) >= load(channel + at.C_BLOCKED_FOR)


@njit(nogil=True)
def nc10d_bell_value(channel: int) -> int:
    """Return this rank's doorbell value."""
    return atomics.load_acquire_32(load(load(channel + at.C_RANK_BLOCK) + at.P_BELL))


@njit(nogil=True)
def nc10d_pass_wakeup_on(channel: int, bell: int) -> None:
    """Wake this rank's sleepers if the doorbell has been rung since its value was `bell`."""
    if nc10d_bell_value(channel) != bell:
        waiting.nc10d_wake_own(load(channel + at.C_RANK_BLOCK))


@njit(nogil=True)
def nc10d_leave_blocked(channel: int) -> None:
    """Unlock a channel that a peer blocks; this thread may be back soon."""
    # On a link the worker is woken at once. The next message often comes before this thread is
    # back, and the bit would cost the message's sender a system call.
    bell = nc10d_bell_value(channel)
    if load(channel + at.C_KIND) != at.COLLECTIVE or nc10d_request_wakeup(channel, True):
        waiting.nc10d_unlock(channel)
        return
    atomics.exchange(channel + at.C_LOCK, 0)
    nc10d_pass_wakeup_on(channel, bell)


@njit(nogil=True)
def nc10d_wait_blocked(channel: int, until: int) -> int:
    """Wait for the counter that blocks a channel: DONE, BLOCKED or ABORTED."""
    # Spin, then yield, then sleep: see waiting.py. A stream is polled instead of spun on.
    nc10d_cancel_wakeup(channel)
    if waiting.nc10d_waits_for_socket(channel):
        if waiting.nc10d_linger(channel) and atomics.nc10d_now() < until:
            return at.DONE
    elif waiting.nc10d_spin_blocked(channel):
        return at.DONE
    return waiting.nc10d_await_counter(channel, until)


@njit(nogil=True)
def nc10d_advance_until(channel: int, descriptor: int, until: int) -> int:
    """Advance a locked channel until the submission `descriptor` has ended; then unlock.

    Returns FINISHED, 0 at the time `until` (ns), IDLE or UNMATCHED, or a failure.
    """
    while True:
        answer = nc10d_advance_ring(channel)
        # Looked at before the answer: the submission may have ended before another one failed.
        if load_acquire(descriptor + at.D_STATUS) & at.FINISHED:
            if answer == at.BLOCKED:
                nc10d_leave_blocked(channel)
            else:
                waiting.nc10d_unlock(channel)
            return at.FINISHED
        if answer == at.BLOCKED:
            answer = nc10d_wait_blocked(channel, until)
        if answer != at.DONE:
            waiting.nc10d_unlock(channel)
            return 0 if answer == at.BLOCKED else answer


@njit(nogil=True)
def nc10d_has_work(channel: int) -> bool:
    """Return whether a channel has submissions that the worker may advance."""
    if load_acquire(channel + at.C_BROKEN) != 0:
        return False
    return load_acquire(channel + at.C_HEAD) != load_acquire(channel + at.C_TAIL)


@njit(nogil=True)
def nc10d_advance_briefly(channel: int, sleepy: bool, waits: int) -> int:
    """Advance a channel, waiting a moment for peers up to `waits` times.

    Returns DONE if something moved, BLOCKED, BUSY (another thread holds the channel) or a failure.
    After BLOCKED, the peer's counter wakes this rank. So do sockets if the thread is `sleepy`, that
    is, if it does not look again soon.
    """
    if not nc10d_has_work(channel):
        return at.BLOCKED
    if waiting.nc10d_group_failed(channel):
        return at.ABORTED
    if not waiting.nc10d_try_lock(channel):
        return at.BUSY
    # Remembered to find out whether anything moves: a worker that moved something looks again
    # before sleeping.
    head = load(channel + at.C_HEAD)
    step = load(channel + at.C_PC)
    unmatched = load(channel + at.C_UNMATCHED)
    progress = waiting.nc10d_transfer_count(channel)
    answer = nc10d_advance_ring(channel)
    while answer == at.BLOCKED and waits > 0:
        nc10d_cancel_wakeup(channel)
        if waiting.nc10d_waits_for_socket(channel) or not waiting.nc10d_wait_briefly(channel):
            break
        answer = nc10d_advance_ring(channel)
        waits -= 1
    moved = load(channel + at.C_HEAD) != head or load(channel + at.C_PC) != step
    moved = moved or waiting.nc10d_transfer_count(channel) != progress
    unexpected = answer == at.UNMATCHED and (moved or unmatched == 0)
    if answer == at.BLOCKED:
        moved = nc10d_request_wakeup(channel, sleepy) or moved
        # Only the submission that runs can be late; those behind it are judged when they run.
        descriptor = load(nc10d_ring_word(channel, load(channel + at.C_HEAD)))
        deadline = load(descriptor + at.D_DEADLINE)
        if not moved and deadline != 0 and atomics.nc10d_now() > deadline:
            answer = at.LATE
    # A full fence between letting go and looking at the ring: a thread that appended meanwhile
    # found the channel locked and left the submission to this thread.
    atomics.exchange(channel + at.C_LOCK, 0)
    moved = moved or (answer == at.IDLE and nc10d_has_work(channel))
    if unexpected:
        # Only Python can move an unexpected message aside: wake the waiting or watching thread.
        waiting.nc10d_wake_own(load(channel + at.C_RANK_BLOCK))
        atomics.nc10d_write_event(load(load(channel + at.C_RANK_BLOCK) + at.P_EVENT_FD))
    if answer < 0:
        return answer
    return at.DONE if moved else at.BLOCKED
