"""The engine's entry points: run, drive, wait for a submission, the worker's loop.

Whoever holds a channel's lock may advance it: the caller of a synchronous operation, a thread
that waits for a submission, or the worker. A channel's submissions run in the order of its ring;
a synchronous call on a free channel with an empty ring goes straight in.

Waiting: spin, then yield the core, then sleep on the process's doorbell. Before sleeping, a
thread sets its rank's bit at every counter that it waits for and looks again; who changes the
counter rings. No entry blocks for longer than the slice it was given: deadlines, signals and the
liveness of peers are looked at in between, by Python.
"""

from __future__ import annotations

from numba import njit, types

from nc10d.backend.cpu.native.atomics import (
    DATA_OFFSET,
    DIMS_OFFSET,
    DTYPE_OFFSET,
    FLAGS_OFFSET,
    PLAIN_FLAGS,
    add,
    add_32,
    array_address,
    array_list,
    as_int,
    call_engine,
    exchange,
    load,
    load_acquire,
    load_acquire_32,
    nc10d_futex_wait,
    nc10d_futex_wake,
    nc10d_now,
    nc10d_write_event,
    pause,
    set_bits,
    store,
    store_release,
    swap_if,
    this_thread,
    yield_core,
)
from nc10d.backend.cpu.native.interpreter import nc10d_ring
from nc10d.backend.cpu.native.layout import (
    ABORTED,
    AREA_ABORT,
    BLOCKED,
    BUSY,
    C_ADVANCE,
    C_AREA,
    C_BELL_BIT,
    C_BLOCKED_AT,
    C_BLOCKED_FOR,
    C_BLOCKED_ON,
    C_BROKEN,
    C_DESCRIPTOR,
    C_FLAGS,
    C_HEAD,
    C_KIND,
    C_LOCK,
    C_MESSAGE_BYTES,
    C_MESSAGE_DTYPE,
    C_MESSAGE_TAG,
    C_OWN_USERS,
    C_PC,
    C_PEER,
    C_PROCESS,
    C_RING,
    C_ROUND,
    C_SEGMENT,
    C_SEQ,
    C_SPIN,
    C_SUBMITTING,
    C_TAIL,
    C_TRACE_ID,
    C_UNMATCHED,
    C_USERS,
    C_YIELD,
    D_BYTES,
    D_DEADLINE,
    D_DTYPE,
    D_ENDED,
    D_PROGRAM,
    D_STARTED,
    D_STATUS,
    D_TAG,
    D_USERS,
    DONE,
    FINISHED,
    IDLE,
    LATE,
    LINE_SLEEPERS,
    LINK_HEADER_BYTES,
    LINK_TAG,
    P_BELL,
    P_CHANNELS,
    P_COUNT,
    P_EVENT_FD,
    P_LATE,
    P_ROUNDS,
    P_SLEEPING,
    P_STOP,
    P_TRACE,
    P_TRACE_NEXT,
    P_TRACE_SIZE,
    RECEIVER,
    RING_SLOTS,
    SIZES,
    TRACE_BLOCKED,
    TRACE_BYTES,
    TRACE_DONE,
    TRACE_START,
    UNMATCHED,
    WATCHED,
)
from nc10d.kernels.cache import compiled, entry_point


@njit(nogil=True)
def nc10d_trace(channel: int, event: int) -> None:
    """Note an event of a channel, if a trace is wanted."""
    process = load(channel + C_PROCESS)
    buffer = load(process + P_TRACE)
    if buffer != 0:
        place = add(process + P_TRACE_NEXT, 1)
        if place < load(process + P_TRACE_SIZE):
            at = buffer + TRACE_BYTES * place
            store(at, nc10d_now())
            store(at + 8, load(channel + C_TRACE_ID))
            store(at + 16, event)
            store(at + 24, load(channel + C_DESCRIPTOR))


@njit(nogil=True)
def nc10d_try_lock(channel: int) -> bool:
    """Take the channel if nobody has it; the lock tells which thread did."""
    return load_acquire(channel + C_LOCK) == 0 and swap_if(channel + C_LOCK, 0, this_thread()) == 0


