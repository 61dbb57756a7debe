"""Messages on a link's end: run one here and now if nothing is in its way, or submit it.

Who runs a message in its own thread needs no place in the ring, and wakes nobody. A short one (it
fits in half a board, and goes to a rank of this host) needs not even wait, once the board is free
or the message there.
"""

from __future__ import annotations

from numba import njit, types

from nc10d.backend.cpu.native import offsets as at
from nc10d.backend.cpu.native.atomics import (
    any_object,
    as_int,
    call_engine,
    exchange,
    load,
    load_acquire,
    nc10d_now,
    store,
    store_release,
)
from nc10d.backend.cpu.native.cpython import DATA_OFFSET
from nc10d.backend.cpu.native.log import nc10d_end_message
from nc10d.backend.cpu.native.prepared_calls import nc10d_is
from nc10d.backend.cpu.native.progress import (
    nc10d_aborted,
    nc10d_begin,
    nc10d_submit,
    nc10d_submit_here,
)
from nc10d.backend.cpu.native.sites import nc10d_site
from nc10d.backend.cpu.native.waiting import (
    nc10d_drive,
    nc10d_linger,
    nc10d_spin,
    nc10d_try_lock,
    nc10d_unlock,
    nc10d_yield,
)
from nc10d.kernels.lazy import EntryPoint, entry_points, on_demand

_WORD = types.int64
A_FEW = 16
A_LITTLE = 4096  # bytes: a look at the clock costs a message of so many a twentieth or more
SLICE_NS = 50_000_000

AT_ONCE, SOON, WAITS = 0, 1, 2
"""How patient who sends or receives is: not at all; for a spin; until it is over."""


@njit(nogil=True)
def nc10d_carries(channel: int, model: int, array: int) -> bool:
    """Say whether an object is an array that a known message is for."""
    dtype, count = load(model + at.D_ARRAY_DTYPE), load(model + at.D_ARRAY_COUNT)
    return nc10d_is(array, load(channel + at.C_ARRAY_TYPE), dtype, count, -1)


@njit(nogil=True)
def nc10d_pulled(channel: int) -> bool:
    """Say whether the header of the next message from another host comes within a little while.

    What fails here fails once more for who then waits in the ring, and is told there.
    """
    pull = load(load(channel + at.C_STREAMS) + at.S_PULL)
    answer = call_engine(pull, channel)
    while answer == at.BLOCKED and nc10d_linger(channel):
        answer = call_engine(pull, channel)
    return answer == at.DONE


@njit(nogil=True)
def nc10d_soon(channel: int, flag: int, target: int, how_soon: int) -> bool:
    """Say whether a counter has come; wait a little, unless it must be at once."""
    if load_acquire(flag) >= target:
        return True
    if how_soon == AT_ONCE:
        return False
    if how_soon == SOON:
        return nc10d_spin(channel, flag, target)
    if load(channel + at.C_STREAMS) != 0:
        return nc10d_pulled(channel)
    return nc10d_spin(channel, flag, target) or nc10d_yield(channel, flag, target, A_FEW)


@njit(nogil=True)
def nc10d_admitted(channel: int) -> bool:
    """Say whether this thread may take the message at the head of a link past the ring.

    The exchange is a full fence: either I see that the inbox is held, or its holder sees me.
    """
    if load_acquire(channel + at.C_RECEIVING) != 0:
        return False
    exchange(channel + at.C_RECEIVING, 1)
    if load_acquire(channel + at.C_GUARD) == 0:
        return True
    store_release(channel + at.C_RECEIVING, 0)
    return False


@njit(nogil=True)
def nc10d_awaited(channel: int, descriptor: int, tag: int, how_soon: int) -> bool:
    """Say whether the message at the head of a link is the one that a descriptor is for.

    All of it must be there if I may not wait in the middle.
    """
    sent = load(load(channel + at.C_FLAGS))
    wanted = 1 if how_soon == WAITS else at.LINK_TICKS
    if not nc10d_soon(channel, sent, load(channel + at.C_SEQ) + wanted, how_soon):
        return False
    header = sent + at.LINK_TAG + at.LINK_HEADER_BYTES * (load(channel + at.C_ROUND) & 1)
    return (
        load(header) == tag
        and load(header + 8) == load(descriptor + at.D_BYTES)
        and load(header + 16) == load(descriptor + at.D_DTYPE)
    )


