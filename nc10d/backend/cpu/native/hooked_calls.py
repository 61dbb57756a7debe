"""Prepared calls between two hooks, which hold the GIL; see nc10d.kernels.hooks.

`block` is the array of a block of hooks, which no other thread uses meanwhile. `task`, `value` and
`places` are the hooks' arguments, and the others those of run_message and run_prepared. Answers,
too, are as theirs, or a hook's. The hook `after` runs only if the whole call has ended: after any
other answer its task is left to the caller, and so are messages beyond the first H_RAN.
"""

from __future__ import annotations

from numba import njit, types

from nc10d.backend.cpu.native import offsets as at
from nc10d.backend.cpu.native.atomics import any_object, as_int, call_engine, load, store
from nc10d.backend.cpu.native.cpython import DATA_OFFSET, TUPLE_OFFSET
from nc10d.backend.cpu.native.prepared_calls import nc10d_run_prepared
from nc10d.backend.cpu.native.prepared_messages import WAITS, nc10d_message
from nc10d.kernels import python_api as py
from nc10d.kernels.cache import entry_points, on_demand
from nc10d.kernels.hooks import H_AFTER, H_BEFORE, H_COUNT, H_PLACES, H_RAN, H_TASK, H_VALUE
from nc10d.kernels.python_api import answer_type

_WORD = types.int64
_HOOKS = any_object, _WORD, any_object, any_object


@njit
def nc10d_before(hooks: int, task: int, value: int, places: int) -> int:
    """Run the hook `before`, and return its answer."""
    store(hooks + H_TASK, task)
    store(hooks + H_VALUE, value)
    store(hooks + H_PLACES, places)
    store(hooks + H_RAN, 0)
    return call_engine(load(hooks + H_BEFORE), hooks)


@njit
def nc10d_after(hooks: int, answer: int) -> int:
    """Run the hook `after` if the call has ended; return the answer of the whole."""
    if answer != at.DONE:
        return answer
    return call_engine(load(hooks + H_AFTER), hooks)


@njit(nogil=True)
def nc10d_messages(words: int, pieces: int, tag: int, hooks: int) -> int:
    """Send or receive arrays of a tuple, as many as the hook `count` says; the last answer."""
    ran, count, answer = 0, 1, at.DONE
    while ran < count and answer == at.DONE:
        piece = load(pieces + TUPLE_OFFSET + 8 * ran)
        answer = nc10d_message(words, piece, tag, WAITS)
        if answer == at.DONE:
            ran += 1
            store(hooks + H_RAN, ran)
            count = call_engine(load(hooks + H_COUNT), hooks)
    return answer


@on_demand(answer_type(any_object, any_object, _WORD, *_HOOKS), gil=True)
def _run_hooked_message(
    words: object, pieces: object, tag: int, block: object, task: int, value: object, places: object
) -> object:
    """Send or receive the first arrays of the tuple `pieces` between two hooks."""
    hooks = load(as_int(block) + DATA_OFFSET)
    answer = nc10d_before(hooks, task, as_int(value), as_int(places))
    if answer != 0:
        return py.as_answer(answer)
    state = py.leave_gil()
    answer = nc10d_messages(load(as_int(words) + DATA_OFFSET), as_int(pieces), tag, hooks)
    py.take_gil(state)
    return py.as_answer(nc10d_after(hooks, answer))


@on_demand(answer_type(any_object, any_object, any_object, *_HOOKS), gil=True)
def _run_hooked_call(
    words: object, x: object, y: object, block: object, task: int, value: object, places: object
) -> object:
    """Run a prepared collective between two hooks."""
    hooks = load(as_int(block) + DATA_OFFSET)
    answer = nc10d_before(hooks, task, as_int(value), as_int(places))
    if answer != 0:
        return py.as_answer(answer)
    state = py.leave_gil()
    answer = nc10d_run_prepared(load(as_int(words) + DATA_OFFSET), as_int(x), as_int(y))
    py.take_gil(state)
    store(hooks + H_RAN, 1 if answer == at.DONE else 0)
    return py.as_answer(nc10d_after(hooks, answer))


__getattr__ = entry_points(__name__)
