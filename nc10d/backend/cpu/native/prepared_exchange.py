"""A send and a receive as one call: prepared messages on two links, run by a single thread.

A short exchange sends without waiting and then receives. A longer exchange is submitted as two
messages, and `wait_both` advances both links in turn: if each rank of a ring first sent all of its
message, none would receive.
"""

from __future__ import annotations

from numba import njit, types

from nc10d.backend.cpu.native import atomics, waiting
from nc10d.backend.cpu.native import offsets as at
from nc10d.backend.cpu.native.atomics import load, load_acquire
from nc10d.backend.cpu.native.cpython import DATA_OFFSET
from nc10d.backend.cpu.native.prepared_messages import AT_ONCE, WAITS, nc10d_carries, nc10d_message
from nc10d.backend.cpu.native.progress import nc10d_attend
from nc10d.kernels.cache import entry_points, on_demand

SENT = 9
"""The answer of an exchange that has sent, and has yet to receive."""
_WORD = types.int64


@njit(nogil=True)
def nc10d_disjoint(a: int, a_bytes: int, b: int, b_bytes: int) -> bool:
    """Return whether two pieces of memory share no byte."""
    return a + a_bytes <= b or b + b_bytes <= a


@on_demand(
    types.int64(
        *(atomics.any_object, atomics.any_object, atomics.any_object, atomics.any_object),
        *(_WORD, _WORD),
    )
)
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
    fit = nc10d_carries(load(send + at.D_CHANNEL), send, out)
    if not (fit and nc10d_carries(load(receive + at.D_CHANNEL), receive, inp)):
        return at.BUSY
    spans = load(out + DATA_OFFSET), load(inp + DATA_OFFSET)
    if not nc10d_disjoint(spans[0], load(send + at.D_BYTES), spans[1], load(receive + at.D_BYTES)):
        return at.BUSY
    answer = nc10d_message(send, out, tag, AT_ONCE)
    if answer != at.DONE:
        return answer
    answer = nc10d_message(receive, inp, take, WAITS)
    return SENT if answer in (at.BUSY, at.NEW_SITE) else answer


@njit(nogil=True)
def nc10d_ended(descriptor: int) -> bool:
    """Return whether a submission has ended."""
    return load_acquire(descriptor + at.D_STATUS) & at.FINISHED != 0


@on_demand(types.int64(_WORD, _WORD, _WORD, _WORD, _WORD))
def _wait_both(sender: int, sent: int, receiver: int, received: int, slice_ns: int) -> int:
    """Advance a submission on each of two links of a rank until both have ended.

    Returns FINISHED; 0 after a slice; UNMATCHED if no receive is posted for the receiver's next
    message; or a failure of either link.
    """
    rank_block = load(sender + at.C_RANK_BLOCK)
    patience = load(sender + at.C_SPIN) + load(sender + at.C_YIELD)
    until = atomics.nc10d_now() + slice_ns
    idle = 0
    while True:
        # As in the worker's loop: counted as asleep before the last look.
        sleepy = idle >= patience
        if sleepy:
            atomics.add(rank_block + at.P_SLEEPING, 1)
            atomics.add(rank_block + at.P_WAITING, 1)
        bell = atomics.load_acquire_32(load(rank_block + at.P_BELL))
        moved = False
        answer = at.FINISHED if nc10d_ended(sent) and nc10d_ended(received) else 0
        for channel, descriptor in ((sender, sent), (receiver, received)):
            if answer == 0 and not nc10d_ended(descriptor):
                found = nc10d_attend(channel, sleepy, 0)
                moved = moved or found == at.DONE
                answer = min(found, 0)
        if answer == 0 and load_acquire(receiver + at.C_UNMATCHED) != 0:
            answer = at.UNMATCHED if not nc10d_ended(received) else 0
        idle = 0 if moved else idle + 1
        over = answer != 0 or (not moved and idle & 15 == 0 and atomics.nc10d_now() >= until)
        if sleepy:
            if not (over or moved):
                waiting.nc10d_sleep(rank_block, bell, until)
                over = atomics.nc10d_now() >= until
            atomics.add(rank_block + at.P_WAITING, -1)
            atomics.add(rank_block + at.P_SLEEPING, -1)
        elif idle < load(sender + at.C_SPIN):
            atomics.pause()
        else:
            atomics.yield_core()
        if over:
            return answer


__getattr__ = entry_points(__name__)