@njit(nogil=True)
def nc10d_wake_own(process: int) -> None:
    """Wake this rank's own sleepers: something changed inside the process."""
    if load_acquire(process + P_SLEEPING) != 0:
        bell = load(process + P_BELL)
        add_32(bell, 1)
        nc10d_futex_wake(bell)


@njit(nogil=True)
def nc10d_unlock(channel: int) -> None:
    """Give the channel back; if submissions wait in it, tell the worker."""
    exchange(channel + C_LOCK, 0)
    if load_acquire(channel + C_HEAD) != load_acquire(channel + C_TAIL):
        nc10d_wake_own(load(channel + C_PROCESS))


@njit(nogil=True)
def nc10d_begin(channel: int, program: int, users: int) -> None:
    """Point the channel at a program."""
    store(channel + C_PC, program)
    store(channel + C_SEGMENT, 0)
    store(channel + C_PEER, 0)
    store(channel + C_USERS, users)


@njit(nogil=True)
def nc10d_match(channel: int) -> int:
    """Find the posted receive for the message at the head of a link; make it first in the ring.

    Returns DONE with the ring's head set, IDLE if nothing is posted, BLOCKED before a message
    is there, UNMATCHED if nobody has asked for it yet, SIZES if the sizes differ.
    """
    head = load(channel + C_HEAD)
    tail = load_acquire(channel + C_TAIL)
    sent = load(load(channel + C_FLAGS))
    target = load(channel + C_SEQ) + 1
    if load_acquire(sent) < target:
        store(channel + C_BLOCKED_AT, sent)
        store(channel + C_BLOCKED_FOR, target)
        store(channel + C_BLOCKED_ON, 0)
        return IDLE if head == tail else BLOCKED
    header = sent + LINK_TAG + LINK_HEADER_BYTES * (load(channel + C_ROUND) & 1)
    tag = load(header)
    store(channel + C_MESSAGE_TAG, tag)
    store(channel + C_MESSAGE_BYTES, load(header + 8))
    store(channel + C_MESSAGE_DTYPE, load(header + 16))
    place = head
    while place < tail:
        if load(load(channel + C_RING + 8 * (place % RING_SLOTS)) + D_TAG) == tag:
            break
        place += 1
    if place == tail:
        store_release(channel + C_UNMATCHED, 1)
        return UNMATCHED
    store_release(channel + C_UNMATCHED, 0)
    found = load(channel + C_RING + 8 * (place % RING_SLOTS))
    while place > head:  # the others keep their order behind it
        before = load(channel + C_RING + 8 * ((place - 1) % RING_SLOTS))
        store(channel + C_RING + 8 * (place % RING_SLOTS), before)
        place -= 1
    store(channel + C_RING + 8 * (head % RING_SLOTS), found)
    same = load(found + D_BYTES) == load(header + 8) and load(found + D_DTYPE) == load(header + 16)
    return DONE if same else SIZES


@njit(nogil=True)
def nc10d_finish(channel: int, descriptor: int) -> None:
    """Publish the end of a submission and tell those who wait for it."""
    process = load(channel + C_PROCESS)
    store(descriptor + D_ENDED, nc10d_now())
    store(channel + C_DESCRIPTOR, 0)
    store_release(channel + C_HEAD, load(channel + C_HEAD) + 1)
    # From here on the descriptor belongs to whoever waits for it.
    watched = exchange(descriptor + D_STATUS, FINISHED) & WATCHED
    nc10d_wake_own(process)
    if watched != 0:
        nc10d_write_event(load(process + P_EVENT_FD))


