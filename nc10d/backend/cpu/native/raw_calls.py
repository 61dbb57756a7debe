"""Calls from a user's compiled code: find the prepared call for an array's address, and run it.

A user's compiled function knows addresses and sizes, and holds no GIL. `_raw_call` looks for a
block that nc10d.numba has published for such a call. A published block never changes, and is read
without a lock. Whatever the engine does not end goes to `S_SLOW`, a C function that takes the GIL
and calls Python.

    words of the state        words of a block                words of a request to S_SLOW
    S_TABLE  first blocks     B_NEXT     next block, or 0     the arguments of `_raw_call`, from
    S_SLOW   a C function     B_KEY ...  as in the call       the key on; then the block, or 0, and
                              B_CHANNEL, B_PROGRAM            the engine's answer
                              B_DIRECT   word: 1 or 0

B_PROGRAM is a program, or the descriptor of a message. B_DIRECT is the address of a word in the
group, which is 0 while calls must take the ordinary way (an observer, an open block).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils

from nc10d.backend.cpu.native import atomics
from nc10d.backend.cpu.native import offsets as at
from nc10d.backend.cpu.native.atomics import load, load_acquire, store
from nc10d.backend.cpu.native.prepared_messages import WAITS, nc10d_run_message_at
from nc10d.backend.cpu.native.progress import nc10d_claim_channel, nc10d_run_claimed
from nc10d.backend.cpu.native.sites import thread_state
from nc10d.kernels.cache import address_of, compiled_callback
from nc10d.kernels.simd import I64, Builder, Value, emits

S_TABLE, S_SLOW = range(0, 16, 8)
B_NEXT, B_KEY, B_COUNT, B_RANK, B_CHANNEL, B_PROGRAM, B_DIRECT = range(0, 56, 8)
REQUEST_WORDS = 7  # key, count, rank, tag, data, block, answer
BUCKETS = 1024
MESSAGES = 1 << 20  # set in messages' keys
NO_THREAD = 1  # the answer in a thread that Python does not know
_made: dict[str, Any] = {}


@emits(types.int64())
def request_on_stack(b: Builder) -> Value:
    """Return the address of REQUEST_WORDS words on the stack."""
    return b.ptrtoint(cgutils.alloca_once(b, ir.ArrayType(I64, REQUEST_WORDS)), I64)


@njit(nogil=True)
def nc10d_bucket(key: int, count: int, rank: int) -> int:
    """Return the number of a call's bucket."""
    return ((key + 31 * count + 977 * rank) * 0x9E3779B1 >> 12) & (BUCKETS - 1)


bucket: Callable[[int, int, int], int] = nc10d_bucket.py_func
"""The same function in Python."""


@njit(nogil=True)
def nc10d_find_block(state: int, key: int, count: int, rank: int) -> int:
    """Return the block for a call, or 0."""
    first = load(state + S_TABLE) + 8 * nc10d_bucket(key, count, rank)
    block = load_acquire(first)
    while block != 0:
        same = load(block + B_KEY) == key and load(block + B_COUNT) == count
        if same and load(block + B_RANK) == rank:
            return block
        block = load(block + B_NEXT)
    return 0


@njit(nogil=True)
def nc10d_raw_run(block: int, key: int, tag: int, data: int, users: int) -> int:
    """Run a block's call on an array at an address; `users` is a word for the table."""
    if load_acquire(load(block + B_DIRECT)) == 0:
        return at.BUSY
    if key & MESSAGES != 0:
        return nc10d_run_message_at(load(block + B_PROGRAM), data, tag, WAITS)
    channel = load(block + B_CHANNEL)
    answer = nc10d_claim_channel(channel)
    if answer != at.DONE:
        return answer
    store(users, data)
    return nc10d_run_claimed(channel, load(block + B_PROGRAM), users)


def _raw_call(state: int, key: int, count: int, rank: int, tag: int, data: int) -> int:
    """Make a call; 0, NO_THREAD, or the address of the raised exception."""
    if thread_state() == 0:
        return NO_THREAD
    answer, users = at.BUSY, atomics.scratch()
    block = nc10d_find_block(state, key, count, rank)
    if block != 0:
        answer = nc10d_raw_run(block, key, tag, data, users)
        if answer == at.DONE:
            return 0
    request = request_on_stack()
    store(request, key)
    store(request + 8, count)
    store(request + 16, rank)
    store(request + 24, tag)
    store(request + 32, data)
    store(request + 40, block)
    store(request + 48, answer)
    return atomics.call_address(load(state + S_SLOW), request)


def raw_call_address() -> int:
    """Return the address of `_raw_call`; may block to compile."""
    signature = types.int64(*(types.int64,) * 6)
    return address_of(_made, "raw_call", lambda: compiled_callback(signature)(_raw_call))
