"""Prepared calls: check that arguments fit an earlier call, and run or submit the call again.

A plain array is a numpy.ndarray itself (no subclass), C-contiguous, aligned and writable. The
entries accept any Python objects and check all else. BUSY means that nothing has happened: the
caller takes the ordinary way through Python.
"""

from __future__ import annotations

from numba import njit, types

from nc10d.backend.cpu.native import cpython
from nc10d.backend.cpu.native import offsets as at
from nc10d.backend.cpu.native.atomics import any_object, as_int, load, load_acquire, store
from nc10d.backend.cpu.native.progress import nc10d_claim_channel, nc10d_run_claimed
from nc10d.backend.cpu.native.submitting import (
    LOOKS,
    nc10d_deadline,
    nc10d_submit,
    nc10d_submit_and_advance,
)
from nc10d.backend.cpu.native.waiting import nc10d_unlock
from nc10d.kernels.cache import entry_points, on_demand

_WORD = types.int64


@njit(nogil=True)
def nc10d_is_plain(array: int, kind: int) -> bool:
    """Return whether an object is a plain array; `kind` is the address of the type ndarray."""
    if load(array + cpython.TYPE_OFFSET) != kind:
        return False
    return load(array + cpython.FLAGS_OFFSET) & cpython.PLAIN_FLAGS == cpython.PLAIN_FLAGS


@njit(nogil=True)
def nc10d_count(array: int) -> int:
    """Return how many elements an ndarray object has."""
    count = 1
    sizes = load(array + cpython.DIMS_OFFSET + 8)
    for i in range(load(array + cpython.DIMS_OFFSET) & 0xFFFFFFFF):
        count *= load(sizes + 8 * i)
    return count


@njit(nogil=True)
def nc10d_is_array(array: int, kind: int, dtype: int, count: int, length: int) -> bool:
    """Return whether an object is a plain array with this dtype, count and (unless -1) length."""
    if not nc10d_is_plain(array, kind) or load(array + cpython.DTYPE_OFFSET) != dtype:
        return False
    if nc10d_count(array) != count:
        return False
    if length < 0:
        return True
    return load(array + cpython.DIMS_OFFSET) & 0xFFFFFFFF != 0 and length == load(
        load(array + cpython.DIMS_OFFSET + 8)
    )


@njit(nogil=True)
def nc10d_put_array(prepared: int, users: int, number: int, array: int) -> bool:
    """Put the address of array `number` into the table `users`; False if the array does not fit.

    Only a plain array fits, with the call's dtype, and the row's count and length.
    """
    kind, row = (
        load(load(prepared + at.K_CHANNEL) + at.C_ARRAY_TYPE),
        nc10d_row_of(prepared, number),
    )
    count, length = load(row + at.ROW_COUNT), load(row + at.ROW_LENGTH)
    if not nc10d_is_array(array, kind, load(prepared + at.K_DTYPE), count, length):
        return False
    store(users + 8 * (load(prepared + at.K_OWN) + number), load(array + cpython.DATA_OFFSET))
    return True


@njit(nogil=True)
def nc10d_row_of(prepared: int, number: int) -> int:
    """Return the address of the row for array `number` in a prepared call."""
    return load(prepared + at.K_ROWS) + at.PREPARED_ROW * number


@njit(nogil=True)
def nc10d_put_argument(prepared: int, users: int, argument: int, form: int, number: int) -> int:
    """Put an argument's arrays into a table, from `number` on.

    Returns the number that follows the last array, or -1 if the argument has not this form.
    """
    if form == at.ONE:
        return number + 1 if nc10d_put_array(prepared, users, number, argument) else -1
    if form == at.ABSENT:
        return number if argument == load(prepared + at.K_NONE) else -1
    if load(argument + cpython.TYPE_OFFSET) != load(prepared + at.K_TUPLE):
        return -1
    if load(argument + cpython.SIZE_OFFSET) != form:
        return -1
    for i in range(form):
        array = load(argument + cpython.TUPLE_OFFSET + 8 * i)
        if not nc10d_put_array(prepared, users, number + i, array):
            return -1
    return number + form


@njit(nogil=True)
def nc10d_lie_apart(prepared: int, users: int) -> bool:
    """Return whether no array that the call writes overlaps another in the table.

    In place, array 0 is this rank's piece of array K_WHOLE: that pair may overlap.
    """
    first = users + 8 * load(prepared + at.K_OWN)
    whole = load(prepared + at.K_WHOLE)
    if whole != 0 and load(first) != load(first + 8 * whole) + load(prepared + at.K_PLACE):
        whole = 0
    for i in range(load(prepared + at.K_WRITTEN), load(prepared + at.K_WRITTEN_END)):
        a, a_bytes = load(first + 8 * i), load(nc10d_row_of(prepared, i) + at.ROW_BYTES)
        for j in range(load(prepared + at.K_COUNT)):
            b, b_bytes = load(first + 8 * j), load(nc10d_row_of(prepared, j) + at.ROW_BYTES)
            in_place = whole != 0 and i + j == whole and i * j == 0
            if i != j and not in_place and a < b + b_bytes and b < a + a_bytes:
                return False
    return True


