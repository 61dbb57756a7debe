"""The entry points for prepared calls between two hooks; nc10d.kernels.hooks has the protocol.

`hooks` is a block's array; `task`, `value` and `places` are the hooks' arguments. The others are as
in run_message and run_prepared, but `pieces` has several messages' arrays.
"""

from __future__ import annotations

from numba import njit, types

from nc10d.backend.cpu.native import offsets as at
from nc10d.backend.cpu.native.atomics import any_object, as_int, call_address, load, store
from nc10d.backend.cpu.native.cpython import DATA_OFFSET, TUPLE_OFFSET
from nc10d.backend.cpu.native.prepared_calls import nc10d_run_prepared
from nc10d.backend.cpu.native.prepared_messages import WAITS, nc10d_run_message
from nc10d.kernels import python_api as py
from nc10d.kernels.cache import entry_points, on_demand
from nc10d.kernels.hooks import (
    ALL_DONE,
    H_AFTER,
    H_BEFORE,
    H_COUNT,
    H_PLACES,
    H_RAN,
    H_TAG,
    H_TASK,
    H_VALUE,
)
from nc10d.kernels.python_api import answer_type

_WORD = types.int64
_ARGUMENTS = any_object, _WORD, any_object, any_object
"""The types of hooks, task, value and places."""


@njit
def nc10d_run_before(block: int, task: int, value: int, places: int) -> int:
    """Run the hook `before`, and return that hook's answer."""
    store(block + H_TASK, task)
    store(block + H_VALUE, value)
    store(block + H_PLACES, places)
    store(block + H_RAN, 0)
    return call_address(load(block + H_BEFORE), block)


@njit
def nc10d_run_after(block: int, answer: int) -> int:
    """Run the hook `after` if the operation has ended; return the answer of the whole."""
    if answer != at.DONE:
        return answer
    answer = call_address(load(block + H_AFTER), block)
    if answer != 0:
        return answer
    ran = load(block + H_RAN)
    store(block + H_RAN, 0)
    return ALL_DONE + ran


@njit(nogil=True)
def nc10d_run_messages(words: int, pieces: int, tag: int, block: int) -> int:
    """Send or receive the first arrays of a tuple, as many as the hook `count` says.

    `tag` is the first message's. Returns DONE, or the answer of the first message that has not
    ended.
    """
    ran, count, answer = 0, 1, at.DONE
    while ran < count and answer == at.DONE:
        piece = load(pieces + TUPLE_OFFSET + 8 * ran)
        answer = nc10d_run_message(words, piece, tag, WAITS)
        if answer == at.DONE:
            ran += 1
            store(block + H_RAN, ran)
            count = call_address(load(block + H_COUNT), block)
            tag = load(block + H_TAG)
    return answer


@on_demand(answer_type(any_object, any_object, _WORD, *_ARGUMENTS), gil=True)
def _run_hooked_messages(
    words: object, pieces: object, tag: int, hooks: object, task: int, value: object, places: object
) -> object:
    """Send or receive the first arrays in the tuple `pieces` between two hooks."""
    block = load(as_int(hooks) + DATA_OFFSET)
    answer = nc10d_run_before(block, task, as_int(value), as_int(places))
    if answer != 0:
        return py.as_answer(answer)
    state = py.leave_gil()
    answer = nc10d_run_messages(load(as_int(words) + DATA_OFFSET), as_int(pieces), tag, block)
    py.take_gil(state)
    return py.as_answer(nc10d_run_after(block, answer))


@on_demand(answer_type(any_object, any_object, any_object, *_ARGUMENTS), gil=True)
def _run_hooked_collective(
    words: object, x: object, y: object, hooks: object, task: int, value: object, places: object
) -> object:
    """Run a prepared collective between two hooks."""
    block = load(as_int(hooks) + DATA_OFFSET)
    answer = nc10d_run_before(block, task, as_int(value), as_int(places))
    if answer != 0:
        return py.as_answer(answer)
    state = py.leave_gil()
    answer = nc10d_run_prepared(load(as_int(words) + DATA_OFFSET), as_int(x), as_int(y))
    py.take_gil(state)
    store(block + H_RAN, 1 if answer == at.DONE else 0)
    return py.as_answer(nc10d_run_after(block, answer))


__getattr__ = entry_points(__name__)
