"""Prepared messages on one end of a link: run a message in this thread, or submit it.

A message that runs in the calling thread takes no place in the ring and wakes no thread. A short
message (within one slot of the staging buffer, to a rank on this host) never waits in the middle:
once the slot is free, or the message there, the program runs to its end.

    receiver of a message               mark                     excludes
    a thread, past the ring             C_RECEIVING is 1         messages moved aside by Python
    a thread that posts a receive       C_POSTING is not 0       the same
    the unexpected queue (Python)       C_GUARD is not 0         both

C_GUARD also excludes both while a receive from any source is pending, which they would overtake.

Both sides set their own mark and then look at the other's, with a full fence between the two, so at
most a single side goes on.
"""

from __future__ import annotations

from numba import njit, types

from nc10d.backend.cpu.native import atomics, progress, submitting, waiting
from nc10d.backend.cpu.native import offsets as at
from nc10d.backend.cpu.native.atomics import load, load_acquire, store, store_release
from nc10d.backend.cpu.native.cpython import DATA_OFFSET
from nc10d.backend.cpu.native.log import nc10d_log_message
from nc10d.backend.cpu.native.prepared_calls import nc10d_is_array
from nc10d.backend.cpu.native.sites import nc10d_site
from nc10d.kernels.cache import entry_points, on_demand

_WORD = types.int64
YIELDS = 100  # some 40 µs, and LONG_NS at most: Python must come to the unexpected queue
A_LITTLE = 4096  # bytes: reading the clock costs a smaller message a twentieth of its time or more

AT_ONCE, SOON, WAITS = 0, 1, 2
"""How long a message waits for the peer: not at all; for a spin; until the message has passed.

With WAITS, too, a receive waits only briefly for a message to begin, and then answers BUSY.
"""


@njit(nogil=True)
def nc10d_fits_message(channel: int, model: int, array: int) -> bool:
    """Return whether an object is an array that fits a prepared message."""
    dtype, count = load(model + at.D_ARRAY_DTYPE), load(model + at.D_ARRAY_COUNT)
    return nc10d_is_array(array, load(channel + at.C_ARRAY_TYPE), dtype, count, -1)


@njit(nogil=True)
def nc10d_pull_soon(channel: int) -> bool:
    """Return whether the next message's header comes soon from another host."""
    # A failure counts as no: the submission that waits in the ring then meets and reports it again.
    pull = load(load(channel + at.C_STREAMS) + at.S_PULL)
    answer = atomics.call_address(pull, channel)
    while answer == at.BLOCKED and waiting.nc10d_linger(channel):
        answer = atomics.call_address(pull, channel)
    return answer == at.DONE


@njit(nogil=True)
def nc10d_await_soon(channel: int, counter: int, target: int, how_soon: int) -> bool:
    """Return whether a counter has come to `target`, waiting as long as `how_soon` allows."""
    if load_acquire(counter) >= target:
        return True
    if how_soon == AT_ONCE:
        return False
    if how_soon == SOON:
        return waiting.nc10d_spin(channel, counter, target)
    if load(channel + at.C_STREAMS) != 0:
        return nc10d_pull_soon(channel)
    if waiting.nc10d_spin(channel, counter, target):
        return True
    return waiting.nc10d_yield(channel, counter, target, YIELDS)


@njit(nogil=True)
def nc10d_begin_receiving(channel: int) -> bool:
    """Return whether this thread may take the message at the head of a link past the ring."""
    # The exchange is a full fence: this thread sees that the unexpected queue is held, or the
    # holder sees C_RECEIVING.
    if load_acquire(channel + at.C_RECEIVING) != 0:
        return False
    # Plain loads and stores would not do: both sides could miss the other's mark.
    atomics.exchange(channel + at.C_RECEIVING, 1)
    if load_acquire(channel + at.C_GUARD) == 0:
        return True
    store_release(channel + at.C_RECEIVING, 0)
    return False


@njit(nogil=True)
def nc10d_head_fits(channel: int, descriptor: int, tag: int, how_soon: int) -> bool:
    """Return whether the message at the head of a link fits a descriptor."""
    # If the thread may not wait in the middle of a message, the whole message must be there.
    sent = load(load(channel + at.C_COUNTERS))
    # Tick 1 states that the header is there, the last tick that the whole message is.
    wanted = 1 if how_soon == WAITS else at.LINK_TICKS
    if not nc10d_await_soon(channel, sent, load(channel + at.C_TICKS) + wanted, how_soon):
        return False
    header = load(channel + at.C_CELL) + at.CELL_HEADER
    return (
        load(header) == tag
        and load(header + 8) == load(descriptor + at.D_BYTES)
        and load(header + 16) == load(descriptor + at.D_DTYPE)
    )