@njit(nogil=True)
def nc10d_put_arguments(prepared: int, users: int, x: int, y: int) -> bool:
    """Fill a table with two arguments' arrays; False if they do not fit the prepared call."""
    number = nc10d_put_argument(prepared, users, x, load(prepared + at.K_X), 0)
    if number < 0:
        return False
    form = load(prepared + at.K_Y)
    if form == at.SAME:
        return x == y
    return nc10d_put_argument(prepared, users, y, form, number) >= 0 and nc10d_lie_apart(
        prepared, users
    )


@njit(nogil=True)
def nc10d_run_prepared(prepared: int, x: int, y: int) -> int:
    """Run a prepared call in this thread; see `run_prepared`."""
    channel, users = load(prepared + at.K_CHANNEL), load(prepared + at.K_ARRAYS)
    answer = nc10d_claim_channel(channel)
    if answer != at.DONE:
        return answer
    # The channel's lock guards the table, too.
    if not nc10d_put_arguments(prepared, users, x, y):
        nc10d_unlock(channel)
        return at.BUSY
    return nc10d_run_claimed(channel, load(prepared + at.K_PROGRAM), users)


@on_demand(types.int64(any_object, any_object, any_object))
def _run_prepared(words: object, x: object, y: object) -> int:
    """Run a prepared call in this thread; x and y are any objects.

    `words` is the operation's block (offsets.py, K_...). Answers as `run` in entry_points.py; BUSY
    also if x and y do not fit, or overlap.
    """
    return nc10d_run_prepared(load(as_int(words) + cpython.DATA_OFFSET), as_int(x), as_int(y))


@on_demand(types.int64(any_object, _WORD, types.float64, any_object, any_object, _WORD))
def _submit_prepared(
    words: object, prepared: int, timeout: float, x: object, y: object, waits: int
) -> int:
    """Fill in a descriptor and submit it; `timeout` is in seconds.

    `words` is an array for the descriptor and all addresses, zeros or an ended call's; `prepared`
    is the address of the block that `run_prepared` gets as an array. This thread first advances a
    short program, or any if this thread `waits` next. Returns FINISHED if the program has ended;
    DONE; BUSY as `run_prepared`, or if the channel is stopped or the ring full; NEW_SITE; or the
    channel's failure.
    """
    descriptor = load(as_int(words) + cpython.DATA_OFFSET)
    users = descriptor + 8 * at.DESCRIPTOR_WORDS
    if not nc10d_put_arguments(prepared, users, as_int(x), as_int(y)):
        return at.BUSY
    for i in range(load(prepared + at.K_OWN)):
        store(users + 8 * i, load(load(prepared + at.K_ARRAYS) + 8 * i))
    channel = load(prepared + at.K_CHANNEL)
    store(descriptor + at.D_PROGRAM, load(prepared + at.K_PROGRAM))
    store(descriptor + at.D_USERS, users)
    store(descriptor + at.D_DEADLINE, nc10d_deadline(timeout))
    store(descriptor + at.D_STATUS, 0)
    if waits != 0 or load(prepared + at.K_SHORT) != 0:
        return nc10d_submit_and_advance(channel, descriptor, LOOKS)
    if load_acquire(channel + at.C_BROKEN) != 0:
        return at.BUSY
    return nc10d_submit(channel, descriptor)


@on_demand(types.int64(any_object))
def _address(array: object) -> int:
    """Return the address of an ndarray's data; garbage for any other object."""
    return load(as_int(array) + cpython.DATA_OFFSET)


@on_demand(types.int64(any_object, _WORD, _WORD, _WORD))
def _read_arrays(arrays: object, count: int, kind: int, table: int) -> int:
    """Fill three columns of `count` words: addresses, dtypes (as object addresses), element counts.

    `kind` is the id of the ndarray type. Returns -1, or the index of the list's first object that
    is no plain ndarray.
    """
    items = load(as_int(arrays) + cpython.ITEMS_OFFSET)
    for i in range(count):
        array = load(items + 8 * i)
        if not nc10d_is_plain(array, kind):
            return i
        row = table + 8 * i
        store(row, load(array + cpython.DATA_OFFSET))
        store(row + 8 * count, load(array + cpython.DTYPE_OFFSET))
        store(row + 16 * count, nc10d_count(array))
    return -1


@on_demand(types.int64(any_object, _WORD, _WORD, _WORD))
def _same_arrays(arrays: object, count: int, kind: int, table: int) -> int:
    """Return 1 if all arrays in a list are as `read_arrays` has put in the table, else 0."""
    items = load(as_int(arrays) + cpython.ITEMS_OFFSET)
    for i in range(count):
        array = load(items + 8 * i)
        row = table + 8 * i
        if (
            not nc10d_is_plain(array, kind)
            or load(row) != load(array + cpython.DATA_OFFSET)
            or load(row + 8 * count) != load(array + cpython.DTYPE_OFFSET)
            or load(row + 16 * count) != nc10d_count(array)
        ):
            return 0
    return 1


__getattr__ = entry_points(__name__)