@njit(nogil=True)
def nc10d_move_message(
    channel: int, descriptor: int, x: int, tag: int, site: int, how_soon: int
) -> int:
    """Run a message on a channel whose lock is held; BUSY if something is in the way."""
    if load(channel + at.C_BROKEN) != 0 or nc10d_aborted(channel):
        return at.BUSY
    if load(channel + at.C_HEAD) != load_acquire(channel + at.C_TAIL):
        return at.BUSY
    if load(channel + at.C_KIND) == at.RECEIVER:
        if not nc10d_awaited(channel, descriptor, tag, how_soon):
            return at.BUSY
        # Somebody asks for it now: it is no stray that could be taken aside.
        store_release(channel + at.C_UNMATCHED, 0)
    store(descriptor + at.D_TAG, tag)
    store(load(descriptor + at.D_USERS), x)
    store(channel + at.C_MESSAGE, descriptor)
    store(channel + at.C_SITE, site)
    # A look at the clock costs a little message much: if it never waits, one has to do.
    little = load(descriptor + at.D_BYTES) <= A_LITTLE and load(channel + at.C_STREAMS) == 0
    store(channel + at.C_BEGUN, 0 if little else nc10d_now())
    nc10d_begin(channel, load(descriptor + at.D_PROGRAM), load(descriptor + at.D_USERS))
    if how_soon == WAITS and not little:
        return nc10d_drive(channel, SLICE_NS)
    answer = call_engine(load(channel + at.C_ADVANCE), channel)
    if how_soon != WAITS:
        # A short message can block at its first step only: nothing has happened then.
        return at.BUSY if answer == at.BLOCKED else at.DONE
    if answer != at.BLOCKED:
        return answer
    store(channel + at.C_BEGUN, nc10d_now())
    return nc10d_drive(channel, SLICE_NS)


@njit(nogil=True)
def nc10d_message(descriptor: int, array: int, tag: int, how_soon: int) -> int:
    """Send or receive here and now; see `run_message`."""
    channel = load(descriptor + at.D_CHANNEL)
    if not nc10d_carries(channel, descriptor, array):
        return at.BUSY
    site = nc10d_site(channel)
    if site == at.NEW_SITE:
        return at.NEW_SITE
    if not nc10d_try_lock(channel):
        return at.BUSY
    if load(channel + at.C_KIND) == at.RECEIVER and not nc10d_admitted(channel):
        nc10d_unlock(channel)
        return at.BUSY
    data = load(array + DATA_OFFSET)
    answer = nc10d_move_message(channel, descriptor, data, tag, site, how_soon)
    if answer == at.DONE:
        nc10d_end_message(channel, nc10d_now())
    if answer in (at.DONE, at.BUSY):
        store_release(channel + at.C_RECEIVING, 0)
        nc10d_unlock(channel)
    return answer


@on_demand(types.int64(any_object, any_object, _WORD))
def _run_message(words: object, x: object, tag: int) -> int:
    return nc10d_message(load(as_int(words) + DATA_OFFSET), as_int(x), tag, WAITS)


@on_demand(types.int64(_WORD, any_object, _WORD, _WORD))
def _try_message(descriptor: int, x: object, tag: int, how_soon: int) -> int:
    return nc10d_message(descriptor, as_int(x), tag, how_soon)


@on_demand(types.int64(_WORD, any_object, _WORD, _WORD, any_object, _WORD, _WORD))
def _submit_message(
    channel: int, words: object, model: int, deadline: int, x: object, tag: int, spins: int
) -> int:
    array = as_int(x)
    if not nc10d_carries(channel, model, array) or load_acquire(channel + at.C_BROKEN) != 0:
        return at.BUSY
    descriptor = load(as_int(words) + DATA_OFFSET)
    users = descriptor + 8 * at.DESCRIPTOR_WORDS
    store(descriptor + at.D_PROGRAM, load(model + at.D_PROGRAM))
    store(descriptor + at.D_USERS, users)
    store(descriptor + at.D_DEADLINE, deadline)
    store(descriptor + at.D_TAG, tag)
    store(descriptor + at.D_BYTES, load(model + at.D_BYTES))
    store(descriptor + at.D_DTYPE, load(model + at.D_DTYPE))
    store(users, load(array + DATA_OFFSET))
    if spins >= 0:
        return nc10d_submit_here(channel, descriptor, spins)
    return nc10d_submit(channel, descriptor)


run_message: EntryPoint
"""run_message(words, x, tag): send or receive here and now, and wait for the peer.

`words` is a descriptor that says what message it is, on what channel; x is any object. DONE; BUSY:
nothing has happened (x is not such an array, the peer is not there yet, another message is at the
head, the inbox is held, the channel is used or stopped); NEW_SITE as engine.run; else as that, with
`drive` to go on, and C_RECEIVING to be cleared after that.
"""
try_message: EntryPoint
"""try_message(descriptor, x, tag, how_soon): as run_message for a short message, but either
AT_ONCE or SOON; `descriptor` is where its words lie.
"""
submit_message: EntryPoint
"""submit_message(channel, words, model, deadline_ns, x, tag, spins): fill in a descriptor and
submit it.

`words` is zeroed and has room for an address; the rest is as in the descriptor `model`. If its
`spins` is not negative, this thread advances it first, and spins so often for the peer. As
arrays.submit_known.
"""

__getattr__ = entry_points(__name__)