@njit(nogil=True)
def nc10d_receive_later(channel: int, descriptor: int, x: int, tag: int, site: int) -> int:
    """Receive a small message from a cell behind the head's, whose tag is another; DONE or BUSY."""
    if load(channel + at.C_STREAMS) != 0 or load(descriptor + at.D_BYTES) > at.CELL_DATA_BYTES:
        return at.BUSY
    number, mask = load(channel + at.C_ROUND), load(channel + at.C_CELL_MASK)
    # A message with several rounds ends the search: their number is not known here.
    sent = load_acquire(load(load(channel + at.C_COUNTERS)))
    there = (sent - load(channel + at.C_TICKS)) // at.LINK_TICKS
    received = load(channel + at.C_RECEIVED)
    for later in range(number, number + min(there, mask + 1)):
        place = later & mask
        cell = load(channel + at.C_CELLS) + at.CELL_BYTES * place
        header = cell + at.CELL_HEADER
        if load(header + 8) > at.CELL_DATA_BYTES:
            return at.BUSY
        if load(header) != tag or received & (1 << place) != 0:
            continue
        # The head's cell is received in the ordinary way, and so is an error reported.
        fits = load(header + 8) == load(descriptor + at.D_BYTES)
        if later == number or not fits or load(header + 16) != load(descriptor + at.D_DTYPE):
            return at.BUSY
        store(descriptor + at.D_TAG, tag)
        store(channel + at.C_MESSAGE, descriptor)
        store(channel + at.C_SITE, site)
        store(channel + at.C_BEGUN, 0)
        atomics.move(x, cell + at.CELL_DATA, load(header + 8))
        store(channel + at.C_RECEIVED, received | (1 << place))
        return at.DONE
    return at.BUSY


@njit(nogil=True)
def nc10d_move_message(
    channel: int, descriptor: int, x: int, tag: int, site: int, how_soon: int
) -> int:
    """Run a message on a channel whose lock is held; BUSY, with nothing done, if it can't run."""
    if load(channel + at.C_BROKEN) != 0 or waiting.nc10d_group_failed(channel):
        return at.BUSY
    # A link's messages keep their order: a message in the ring was called earlier.
    if load(channel + at.C_HEAD) != load_acquire(channel + at.C_TAIL):
        return at.BUSY
    if load(channel + at.C_KIND) == at.RECEIVER:
        if not nc10d_head_fits(channel, descriptor, tag, how_soon):
            return nc10d_receive_later(channel, descriptor, x, tag, site)
        # A receive takes the message now: Python must not move it to the unexpected queue.
        store_release(channel + at.C_UNMATCHED, 0)
    store(descriptor + at.D_TAG, tag)
    store(load(descriptor + at.D_USERS), x)
    store(channel + at.C_MESSAGE, descriptor)
    store(channel + at.C_SITE, site)
    # Reading the clock is a large part of a small message: without a wait, once must do.
    small = load(descriptor + at.D_BYTES) <= A_LITTLE and load(channel + at.C_STREAMS) == 0
    store(channel + at.C_BEGUN, 0 if small else atomics.nc10d_now())
    progress.nc10d_load_program(
        channel, load(descriptor + at.D_PROGRAM), load(descriptor + at.D_USERS)
    )
    if how_soon == WAITS and not small:
        return waiting.nc10d_drive(channel, waiting.SLICE_NS)
    answer = atomics.call_address(load(channel + at.C_ADVANCE), channel)
    if how_soon != WAITS:
        # A short message can block at the first step only, with nothing done.
        return at.BUSY if answer == at.BLOCKED else at.DONE
    if answer != at.BLOCKED:
        return answer
    store(channel + at.C_BEGUN, atomics.nc10d_now())
    return waiting.nc10d_drive(channel, waiting.SLICE_NS)


@njit(nogil=True)
def nc10d_run_message(descriptor: int, array: int, tag: int, how_soon: int) -> int:
    """Send or receive in this thread; see `run_message`."""
    channel = load(descriptor + at.D_CHANNEL)
    # A link's messages keep their order. Looked at before the lock is taken, too: letting go of a
    # lock wakes the worker if the ring holds messages.
    if load(channel + at.C_HEAD) != load_acquire(channel + at.C_TAIL):
        return at.BUSY
    if not nc10d_fits_message(channel, descriptor, array):
        return at.BUSY
    return nc10d_run_message_at(descriptor, load(array + DATA_OFFSET), tag, how_soon)


