"""Prepared calls: check that two arrays fit a call made before, and run or submit it.

A plain array is a numpy.ndarray itself (no subclass), C-contiguous, aligned and writable. The
entries accept any Python objects and check all else. BUSY means that nothing has happened: the
caller takes the ordinary way through Python.
"""

from __future__ import annotations

from numba import njit, types

from nc10d.backend.cpu.native import cpython
from nc10d.backend.cpu.native import offsets as at
from nc10d.backend.cpu.native.atomics import any_object, as_int, load, load_acquire, store
from nc10d.backend.cpu.native.progress import LOOKS, nc10d_run, nc10d_submit, nc10d_submit_here
from nc10d.kernels.cache import entry_points, on_demand

SLICE_NS = 50_000_000
_WORD = types.int64


@njit(nogil=True)
def nc10d_plain(array: int, kind: int) -> bool:
    """Return whether an object is a plain array; `kind` is the address of the type ndarray."""
    if load(array + cpython.TYPE_OFFSET) != kind:
        return False
    return load(array + cpython.FLAGS_OFFSET) & cpython.PLAIN_FLAGS == cpython.PLAIN_FLAGS


@njit(nogil=True)
def nc10d_count(array: int) -> int:
    """Return the number of elements of an ndarray object."""
    count = 1
    sizes = load(array + cpython.DIMS_OFFSET + 8)
    for i in range(load(array + cpython.DIMS_OFFSET) & 0xFFFFFFFF):
        count *= load(sizes + 8 * i)
    return count


@njit(nogil=True)
def nc10d_is(array: int, kind: int, dtype: int, count: int, length: int) -> bool:
    """Return whether an object is a plain array of this dtype, count and (unless -1) length."""
    if not nc10d_plain(array, kind) or load(array + cpython.DTYPE_OFFSET) != dtype:
        return False
    if nc10d_count(array) != count:
        return False
    if length < 0:
        return True
    return load(array + cpython.DIMS_OFFSET) & 0xFFFFFFFF != 0 and length == load(
        load(array + cpython.DIMS_OFFSET + 8)
    )


@njit(nogil=True)
def nc10d_fits(prepared: int, x: int, y: int) -> bool:
    """Return whether two objects (or the same twice) fit a prepared call and don't overlap."""
    kind, dtype = load(load(prepared + at.K_CHANNEL) + at.C_ARRAY_TYPE), load(prepared + at.K_DTYPE)
    if not nc10d_is(x, kind, dtype, load(prepared + at.K_X_COUNT), load(prepared + at.K_X_LENGTH)):
        return False
    if x == y or load(prepared + at.K_ONE) != 0:
        return x == y and load(prepared + at.K_ONE) != 0
    if not nc10d_is(y, kind, dtype, load(prepared + at.K_Y_COUNT), load(prepared + at.K_Y_LENGTH)):
        return False
    a, b = load(x + cpython.DATA_OFFSET), load(y + cpython.DATA_OFFSET)
    return a + load(prepared + at.K_X_BYTES) <= b or b + load(prepared + at.K_Y_BYTES) <= a


@on_demand(types.int64(any_object, any_object, any_object))
def _run_prepared(words: object, x: object, y: object) -> int:
    """Run a prepared call in this thread; x and y are any objects.

    `words` is the array of the operation's block (offsets.py, K_...). Answers as `run` in
    entry_points.py; BUSY also if x and y do not fit (the same array twice, or two without overlap).
    """
    prepared = load(as_int(words) + cpython.DATA_OFFSET)
    if not nc10d_fits(prepared, as_int(x), as_int(y)):
        return at.BUSY
    a, b = load(as_int(x) + cpython.DATA_OFFSET), load(as_int(y) + cpython.DATA_OFFSET)
    return nc10d_run(load(prepared + at.K_CHANNEL), load(prepared + at.K_PROGRAM), a, b, SLICE_NS)


@on_demand(types.int64(any_object, _WORD, _WORD, any_object, any_object))
def _submit_prepared(words: object, prepared: int, deadline: int, x: object, y: object) -> int:
    """Fill in a descriptor and submit it; `deadline` is in ns.

    `words` is a zeroed array for the descriptor and two addresses; `prepared` is the address of the
    block that `run_prepared` gets as an array. This thread first advances a short program. Returns
    DONE; BUSY as `run_prepared`, or if the channel is stopped or its ring full; NEW_SITE; or a
    failure of the channel.
    """
    if not nc10d_fits(prepared, as_int(x), as_int(y)):
        return at.BUSY
    channel = load(prepared + at.K_CHANNEL)
    descriptor = load(as_int(words) + cpython.DATA_OFFSET)
    users = descriptor + 8 * at.DESCRIPTOR_WORDS
    store(descriptor + at.D_PROGRAM, load(prepared + at.K_PROGRAM))
    store(descriptor + at.D_USERS, users)
    store(descriptor + at.D_DEADLINE, deadline)
    store(users, load(as_int(x) + cpython.DATA_OFFSET))
    store(users + 8, load(as_int(y) + cpython.DATA_OFFSET))
    if load(prepared + at.K_SHORT) != 0:
        return nc10d_submit_here(channel, descriptor, LOOKS)
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

    `kind` is the id of the ndarray type. Returns -1, or the index of the first object of the list
    that is no plain ndarray.
    """
    items = load(as_int(arrays) + cpython.LIST_ITEMS_OFFSET)
    for i in range(count):
        array = load(items + 8 * i)
        if not nc10d_plain(array, kind):
            return i
        row = table + 8 * i
        store(row, load(array + cpython.DATA_OFFSET))
        store(row + 8 * count, load(array + cpython.DTYPE_OFFSET))
        store(row + 16 * count, nc10d_count(array))
    return -1


@on_demand(types.int64(any_object, _WORD, _WORD, _WORD))
def _same_arrays(arrays: object, count: int, kind: int, table: int) -> int:
    """Return 1 if all arrays of a list are as `read_arrays` has put in the table, else 0."""
    items = load(as_int(arrays) + cpython.LIST_ITEMS_OFFSET)
    for i in range(count):
        array = load(items + 8 * i)
        row = table + 8 * i
        if (
            not nc10d_plain(array, kind)
            or load(row) != load(array + cpython.DATA_OFFSET)
            or load(row + 8 * count) != load(array + cpython.DTYPE_OFFSET)
            or load(row + 16 * count) != nc10d_count(array)
        ):
            return 0
    return 1


__getattr__ = entry_points(__name__)
