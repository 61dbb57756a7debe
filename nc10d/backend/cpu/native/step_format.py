"""A packed step: where its fields are, and the addresses that operands mean now.

linker.py packs a step into words; an operand is a selector, an offset and a stride. A field's name
is the same as in `Step`. Fields that no kind uses together share a word.
"""

from __future__ import annotations

from numba import njit

from nc10d.backend.cpu.native import offsets as at
from nc10d.backend.cpu.native.atomics import call_kernel, load, move, store

# In bytes from a step's start, where the kind is.
NBYTES = 8
TICK = WRITABLE = 16
DST, SRC, OWN, ALSO = 24, 48, 72, 96
KERNEL = REPEAT = RECORD = 120  # RECORD: address of the call's record
LAST = FREE_AT = 128
ARG = ACCESS = PIECE = FINGERPRINT = 136  # the call's, with an ENTER's flag
TOTAL = OFFSET = 144
PEER = SKIP = BACK = ROWS = MOST = FLAG = STAGED = 152  # STAGED: 1 if the result goes to peers
BOTH = COPIER = 160  # COPIER: address of the copy function, 0 for the C library's
BLOCK = 168  # bytes that are folded at a time, whole elements
STEP = 176
NO_OPERAND = 1 << 40


@njit(nogil=True)
def nc10d_operand(channel: int, users: int, step: int, parity: int, segment: int) -> int:
    """Return the address of an operand in this round and segment."""
    selector = load(step)
    base = load(users + selector) if selector >= 0 else load(channel - selector + parity)
    return base + load(step + 8) + segment * load(step + 16)


@njit(nogil=True)
def nc10d_length(step: int, segment: int) -> int:
    """Return this segment's bytes: `nbytes`, or the rest of the total."""
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
def nc10d_block_on(
    channel: int, step: int, segment: int, counter: int, target: int, peer: int
) -> int:
    """Record the step to go on with and the awaited counter; return BLOCKED."""
    store(channel + at.C_PC, step)
    store(channel + at.C_SEGMENT, segment)
    store(channel + at.C_BLOCKED_AT, counter)
    store(channel + at.C_BLOCKED_FOR, target)
    store(channel + at.C_BLOCKED_ON, peer)
    return at.BLOCKED


@njit(nogil=True)
def nc10d_report_sizes(channel: int, sender: int, sent: int, receiver: int, awaited: int) -> int:
    """Record two sizes for the error message, and whose they are; return SIZES."""
    store(channel + at.C_BLOCKED_ON, sender)
    store(channel + at.C_MESSAGE_BYTES, sent)
    store(channel + at.C_AWAITED_BY, receiver)
    store(channel + at.C_AWAITED, awaited)
    return at.SIZES