@njit(nogil=True)
def nc10d_run_message_at(descriptor: int, data: int, tag: int, how_soon: int) -> int:
    """Do as `nc10d_run_message`, for an array at an address, which has been checked."""
    channel = load(descriptor + at.D_CHANNEL)
    site = nc10d_site(channel)
    if site == at.NEW_SITE:
        return at.NEW_SITE
    if not waiting.nc10d_try_lock(channel):
        return at.BUSY
    if load(channel + at.C_KIND) == at.RECEIVER and not nc10d_begin_receiving(channel):
        waiting.nc10d_unlock(channel)
        return at.BUSY
    answer = nc10d_move_message(channel, descriptor, data, tag, site, how_soon)
    if answer == at.DONE:
        nc10d_log_message(channel, atomics.nc10d_now())
    # After any other answer the caller still holds the channel, and with it C_RECEIVING.
    if answer in (at.DONE, at.BUSY):
        store_release(channel + at.C_RECEIVING, 0)
        waiting.nc10d_unlock(channel)
    return answer


@on_demand(types.int64(atomics.any_object, atomics.any_object, _WORD))
def _run_message(words: object, x: object, tag: int) -> int:
    """Send or receive in this thread; wait for the peer, but only briefly for a message to begin.

    `words` is the message's descriptor and channel; x is any object. Returns DONE, or BUSY with
    nothing done: x is no such array, the peer has not come, another message is at the head, the
    unexpected queue is held, or the channel is used or stopped. NEW_SITE, BLOCKED and failures are
    as from `run` in entry_points.py; after `drive` the caller clears C_RECEIVING.
    """
    return nc10d_run_message(
        load(atomics.as_int(words) + DATA_OFFSET), atomics.as_int(x), tag, WAITS
    )


@on_demand(types.int64(_WORD, atomics.any_object, _WORD, _WORD))
def _try_message(descriptor: int, x: object, tag: int, how_soon: int) -> int:
    """Do as run_message for the descriptor at an address: a short message, AT_ONCE or SOON."""
    return nc10d_run_message(descriptor, atomics.as_int(x), tag, how_soon)


@njit(nogil=True)
def nc10d_begin_posting(channel: int) -> bool:
    """Return whether a receive may be appended; the caller then counts C_POSTING down again."""
    # The add is a full fence: this thread sees that the unexpected queue is held or has messages,
    # or the holder sees C_POSTING.
    atomics.add(channel + at.C_POSTING, 1)
    if load_acquire(channel + at.C_GUARD) == 0:
        return True
    atomics.add(channel + at.C_POSTING, -1)
    return False


@njit(nogil=True)
def nc10d_fill_descriptor(descriptor: int, model: int, array: int, tag: int, deadline: int) -> None:
    """Fill in a descriptor: `model`'s message, on this array, with this tag."""
    users = descriptor + 8 * at.DESCRIPTOR_WORDS
    for field in (at.D_PROGRAM, at.D_BYTES, at.D_DTYPE):
        store(descriptor + field, load(model + field))
    store(descriptor + at.D_USERS, users)
    store(descriptor + at.D_DEADLINE, deadline)
    store(descriptor + at.D_STATUS, 0)
    store(descriptor + at.D_TAG, tag)
    store(users, load(array + DATA_OFFSET))


@on_demand(types.int64(atomics.any_object, _WORD, types.float64, atomics.any_object, _WORD, _WORD))
def _submit_message(
    words: object, model: int, timeout: float, x: object, tag: int, waits: int
) -> int:
    """Fill in a descriptor and submit it; `timeout` is in seconds.

    `words` is an array for the descriptor, copied from that at `model`, and for an address. This
    thread first advances the channel, as often as the model says for a thread that `waits` next or
    does not. Answers as `submit_prepared` in prepared_calls.py; BUSY also for a receive while the
    unexpected queue is held or has messages.
    """
    array, channel = atomics.as_int(x), load(model + at.D_CHANNEL)
    if not nc10d_fits_message(channel, model, array) or load_acquire(channel + at.C_BROKEN) != 0:
        return at.BUSY
    descriptor = load(atomics.as_int(words) + DATA_OFFSET)
    nc10d_fill_descriptor(descriptor, model, array, tag, submitting.nc10d_deadline(timeout))
    receives = load(channel + at.C_KIND) == at.RECEIVER
    if receives and not nc10d_begin_posting(channel):
        return at.BUSY
    looks = load(model + (at.D_LOOKS_WAITING if waits != 0 else at.D_LOOKS))
    if looks >= 0:
        answer = submitting.nc10d_submit_and_advance(channel, descriptor, looks)
    else:
        answer = submitting.nc10d_submit(channel, descriptor)
    if receives:
        atomics.add(channel + at.C_POSTING, -1)
    return answer


__getattr__ = entry_points(__name__)