@njit(nogil=True)
def nc10d_progress(channel: int) -> int:
    """Run the ring's submissions as far as they go; the caller holds the lock.

    IDLE when the ring is empty, else what the interpreter said (BLOCKED, a failure), or what
    matching a message said.
    """
    while True:
        if load(channel + C_BROKEN) != 0:
            return ABORTED
        descriptor = load(channel + C_DESCRIPTOR)
        if descriptor == 0:
            if load(channel + C_KIND) == RECEIVER:
                answer = nc10d_match(channel)
                if answer != DONE:
                    return answer
            elif load(channel + C_HEAD) == load_acquire(channel + C_TAIL):
                return IDLE
            descriptor = load(channel + C_RING + 8 * (load(channel + C_HEAD) % RING_SLOTS))
            store(channel + C_DESCRIPTOR, descriptor)
            store(descriptor + D_STARTED, nc10d_now())
            nc10d_begin(channel, load(descriptor + D_PROGRAM), load(descriptor + D_USERS))
            nc10d_trace(channel, TRACE_START)
        step = load(channel + C_PC)
        answer = call_engine(load(channel + C_ADVANCE), channel)
        if answer != DONE:
            if load(channel + C_PC) != step:
                nc10d_trace(channel, TRACE_BLOCKED)
            return answer
        nc10d_trace(channel, TRACE_DONE)
        nc10d_finish(channel, descriptor)


@njit(nogil=True)
def nc10d_sleep(process: int, bell_value: int, until: int) -> None:
    """Sleep until the doorbell rings (it has not since `bell_value` was read) or `until`."""
    left = until - nc10d_now()
    if left > 0:
        nc10d_futex_wait(load(process + P_BELL), bell_value, left)


@njit(nogil=True)
def nc10d_await_flag(channel: int, until: int) -> int:
    """Wait until the counter the channel is blocked on has come: DONE, ABORTED or BLOCKED."""
    flag = load(channel + C_BLOCKED_AT)
    target = load(channel + C_BLOCKED_FOR)
    for _ in range(load(channel + C_SPIN)):
        if load_acquire(flag) >= target:
            return DONE
        pause()
    for _ in range(load(channel + C_YIELD)):
        if load_acquire(flag) >= target:
            return DONE
        yield_core()
    process = load(channel + C_PROCESS)
    abort = load(channel + C_AREA) + AREA_ABORT
    add(process + P_SLEEPING, 1)
    answer = BLOCKED
    while answer == BLOCKED:
        bell = load_acquire_32(load(process + P_BELL))
        set_bits(flag + LINE_SLEEPERS, load(channel + C_BELL_BIT))
        if load_acquire(flag) >= target:
            answer = DONE
        elif load_acquire(abort) != 0 or load_acquire(channel + C_BROKEN) != 0:
            answer = ABORTED
        elif nc10d_now() >= until:
            break
        else:
            nc10d_sleep(process, bell, until)
    add(process + P_SLEEPING, -1)
    return answer


@njit(nogil=True)
def nc10d_drive(channel: int, slice_ns: int) -> int:
    """Advance the program in hand until it is done, failed, or the slice is over (BLOCKED)."""
    until = 0
    waits = 0
    while True:
        answer = call_engine(load(channel + C_ADVANCE), channel)
        if answer != BLOCKED:
            return answer
        # Most waits are short: the clock is read only when one was not, and now and then, since
        # a long program may wait often and never long.
        waits += 1
        if waits & 15 == 0:
            now = nc10d_now()
            if until == 0:
                until = now + slice_ns
            elif now >= until:
                return BLOCKED
        flag = load(channel + C_BLOCKED_AT)
        target = load(channel + C_BLOCKED_FOR)
        for _ in range(load(channel + C_SPIN) >> 3):
            if load_acquire(flag) >= target:
                break
            pause()
        if load_acquire(flag) < target:
            if until == 0:
                until = nc10d_now() + slice_ns
            answer = nc10d_await_flag(channel, until)
            if answer != DONE:
                return answer


@njit(nogil=True)
def nc10d_run(channel: int, program: int, x: int, y: int, slice_ns: int) -> int:
    """Run a program here and now if the channel is free; see `run`.

    Its arrays are x and y or, if x is 0, lie in a table at y.
    """
    if not nc10d_try_lock(channel):
        return BUSY
    if load(channel + C_HEAD) != load_acquire(channel + C_TAIL) or load(channel + C_BROKEN) != 0:
        nc10d_unlock(channel)
        return BUSY
    if x == 0:
        nc10d_begin(channel, program, y)
    else:
        store(channel + C_OWN_USERS, x)
        store(channel + C_OWN_USERS + 8, y)
        nc10d_begin(channel, program, channel + C_OWN_USERS)
    answer = nc10d_drive(channel, slice_ns)
    if answer == DONE:
        nc10d_unlock(channel)
    return answer


