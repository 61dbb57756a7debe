"""A packed step: the offsets of its fields, and the addresses that its operands mean now.

A step is FIELDS integers (linker.py packs them); an operand is a selector, an offset and a stride.
"""

from __future__ import annotations

from numba import njit

from nc10d.backend.cpu.native import offsets as at
from nc10d.backend.cpu.native.atomics import call_kernel, load, move, store

# A step's fields, in bytes from its start (linker.py packs them).
STEP = 168
NBYTES, TICK, DST, SRC, OWN, ALSO = 8, 16, 24, 48, 72, 96
KERNEL, LAST, ARG, TOTAL, EXTRA, BOTH = 120, 128, 136, 144, 152, 160
NO_OPERAND = 1 << 40
# The kinds of steps, as StepKind in program.py numbers them. The interpreter carries out these:
END, COPY, SIGNAL, WAIT, WAITALL, FREE, FOLD_STAGED, APPLY = 0, 1, 2, 3, 4, 5, 6, 7
ROUND, ENTER, MEETALL, LOOP_AGREED, WRITE_HEADER = 8, 9, 11, 13, 14
PAIR, LOOP = 38, 39
# slow_steps.py carries out these (the interpreter tests for AGREE and PACK..FILL_EXPOSED):
AGREE = 12
PACK, UNPACK, GATE, OPEN_GATE, BRANCH_IF_FLAGGED = 15, 16, 17, 18, 19
EXPOSE, FETCH, FOLD_EXPOSED, JUMP, BRANCH_IF_UNREADABLE, WITHDRAW, FILL_EXPOSED = range(20, 27)
# tcp_streams.py carries out these (the interpreter tests for FLOW and above):
FLOW, GIVE, TAKE, SEND_HEADER, CALL_HEADER, CHECK_HEADER, CHECK_SIZES, PUSH = range(40, 48)


@njit(nogil=True)
def nc10d_place(channel: int, users: int, step: int, parity: int, segment: int) -> int:
    """Return the address of an operand in this round and segment."""
    selector = load(step)
    base = load(users + selector) if selector >= 0 else load(channel - selector + parity)
    return base + load(step + 8) + segment * load(step + 16)


@njit(nogil=True)
def nc10d_length(step: int, segment: int) -> int:
    """Return the bytes of this segment: `nbytes`, or the rest of the total."""
    nbytes = load(step + NBYTES)
    total = load(step + TOTAL)
    if total != 0:
        left = total - segment * nbytes
        if left < nbytes:
            return left if left > 0 else 0
    return nbytes


@njit(nogil=True)
def nc10d_copy(copy: int, dst: int, src: int, nbytes: int) -> None:
    """dst[:nbytes] = src[:nbytes], by the function at `copy`, or the C library's if that is 0."""
    if copy != 0:
        call_kernel(copy, dst, src, 0, nbytes)
    else:
        move(dst, src, nbytes)


@njit(nogil=True)
def nc10d_block(channel: int, step: int, segment: int, counter: int, target: int, peer: int) -> int:
    """Record the step to go on with and the counter that it waits for; return BLOCKED."""
    store(channel + at.C_PC, step)
    store(channel + at.C_SEGMENT, segment)
    store(channel + at.C_BLOCKED_AT, counter)
    store(channel + at.C_BLOCKED_FOR, target)
    store(channel + at.C_BLOCKED_ON, peer)
    return at.BLOCKED


@njit(nogil=True)
def nc10d_sizes_differ(channel: int, sender: int, sent: int, receiver: int, awaited: int) -> int:
    """Record two sizes for the error message, and whose they are; return SIZES."""
    store(channel + at.C_BLOCKED_ON, sender)
    store(channel + at.C_MESSAGE_BYTES, sent)
    store(channel + at.C_AWAITED_BY, receiver)
    store(channel + at.C_AWAITED, awaited)
    return at.SIZES
