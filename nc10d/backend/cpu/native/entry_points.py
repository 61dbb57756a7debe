"""The engine's entry points, each compiled at first use or by `prepare`.

A channel (offsets.py) is a queue of programs with a lock. `run` executes a program in the calling
thread if the channel is free and the ring empty; `submit` queues a program, and `wait` advances the
channel until the program has ended. `work` is the worker's loop. No other entry waits longer than a
slice.
"""

from __future__ import annotations

from functools import partial

from numba import njit

from nc10d.backend.cpu.native import atomics, interpreter, waiting
from nc10d.backend.cpu.native import offsets as at
from nc10d.backend.cpu.native.atomics import load, load_acquire, store
from nc10d.backend.cpu.native.interpreter import nc10d_publish, nc10d_ring_bells
from nc10d.backend.cpu.native.log import nc10d_log_end, nc10d_log_message
from nc10d.backend.cpu.native.progress import (
    nc10d_advance_briefly,
    nc10d_advance_until,
    nc10d_claim_channel,
    nc10d_run_claimed,
)
from nc10d.backend.cpu.native.submitting import nc10d_submit
from nc10d.kernels.cache import entry_points, make_all, on_demand

SLICE_NS = waiting.SLICE_NS


@on_demand("int64(int64, int64, int64)")
def _run(channel: int, program: int, table: int) -> int:
    """Run a program in this thread; `table` holds its arrays' addresses.

    Returns DONE; BUSY if the channel has other work (submit instead); NEW_SITE, with nothing done,
    for the first call from a line in the user's program (learn the site, then call again); BLOCKED
    after a slice (go on with `drive`) or a failure. After the last two the caller still holds the
    channel.
    """
    answer = nc10d_claim_channel(channel)
    return nc10d_run_claimed(channel, program, table) if answer == at.DONE else answer


@on_demand("int64(int64, int64)")
def _drive(channel: int, slice_ns: int) -> int:
    """Go on with a program that `run` began; answers as `run`."""
    answer = waiting.nc10d_drive(channel, slice_ns)
    if answer == at.DONE:
        if load(channel + at.C_KIND) == at.COLLECTIVE:
            nc10d_log_end(channel, atomics.nc10d_now())
        else:
            nc10d_log_message(channel, atomics.nc10d_now())
        waiting.nc10d_unlock(channel)
    return answer


@on_demand("int64(int64, int64)")
def _submit(channel: int, descriptor: int) -> int:
    """Append to the ring; DONE, BUSY if full, NEW_SITE as `run`."""
    return nc10d_submit(channel, descriptor)


@on_demand("int64(int64, int64, int64)")
def _wait(channel: int, descriptor: int, slice_ns: int) -> int:
    """Advance the channel until a submission has ended.

    Returns FINISHED; 0 after a slice; UNMATCHED if no receive is posted for a link's next message;
    or a failure.
    """
    rank_block = load(channel + at.C_RANK_BLOCK)
    until = atomics.nc10d_now() + slice_ns
    tries = 0
    while True:
        bell = atomics.load_acquire_32(load(rank_block + at.P_BELL))
        if load_acquire(descriptor + at.D_STATUS) & at.FINISHED:
            return at.FINISHED
        if waiting.nc10d_try_lock(channel):
            return nc10d_advance_until(channel, descriptor, until)
        if load_acquire(channel + at.C_BROKEN) != 0:
            return at.ABORTED
        # Another thread advances the channel, and rings when a submission ends. If that thread
        # leaves before, it rings, or a peer does by this rank's bit (progress.py's invariant).
        tries += 1
        if tries < load(channel + at.C_SPIN):
            atomics.pause()
        elif tries < load(channel + at.C_SPIN) + load(channel + at.C_YIELD):
            atomics.yield_core()
        else:
            atomics.add(rank_block + at.P_SLEEPING, 1)
            atomics.add(rank_block + at.P_WAITING, 1)
            # Counted as asleep first, then looked at again: the thread that frees the channel
            # rings only for threads that are counted.
            ended = load_acquire(descriptor + at.D_STATUS) & at.FINISHED
            held = load_acquire(channel + at.C_LOCK) != 0
            if not ended and held and load_acquire(channel + at.C_BROKEN) == 0:
                waiting.nc10d_sleep(rank_block, bell, until)
            atomics.add(rank_block + at.P_WAITING, -1)
            atomics.add(rank_block + at.P_SLEEPING, -1)
        if atomics.nc10d_now() >= until:
            return 0


@on_demand("int64(int64, int64, int64, int64)")
def _work(rank_block: int, spin: int, yields: int, slice_ns: int) -> int:
    """Run the worker's loop; DONE on P_STOP, or a failure."""
    idle = 0
    while load_acquire(rank_block + at.P_STOP) == 0:
        # Counted as asleep before the last look: a submitter rings only for counted sleepers.
        sleepy = idle >= spin + yields
        if sleepy:
            atomics.add(rank_block + at.P_SLEEPING, 1)
        bell = atomics.load_acquire_32(load(rank_block + at.P_BELL))
        table = load(rank_block + at.P_CHANNELS)
        moved = False
        for i in range(load_acquire(rank_block + at.P_COUNT)):
            channel = load_acquire(table + 8 * i)
            if channel != 0:
                answer = nc10d_advance_briefly(channel, sleepy, 0)
                if answer < 0:
                    store(rank_block + at.P_FAILED, channel)
                    if sleepy:
                        atomics.add(rank_block + at.P_SLEEPING, -1)
                    return answer
                moved = moved or answer == at.DONE
        atomics.add(rank_block + at.P_PASSES, 1)
        idle = 0 if moved else idle + 1
        if sleepy:
            if not moved and load_acquire(rank_block + at.P_STOP) == 0:
                waiting.nc10d_sleep(rank_block, bell, atomics.nc10d_now() + slice_ns)
            atomics.add(rank_block + at.P_SLEEPING, -1)
        elif idle < spin:
            atomics.pause()
        else:
            atomics.yield_core()
    return at.DONE