SLICE_NS = 50_000_000


@compiled("int64(int64, int64, int64)")
def _run(channel: int, program: int, table: int) -> int:
    return nc10d_run(channel, program, 0, table, SLICE_NS)


@compiled(types.int64(types.int64, types.int64, array_address, array_address))
def _run_arrays(channel: int, program: int, x: object, y: object) -> int:
    return nc10d_run(channel, program, as_int(x), as_int(y), SLICE_NS)


@compiled("int64(int64, int64)")
def _drive(channel: int, slice_ns: int) -> int:
    answer = nc10d_drive(channel, slice_ns)
    if answer == DONE:
        nc10d_unlock(channel)
    return answer


@njit(nogil=True)
def nc10d_submit(channel: int, descriptor: int, room: int) -> int:
    """Append a descriptor to the ring: DONE, or BUSY if it holds `room` of them."""
    while swap_if(channel + C_SUBMITTING, 0, 1) != 0:
        yield_core()
    tail = load(channel + C_TAIL)
    full = tail - load_acquire(channel + C_HEAD) >= room
    if not full:
        store(channel + C_RING + 8 * (tail % RING_SLOTS), descriptor)
        store_release(channel + C_TAIL, tail + 1)
    swap_if(channel + C_SUBMITTING, 1, 0)
    nc10d_wake_own(load(channel + C_PROCESS))
    return BUSY if full else DONE


@compiled("int64(int64, int64, int64)")
def _submit(channel: int, descriptor: int, room: int) -> int:
    return nc10d_submit(channel, descriptor, room)


@compiled(types.int64(types.int64, types.int64, array_address, types.int64))
def _submit_message(channel: int, descriptor: int, x: object, tag: int) -> int:
    store(descriptor + D_TAG, tag)
    store(load(descriptor + D_USERS), as_int(x))
    store_release(descriptor + D_STATUS, 0)
    return nc10d_submit(channel, descriptor, RING_SLOTS - 1)


@njit(nogil=True)
def nc10d_help(channel: int, descriptor: int, until: int) -> int:
    """Advance the channel, whose lock is held, until a submission of it has ended."""
    while True:
        answer = nc10d_progress(channel)
        if load_acquire(descriptor + D_STATUS) & FINISHED:
            return FINISHED
        if answer != BLOCKED:
            return answer
        answer = nc10d_await_flag(channel, until)
        if answer == BLOCKED:
            return 0
        if answer != DONE:
            return answer


@compiled("int64(int64, int64, int64)")
def _wait(channel: int, descriptor: int, slice_ns: int) -> int:
    process = load(channel + C_PROCESS)
    until = nc10d_now() + slice_ns
    tries = 0
    while True:
        bell = load_acquire_32(load(process + P_BELL))
        if load_acquire(descriptor + D_STATUS) & FINISHED:
            return FINISHED
        if nc10d_try_lock(channel):
            answer = nc10d_help(channel, descriptor, until)
            nc10d_unlock(channel)
            return answer
        if load_acquire(channel + C_BROKEN) != 0:
            return ABORTED
        # Somebody else advances the channel; it rings when a submission ends or it leaves.
        tries += 1
        if tries < load(channel + C_SPIN):
            pause()
        elif tries < load(channel + C_SPIN) + load(channel + C_YIELD):
            yield_core()
        else:
            add(process + P_SLEEPING, 1)
            # Looked at once more: who frees the channel rings only for those counted as asleep.
            ended = load_acquire(descriptor + D_STATUS) & FINISHED
            held = load_acquire(channel + C_LOCK) != 0
            if not ended and held and load_acquire(channel + C_BROKEN) == 0:
                nc10d_sleep(process, bell, until)
            add(process + P_SLEEPING, -1)
        if nc10d_now() >= until:
            return 0


@njit(nogil=True)
def nc10d_waiting(channel: int) -> bool:
    """Say whether a channel has submissions that the worker may advance."""
    if load_acquire(channel + C_BROKEN) != 0:
        return False
    return load_acquire(channel + C_HEAD) != load_acquire(channel + C_TAIL)


