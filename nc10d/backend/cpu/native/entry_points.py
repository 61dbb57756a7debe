"""The engine's entry points, each compiled when it is first used or by `prepare`.

A channel (offsets.py) is a queue of programs with a lock. `run` executes a program in the calling
thread if the channel is free and its ring empty; `submit` and `wait` queue it; `work` is the body
of the worker thread. No entry blocks for longer than its slice.
"""

from __future__ import annotations

from functools import partial

from numba import njit

from nc10d.backend.cpu.native import interpreter
from nc10d.backend.cpu.native import offsets as at
from nc10d.backend.cpu.native.atomics import (
    add,
    exchange,
    load,
    load_acquire,
    load_acquire_32,
    nc10d_now,
    nc10d_read_process,
    nc10d_write_process,
    pause,
    set_bits,
    store,
    swap_if,
    this_thread,
    yield_core,
)
from nc10d.backend.cpu.native.interpreter import nc10d_post, nc10d_ring
from nc10d.backend.cpu.native.log import nc10d_end_message, nc10d_log_end
from nc10d.backend.cpu.native.progress import nc10d_attend, nc10d_help, nc10d_run, nc10d_submit
from nc10d.backend.cpu.native.waiting import (
    LONG_NS,
    nc10d_drive,
    nc10d_sleep,
    nc10d_try_lock,
    nc10d_unlock,
    nc10d_wake_own,
)
from nc10d.kernels.cache import make_all
from nc10d.kernels.lazy import EntryPoint, entry_points, on_demand

SLICE_NS = 50_000_000


@on_demand("int64(int64, int64, int64)")
def _run(channel: int, program: int, table: int) -> int:
    return nc10d_run(channel, program, 0, table, SLICE_NS)


@on_demand("int64(int64, int64)")
def _drive(channel: int, slice_ns: int) -> int:
    answer = nc10d_drive(channel, slice_ns)
    if answer == at.DONE:
        if load(channel + at.C_KIND) == at.COLLECTIVE:
            nc10d_log_end(channel, nc10d_now())
        else:
            nc10d_end_message(channel, nc10d_now())
        nc10d_unlock(channel)
    return answer


@on_demand("int64(int64, int64)")
def _submit(channel: int, descriptor: int) -> int:
    return nc10d_submit(channel, descriptor)


@on_demand("int64(int64, int64, int64)")
def _wait(channel: int, descriptor: int, slice_ns: int) -> int:
    process = load(channel + at.C_PROCESS)
    until = nc10d_now() + slice_ns
    tries = 0
    while True:
        bell = load_acquire_32(load(process + at.P_BELL))
        if load_acquire(descriptor + at.D_STATUS) & at.FINISHED:
            return at.FINISHED
        if nc10d_try_lock(channel):
            answer = nc10d_help(channel, descriptor, until)
            nc10d_unlock(channel)
            return answer
        if load_acquire(channel + at.C_BROKEN) != 0:
            return at.ABORTED
        # Another thread advances the channel. It rings when a submission ends and when it leaves.
        tries += 1
        if tries < load(channel + at.C_SPIN):
            pause()
        elif tries < load(channel + at.C_SPIN) + load(channel + at.C_YIELD):
            yield_core()
        else:
            add(process + at.P_SLEEPING, 1)
            add(process + at.P_WAITING, 1)
            # Counted as asleep first, then looked at again: the thread that frees the channel
            # rings only for threads that are counted.
            ended = load_acquire(descriptor + at.D_STATUS) & at.FINISHED
            held = load_acquire(channel + at.C_LOCK) != 0
            if not ended and held and load_acquire(channel + at.C_BROKEN) == 0:
                nc10d_sleep(process, bell, until)
            add(process + at.P_WAITING, -1)
            add(process + at.P_SLEEPING, -1)
        if nc10d_now() >= until:
            return 0


@on_demand("int64(int64, int64, int64, int64)")
def _work(process: int, spin: int, yields: int, slice_ns: int) -> int:
    idle = 0
    while load_acquire(process + at.P_STOP) == 0:
        # Counted as asleep before the last look: a submitter rings only for counted sleepers.
        sleepy = idle >= spin + yields
        if sleepy:
            add(process + at.P_SLEEPING, 1)
        bell = load_acquire_32(load(process + at.P_BELL))
        table = load(process + at.P_CHANNELS)
        moved = False
        for i in range(load_acquire(process + at.P_COUNT)):
            channel = load_acquire(table + 8 * i)
            if channel != 0:
                answer = nc10d_attend(channel, sleepy, 0)
                if answer < 0:
                    store(process + at.P_LATE, channel)
                    if sleepy:
                        add(process + at.P_SLEEPING, -1)
                    return answer
                moved = moved or answer == at.DONE
        add(process + at.P_ROUNDS, 1)
        idle = 0 if moved else idle + 1
        if sleepy:
            if not moved and load_acquire(process + at.P_STOP) == 0:
                nc10d_sleep(process, bell, nc10d_now() + slice_ns)
            add(process + at.P_SLEEPING, -1)
        elif idle < spin:
            pause()
        else:
            yield_core()
    return at.DONE