@on_demand("int64(int64)")
def _break_channel(channel: int) -> int:
    """Stop a channel for good and take its lock; BUSY: call again."""
    atomics.exchange(channel + at.C_BROKEN, at.BROKEN)
    waiting.nc10d_wake_own(load(channel + at.C_RANK_BLOCK))
    until = atomics.nc10d_now() + waiting.LONG_NS
    while atomics.nc10d_now() < until:
        # A signal handler may stop the very channel that the thread is driving.
        held = load_acquire(channel + at.C_LOCK) == atomics.this_thread()
        if held or waiting.nc10d_try_lock(channel):
            return at.DONE
        atomics.yield_core()
    return at.BUSY


@on_demand("int64(int64)")
def _unlock(channel: int) -> int:
    waiting.nc10d_unlock(channel)
    return at.DONE


@on_demand("int64(int64, int64)")
def _ring(rank_block: int, ranks: int) -> int:
    """Ring the doorbells of ranks (a bit mask) and of this rank."""
    nc10d_ring_bells(rank_block, ranks)
    waiting.nc10d_wake_own(rank_block)
    return at.DONE


@on_demand("int64(int64, int64)")
def _open_gate(channel: int, word: int) -> int:
    """Open a gate and wake the threads that sleep there."""
    nc10d_publish(channel, word, 1)
    return at.DONE


@on_demand("int64(int64, int64, int64)")
def _compare_and_swap(address: int, expected: int, value: int) -> int:
    return atomics.swap_if(address, expected, value)


@on_demand("int64(int64, int64, int64, int64)")
def _read_process(pid: int, dst: int, src: int, nbytes: int) -> int:
    """Copy from a process's memory; 0, or -1 if refused."""
    return atomics.nc10d_read_process(pid, dst, src, nbytes)


@on_demand("int64(int64, int64, int64, int64, int64)")
def _write_process(pid: int, src: int, nbytes: int, there: int, writer: int) -> int:
    """Copy to a process's memory; return the bytes."""
    return atomics.nc10d_write_process(pid, src, nbytes, there, writer)


@on_demand("int64(int64)")
def _load_word(address: int) -> int:
    return load_acquire(address)


@njit(nogil=True)
def nc10d_look_at_rows(table: int, count: int, bit: int) -> int:
    """Return the first row (counter, value) that has come, or -1; set `bit` at the others."""
    for i in range(count):
        counter = load(table + 16 * i)
        if bit != 0:
            atomics.set_bits(counter + at.LINE_SLEEPERS, bit)
        if load_acquire(counter) >= load(table + 16 * i + 8):
            return i
    return -1


@on_demand("int64(int64, int64, int64, int64, int64)")
def _wait_any(rank_block: int, bit: int, table: int, count: int, slice_ns: int) -> int:
    """Return the first row of `table` that comes (nc10d_look_at_rows), or -1 after a slice."""
    began = atomics.nc10d_now()
    until = began + slice_ns
    tries = 0
    atomics.add(rank_block + at.P_LINK_WAITERS, 1)
    while True:
        # Counted as asleep before the look: a thread that changes a counter or a bit rings only
        # for counted sleepers.
        sleepy = tries > 200 or atomics.nc10d_now() >= began + waiting.LONG_NS
        if sleepy:
            atomics.add(rank_block + at.P_SLEEPING, 1)
        bell = atomics.load_acquire_32(load(rank_block + at.P_BELL))
        found = nc10d_look_at_rows(table, count, bit if sleepy else 0)
        tries += 1
        over = found >= 0 or atomics.nc10d_now() >= until
        if sleepy:
            if not over:
                waiting.nc10d_sleep(rank_block, bell, until)
            atomics.add(rank_block + at.P_SLEEPING, -1)
        if over:
            break
        if not sleepy:
            atomics.yield_core()
    atomics.add(rank_block + at.P_LINK_WAITERS, -1)
    return found


__getattr__ = entry_points(__name__)


# A first collective runs FIRST (read and write probe the peers' memory). Failures and closing need
# ESSENTIAL; amid submissions a failure also needs `wait`, which most programs have called before.
FIRST = ("run", "drive", "read_process", "write_process")
ESSENTIAL = ("break_channel", "unlock", "ring", "load_word", "compare_and_swap")


def prepare() -> None:
    """Compile the entries of a first collective, sharing the work with processes that start now."""
    # The entries for failures and closing are compiled too: those must not wait for a compiler.
    named = (partial(__getattr__, name) for name in (*FIRST, *ESSENTIAL))
    make_all([interpreter.advance_address, *named])