@njit(nogil=True)
def nc10d_attend(channel: int) -> int:
    """Advance one channel for the worker: DONE if something moved, BLOCKED, or a failure."""
    if not nc10d_waiting(channel):
        return BLOCKED
    if load_acquire(load(channel + C_AREA) + AREA_ABORT) != 0:
        return ABORTED
    if not nc10d_try_lock(channel):
        return BLOCKED
    head = load(channel + C_HEAD)
    step = load(channel + C_PC)
    known = load(channel + C_UNMATCHED)
    answer = nc10d_progress(channel)
    moved = load(channel + C_HEAD) != head or load(channel + C_PC) != step
    stray = answer == UNMATCHED and (moved or known == 0)
    if answer == BLOCKED:
        flag = load(channel + C_BLOCKED_AT)
        set_bits(flag + LINE_SLEEPERS, load(channel + C_BELL_BIT))
        moved = moved or load_acquire(flag) >= load(channel + C_BLOCKED_FOR)
        descriptor = load(channel + C_RING + 8 * (load(channel + C_HEAD) % RING_SLOTS))
        deadline = load(descriptor + D_DEADLINE)
        if not moved and deadline != 0 and nc10d_now() > deadline:
            answer = LATE
    exchange(channel + C_LOCK, 0)
    if stray:
        # Only Python can take a message aside that nobody asked for: call who waits or watches.
        nc10d_wake_own(load(channel + C_PROCESS))
        nc10d_write_event(load(load(channel + C_PROCESS) + P_EVENT_FD))
    if answer < 0:
        return answer
    return DONE if moved else BLOCKED


@compiled("int64(int64, int64, int64, int64)")
def _work(process: int, spin: int, yields: int, slice_ns: int) -> int:
    idle = 0
    while load_acquire(process + P_STOP) == 0:
        # Counted as asleep before the last look: who submits rings only for sleepers.
        sleepy = idle >= spin + yields
        if sleepy:
            add(process + P_SLEEPING, 1)
        bell = load_acquire_32(load(process + P_BELL))
        table = load(process + P_CHANNELS)
        moved = False
        for i in range(load_acquire(process + P_COUNT)):
            channel = load_acquire(table + 8 * i)
            if channel != 0:
                answer = nc10d_attend(channel)
                if answer < 0:
                    store(process + P_LATE, channel)
                    if sleepy:
                        add(process + P_SLEEPING, -1)
                    return answer
                moved = moved or answer == DONE
        add(process + P_ROUNDS, 1)
        idle = 0 if moved else idle + 1
        if sleepy:
            if not moved and load_acquire(process + P_STOP) == 0:
                nc10d_sleep(process, bell, nc10d_now() + slice_ns)
            add(process + P_SLEEPING, -1)
        elif idle < spin:
            pause()
        else:
            yield_core()
    return DONE


@compiled("int64(int64)")
def _break(channel: int) -> int:
    exchange(channel + C_BROKEN, 1)
    nc10d_wake_own(load(channel + C_PROCESS))
    for _ in range(10000):
        # A signal handler may stop the very channel that its thread is driving.
        if nc10d_try_lock(channel) or load_acquire(channel + C_LOCK) == this_thread():
            return DONE
        yield_core()
    return BUSY


@compiled("int64(int64)")
def _unlock(channel: int) -> int:
    nc10d_unlock(channel)
    return DONE


@compiled("int64(int64, int64)")
def _ring(process: int, ranks: int) -> int:
    nc10d_ring(process, ranks)
    nc10d_wake_own(process)
    return DONE


@compiled("int64(int64, int64, int64)")
def _swap_if(address: int, expected: int, value: int) -> int:
    return swap_if(address, expected, value)


@compiled("int64(int64)")
def _load(address: int) -> int:
    return load_acquire(address)


@compiled(types.int64(array_address))
def _address(array: object) -> int:
    return as_int(array)


@njit(nogil=True)
def nc10d_count(array: int) -> int:
    """Return how many elements an ndarray object has."""
    count = 1
    sizes = load(array + DIMS_OFFSET + 8)
    for i in range(load(array + DIMS_OFFSET) & 0xFFFFFFFF):
        count *= load(sizes + 8 * i)
    return count