@on_demand("int64(int64)")
def _break_channel(channel: int) -> int:
    exchange(channel + at.C_BROKEN, at.BROKEN)
    nc10d_wake_own(load(channel + at.C_PROCESS))
    until = nc10d_now() + LONG_NS
    while nc10d_now() < until:
        # A signal handler may stop the very channel that its thread is driving.
        if nc10d_try_lock(channel) or load_acquire(channel + at.C_LOCK) == this_thread():
            return at.DONE
        yield_core()
    return at.BUSY


@on_demand("int64(int64)")
def _unlock(channel: int) -> int:
    nc10d_unlock(channel)
    return at.DONE


@on_demand("int64(int64, int64)")
def _ring(process: int, ranks: int) -> int:
    nc10d_ring(process, ranks)
    nc10d_wake_own(process)
    return at.DONE


@on_demand("int64(int64, int64)")
def _open_gate(channel: int, word: int) -> int:
    nc10d_post(channel, word, 1)
    return at.DONE


@on_demand("int64(int64, int64, int64)")
def _compare_and_swap(address: int, expected: int, value: int) -> int:
    return swap_if(address, expected, value)


@on_demand("int64(int64, int64, int64, int64)")
def _read_process(pid: int, dst: int, src: int, nbytes: int) -> int:
    return nc10d_read_process(pid, dst, src, nbytes)


@on_demand("int64(int64, int64, int64, int64, int64)")
def _write_process(pid: int, src: int, nbytes: int, there: int, writer: int) -> int:
    return nc10d_write_process(pid, src, nbytes, there, writer)


@on_demand("int64(int64)")
def _load_word(address: int) -> int:
    return load_acquire(address)


@njit(nogil=True)
def nc10d_first_come(table: int, count: int, bit: int) -> int:
    """Return the index of the first counter that has come to its value, or -1; set `bit` on all."""
    for i in range(count):
        flag = load(table + 16 * i)
        if bit != 0:
            set_bits(flag + at.LINE_SLEEPERS, bit)
        if load_acquire(flag) >= load(table + 16 * i + 8):
            return i
    return -1


@on_demand("int64(int64, int64, int64, int64, int64)")
def _wait_any(process: int, bit: int, table: int, count: int, slice_ns: int) -> int:
    began = nc10d_now()
    until = began + slice_ns
    tries = 0
    add(process + at.P_LINK_WAITERS, 1)
    while True:
        # Counted as asleep before the look: a thread that changes a counter or a bit rings only
        # for counted sleepers.
        sleepy = tries > 200 or nc10d_now() >= began + LONG_NS
        if sleepy:
            add(process + at.P_SLEEPING, 1)
        bell = load_acquire_32(load(process + at.P_BELL))
        found = nc10d_first_come(table, count, bit if sleepy else 0)
        tries += 1
        over = found >= 0 or nc10d_now() >= until
        if sleepy:
            if not over:
                nc10d_sleep(process, bell, until)
            add(process + at.P_SLEEPING, -1)
        if over:
            break
        if not sleepy:
            yield_core()
    add(process + at.P_LINK_WAITERS, -1)
    return found


run: EntryPoint
"""run(channel, program, table): run a program in this thread; `table` holds its arrays' addresses.

Returns DONE; BUSY if the channel has other work (submit instead); NEW_SITE, with nothing done, for
the first call from a line of the user's program (learn the site, then call again); BLOCKED after a
slice (go on with `drive`) or a failure. After the last two the caller still holds the channel.
"""
drive: EntryPoint
"""drive(channel, slice_ns): go on with a program that `run` began; answers as `run`."""
submit: EntryPoint
"""submit(channel, descriptor): append to the ring; DONE, BUSY if it is full, NEW_SITE as `run`."""
wait: EntryPoint
"""wait(channel, descriptor, slice_ns): advance the channel until a submission has ended.

Returns FINISHED; 0 after a slice; UNMATCHED if no receive is posted for a link's next message; or
a failure.
"""
work: EntryPoint
"""work(process, spin, yields, slice_ns): the worker's loop; DONE on P_STOP, or a failure."""
break_channel: EntryPoint
"""break_channel(channel): stop a channel for good and take its lock; BUSY: call again."""
unlock: EntryPoint
ring: EntryPoint
"""ring(process, ranks): ring the doorbells of ranks (a bit mask) and of this rank."""
open_gate: EntryPoint
"""open_gate(channel, word): open a gate and wake the threads that sleep on it."""
compare_and_swap: EntryPoint
read_process: EntryPoint
"""read_process(pid, dst, src, nbytes): copy from a process's memory; 0, or -1 if refused."""
write_process: EntryPoint
"""write_process(pid, src, nbytes, there, writer): copy to a process's memory; returns the bytes."""
load_word: EntryPoint
wait_any: EntryPoint
"""wait_any(process, bit, table, count, slice_ns): index of the first counter to come, or -1."""

__getattr__ = entry_points(__name__)


# A first collective runs FIRST (read and write probe the peers' memory). Failures and closing need
# ESSENTIAL.
FIRST = ("run", "drive", "read_process", "write_process")
ESSENTIAL = ("break_channel", "unlock", "ring", "load_word", "compare_and_swap")


def prepare() -> None:
    """Compile the entries of a first collective, sharing the work with processes that start now.

    The entries for failures and closing are compiled too: those must not wait for a compiler.
    """
    named = (partial(__getattr__, name) for name in (*FIRST, *ESSENTIAL))
    make_all([interpreter.advance_address, *named])
