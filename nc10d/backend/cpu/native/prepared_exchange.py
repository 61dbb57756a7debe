"""A send and a receive as one call: prepared messages on two links, run by a single thread.

A short exchange sends without waiting and then receives. A longer exchange is submitted as two
messages, and `wait_both` advances both links in turn: if each rank in a ring first sent the whole
message, none would receive.
"""

from __future__ import annotations

from numba import njit, types

from nc10d.backend.cpu.native import atomics, waiting
from nc10d.backend.cpu.native import offsets as at
from nc10d.backend.cpu.native.atomics import load, load_acquire, store_release
from nc10d.backend.cpu.native.cpython import DATA_OFFSET
from nc10d.backend.cpu.native.prepared_messages import (
    AT_ONCE,
    WAITS,
    nc10d_begin_receiving,
    nc10d_fill_descriptor,
    nc10d_fits_message,
    nc10d_run_message,
)
from nc10d.backend.cpu.native.progress import nc10d_advance_ring, nc10d_cancel_wakeup
from nc10d.backend.cpu.native.ring import nc10d_append
from nc10d.kernels.cache import entry_points, on_demand

SENT = 9
"""The answer from an exchange that has sent, and has yet to receive."""
_WORD, _OBJECT = types.int64, atomics.any_object


@njit(nogil=True)
def nc10d_disjoint(a: int, a_bytes: int, b: int, b_bytes: int) -> bool:
    """Return whether two pieces of memory share no byte."""
    return a + a_bytes <= b or b + b_bytes <= a


@njit(nogil=True)
def nc10d_fit_messages(send: int, out: int, receive: int, inp: int) -> bool:
    """Return whether two objects are arrays for a sent and a received message, and lie apart."""
    if not nc10d_fits_message(load(send + at.D_CHANNEL), send, out):
        return False
    if not nc10d_fits_message(load(receive + at.D_CHANNEL), receive, inp):
        return False
    x, y = load(out + DATA_OFFSET), load(inp + DATA_OFFSET)
    return nc10d_disjoint(x, load(send + at.D_BYTES), y, load(receive + at.D_BYTES))


@on_demand(types.int64(_OBJECT, _OBJECT, _OBJECT, _OBJECT, _WORD, _WORD))
def _run_exchange(
    sends: object, receives: object, x: object, y: object, tag: int, take: int
) -> int:
    """Send x and receive y in this thread; both objects are any, both tags have been checked.

    `sends` and `receives` are the words of prepared messages, of which the sent one is short.
    Returns DONE; BUSY, with nothing done, if the arrays do not fit or overlap, or the send does not
    end at once; NEW_SITE as `run_message`; SENT if the receive has yet to begin; or the receive's
    answer, as `run_message`.
    """
    send = load(atomics.as_int(sends) + DATA_OFFSET)
    receive = load(atomics.as_int(receives) + DATA_OFFSET)
    out, inp = atomics.as_int(x), atomics.as_int(y)
    if not nc10d_fit_messages(send, out, receive, inp):
        return at.BUSY
    answer = nc10d_run_message(send, out, tag, AT_ONCE)
    if answer != at.DONE:
        return answer
    answer = nc10d_run_message(receive, inp, take, WAITS)
    return SENT if answer in (at.BUSY, at.NEW_SITE) else answer


@njit(nogil=True)
def nc10d_has_ended(descriptor: int) -> bool:
    """Return whether a submission has ended."""
    return load_acquire(descriptor + at.D_STATUS) & at.FINISHED != 0


@njit(nogil=True)
def nc10d_lock_both(sender: int, receiver: int) -> bool:
    """Lock both channels, or none."""
    # With both locks no other thread copies at the same time, which would take a peer's core.
    if not waiting.nc10d_try_lock(sender):
        return False
    if waiting.nc10d_try_lock(receiver):
        return True
    waiting.nc10d_unlock(sender)
    return False


@njit(nogil=True)
def nc10d_await_either(one: int, other: int, until: int) -> int:
    """Wait until the counter that blocks either channel has come: DONE, ABORTED or BLOCKED.

    Both channels are the same for a thread that waits for one.
    """
    for _ in range(load(one + at.C_SPIN)):
        if waiting.nc10d_has_come(one) or waiting.nc10d_has_come(other):
            return at.DONE
        atomics.pause()
    began = atomics.nc10d_now()
    for _ in range(load(one + at.C_YIELD)):
        atomics.yield_core()
        if waiting.nc10d_has_come(one) or waiting.nc10d_has_come(other):
            return at.DONE
        if atomics.nc10d_now() - began > waiting.LONG_NS:
            break
    return waiting.nc10d_sleep_for_either(one, other, until)


