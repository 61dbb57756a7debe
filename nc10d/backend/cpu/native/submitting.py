"""Launches: a thread appends a descriptor to a channel's ring, and may advance the channel itself.

`nc10d_submit` leaves the submission to the worker. `nc10d_submit_and_advance` first advances the
channel as far as possible, and leaves the worker the rest.
"""

from __future__ import annotations

from numba import njit

from nc10d.backend.cpu.native import atomics, waiting
from nc10d.backend.cpu.native import offsets as at
from nc10d.backend.cpu.native.atomics import load, load_acquire, store
from nc10d.backend.cpu.native.progress import (
    nc10d_advance_briefly,
    nc10d_bell_value,
    nc10d_has_work,
    nc10d_pass_wakeup_on,
)
from nc10d.backend.cpu.native.ring import nc10d_append

CENTURIES = 9e9
"""Seconds whose nanoseconds are an int64."""
LOOKS = 4
"""How often a launching thread advances the channel before leaving the rest to the worker."""
CLOSELY_NS = 20_000
"""The longest time between two launches that follow each other closely."""


@njit(nogil=True)
def nc10d_deadline(timeout: float) -> int:
    """Return the time `timeout` seconds from now in ns, as a descriptor has it: 0 for never."""
    return 0 if timeout > CENTURIES else atomics.nc10d_now() + int(timeout * 1e9)


@njit(nogil=True)
def nc10d_submit(channel: int, descriptor: int) -> int:
    """Append a descriptor to the ring and wake the worker; DONE, BUSY or NEW_SITE as append."""
    answer = nc10d_append(channel, descriptor)
    if answer != at.NEW_SITE:
        waiting.nc10d_wake_own(load(channel + at.C_RANK_BLOCK))
    return answer


@njit(nogil=True)
def nc10d_advance_launched(channel: int, waits: int) -> int:
    """Advance a channel to which this thread has appended; see nc10d_advance_briefly."""
    if load(channel + at.C_LAUNCH_YIELDS) == 0:
        # Behind other receives a spin is in vain: the thread that posted the first has spun.
        posted = load(channel + at.C_TAIL) - load_acquire(channel + at.C_HEAD)
        behind = load(channel + at.C_KIND) == at.RECEIVER and posted > 1
        return nc10d_advance_briefly(channel, True, 0 if behind else waits)
    # A yield is long if a peer on this core computes. So this thread yields only amid launches that
    # follow each other closely. Not done: yields at every launch, since one launch in ten amid
    # computing then waited 1 to 2 ms; yields for messages, whose windows took twice as long.
    late = atomics.nc10d_now() - load(channel + at.C_YIELD_FROM)
    answer = nc10d_advance_briefly(channel, True, waits if 0 <= late < CLOSELY_NS else 0)
    now = atomics.nc10d_now()
    if load(channel + at.C_YIELD_FROM) < now:
        store(channel + at.C_YIELD_FROM, now)
    return answer


@njit(nogil=True)
def nc10d_submit_and_advance(channel: int, descriptor: int, waits: int) -> int:
    """Append a descriptor and advance the channel in this thread as far as possible.

    The thread waits a moment, up to `waits` times, for peers that come at the same time: that saves
    waking the worker. If the channel blocks on a peer's counter, that peer wakes the worker when
    there is something to do, and no earlier. Returns FINISHED if the submission has ended, DONE,
    BUSY, NEW_SITE, or a failure.
    """
    if load_acquire(channel + at.C_BROKEN) != 0 or waiting.nc10d_group_failed(channel):
        return at.BUSY
    answer = nc10d_append(channel, descriptor)
    if answer != at.DONE:
        return answer
    bell = nc10d_bell_value(channel)
    answer = nc10d_advance_launched(channel, waits)
    tries = 1
    while answer == at.DONE and tries < LOOKS and nc10d_has_work(channel):
        answer = nc10d_advance_briefly(channel, True, 0)
        tries += 1
    # DONE with work left: the looks are used up. BUSY: the thread that holds the channel may have
    # looked at the ring before the append. In both cases the worker has to look.
    if answer in (at.DONE, at.BUSY) and nc10d_has_work(channel):
        waiting.nc10d_wake_own(load(channel + at.C_RANK_BLOCK))
    elif answer == at.BLOCKED:
        nc10d_pass_wakeup_on(channel, bell)
    # The caller keeps the descriptor's memory. The status counts before the answer: the submission
    # may have ended before another one failed.
    if load_acquire(descriptor + at.D_STATUS) & at.FINISHED:
        return at.FINISHED
    return min(answer, at.DONE)