@compiled(types.int64(array_list, types.int64, types.int64, types.int64))
def _read_arrays(arrays: object, count: int, kind: int, table: int) -> int:
    items = as_int(arrays)
    for i in range(count):
        array = load(items + 8 * i)
        if load(array + 8) != kind or load(array + FLAGS_OFFSET) & PLAIN_FLAGS != PLAIN_FLAGS:
            return i
        row = table + 8 * i
        store(row, load(array + DATA_OFFSET))
        store(row + 8 * count, load(array + DTYPE_OFFSET))
        store(row + 16 * count, nc10d_count(array))
    return -1


@compiled(types.int64(array_list, types.int64, types.int64))
def _same_arrays(arrays: object, count: int, table: int) -> int:
    items = as_int(arrays)
    for i in range(count):
        array = load(items + 8 * i)
        row = table + 8 * i
        if (
            load(row) != load(array + DATA_OFFSET)
            or load(row + 8 * count) != load(array + DTYPE_OFFSET)
            or load(row + 16 * count) != nc10d_count(array)
            or load(array + FLAGS_OFFSET) & PLAIN_FLAGS != PLAIN_FLAGS
        ):
            return 0
    return 1


@compiled("int64(int64, int64, int64, int64, int64)")
def _wait_any(process: int, bit: int, table: int, count: int, slice_ns: int) -> int:
    until = nc10d_now() + slice_ns
    tries = 0
    while True:
        bell = load_acquire_32(load(process + P_BELL))
        for i in range(count):
            flag = load(table + 16 * i)
            if tries > 200:
                set_bits(flag + LINE_SLEEPERS, bit)
            if load_acquire(flag) >= load(table + 16 * i + 8):
                return i
        tries += 1
        if tries <= 200:
            yield_core()
            continue
        if nc10d_now() >= until:
            return -1
        add(process + P_SLEEPING, 1)
        nc10d_sleep(process, bell, until)
        add(process + P_SLEEPING, -1)


run = entry_point(_run)
"""run(channel, program, table): run a program, with its arrays' addresses in a table, here and now.

DONE; BUSY if the channel has other work (submit instead); BLOCKED after a slice (go on with
`drive`) or a failure: then the caller still holds the channel.
"""
run_arrays = entry_point(_run_arrays)
"""run_arrays(channel, program, x, y): like `run`, with one or two ndarrays."""
drive = entry_point(_drive)
"""drive(channel, slice_ns): go on with what `run` began."""
submit = entry_point(_submit)
"""submit(channel, descriptor, room): append to the ring; BUSY if it holds `room` descriptors."""
submit_message = entry_point(_submit_message)
"""submit_message(channel, descriptor, array, tag): use a descriptor again for another message."""
wait = entry_point(_wait)
"""wait(channel, descriptor, slice_ns): help until it has ended.

FINISHED; 0 after a slice; UNMATCHED if a link's next message is nobody's; or a failure.
"""
work = entry_point(_work)
"""work(process, spin, yields, slice_ns): the worker; ends on P_STOP or with a failure."""
break_channel = entry_point(_break)
"""break_channel(channel): stop it for good and take its lock; BUSY: call again."""
unlock = entry_point(_unlock)
ring = entry_point(_ring)
"""ring(process, ranks): ring the doorbells of ranks (a bit mask) and my own."""
compare_and_swap = entry_point(_swap_if)
load_word = entry_point(_load)
address = entry_point(_address)
"""address(array): where an ndarray's data lies. Anything but an ndarray gives garbage."""
read_arrays = entry_point(_read_arrays)
"""read_arrays(list, count, id of the ndarray type, table): fill three columns of `count` words,
addresses, dtypes (as object addresses) and element counts. -1, or which is no plain ndarray.
"""
same_arrays = entry_point(_same_arrays)
"""same_arrays(list, count, table): 1 if these ndarrays still are as the table says."""
wait_any = entry_point(_wait_any)
"""wait_any(process, bit, table, count, slice_ns): index of the first counter that has come."""