@njit(nogil=True)
def nc10d_advance_both(sender: int, sent: int, receiver: int, received: int, until: int) -> int:
    """Do as `wait_both`, with both channels' locks held."""
    while True:
        answers = at.BLOCKED, at.BLOCKED
        if not nc10d_has_ended(sent):
            answers = nc10d_advance_ring(sender), answers[1]
        if not nc10d_has_ended(received):
            answers = answers[0], nc10d_advance_ring(receiver)
        ended = nc10d_has_ended(sent), nc10d_has_ended(received)
        if ended[0] and ended[1]:
            return at.FINISHED
        if not ended[0] and answers[0] != at.BLOCKED:
            return answers[0]
        if not ended[1] and answers[1] != at.BLOCKED:
            return answers[1]
        one, other = receiver if ended[0] else sender, sender if ended[1] else receiver
        for channel in (one, other):
            nc10d_cancel_wakeup(channel)
        answer = nc10d_await_either(one, other, until)
        if answer != at.DONE:
            return 0 if answer == at.BLOCKED else answer


@on_demand(types.int64(_WORD, _WORD, _WORD, _WORD, _WORD))
def _wait_both(sender: int, sent: int, receiver: int, received: int, slice_ns: int) -> int:
    """Advance a submission on each of two links on a host until both have ended.

    Returns FINISHED; 0 after a slice; UNMATCHED if no receive is posted for the receiver's next
    message; BUSY if another thread advances a link; or either link's failure.
    """
    if not nc10d_lock_both(sender, receiver):
        return at.BUSY
    until = atomics.nc10d_now() + slice_ns
    answer = nc10d_advance_both(sender, sent, receiver, received, until)
    waiting.nc10d_unlock(receiver)
    waiting.nc10d_unlock(sender)
    return answer


@njit(nogil=True)
def nc10d_is_free(channel: int) -> bool:
    """Return whether a channel, whose lock is held, has nothing to run and has not failed."""
    if load_acquire(channel + at.C_BROKEN) != 0 or waiting.nc10d_group_failed(channel):
        return False
    return load(channel + at.C_HEAD) == load_acquire(channel + at.C_TAIL)


@njit(nogil=True)
def nc10d_post_both(sender: int, sent: int, receiver: int, received: int) -> int:
    """Append to both rings, with both locks held; DONE, BUSY or NEW_SITE with nothing done."""
    if not (nc10d_is_free(sender) and nc10d_is_free(receiver) and nc10d_begin_receiving(receiver)):
        return at.BUSY
    answer = nc10d_append(receiver, received)
    # Admitted, this thread excludes the unexpected queue, where the message could be otherwise.
    store_release(receiver + at.C_RECEIVING, 0)
    if answer != at.DONE:
        return answer
    # Other threads may have filled the sender's ring since.
    while nc10d_append(sender, sent) != at.DONE:
        answer = nc10d_advance_ring(sender)
        if answer < 0:
            return answer
    return at.DONE


@on_demand(
    types.int64(
        *(_OBJECT, _OBJECT, _OBJECT, _OBJECT, _WORD, _WORD), *(_OBJECT, _OBJECT, _WORD, _WORD)
    )
)
def _start_exchange(
    sends: object,
    receives: object,
    x: object,
    y: object,
    tag: int,
    take: int,
    sent_words: object,
    received_words: object,
    deadline: int,
    slice_ns: int,
) -> int:
    """Submit a send and a receive, and advance both; the arguments up to `take`: `run_exchange`.

    `sent_words` and `received_words` are zeroed arrays for two descriptors; `deadline` is in ns.
    Returns as `wait_both`; BUSY and NEW_SITE with nothing done.
    """
    send = load(atomics.as_int(sends) + DATA_OFFSET)
    receive = load(atomics.as_int(receives) + DATA_OFFSET)
    out, inp = atomics.as_int(x), atomics.as_int(y)
    if not nc10d_fit_messages(send, out, receive, inp):
        return at.BUSY
    sent = load(atomics.as_int(sent_words) + DATA_OFFSET)
    received = load(atomics.as_int(received_words) + DATA_OFFSET)
    nc10d_fill_descriptor(sent, send, out, tag, deadline)
    nc10d_fill_descriptor(received, receive, inp, take, deadline)
    sender, receiver = load(send + at.D_CHANNEL), load(receive + at.D_CHANNEL)
    if not nc10d_lock_both(sender, receiver):
        return at.BUSY
    answer = nc10d_post_both(sender, sent, receiver, received)
    if answer == at.DONE:
        until = atomics.nc10d_now() + slice_ns
        answer = nc10d_advance_both(sender, sent, receiver, received, until)
    waiting.nc10d_unlock(receiver)
    waiting.nc10d_unlock(sender)
    return answer


__getattr__ = entry_points(__name__)
