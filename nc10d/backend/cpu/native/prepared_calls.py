"""Python's arrays as compiled code meets them: are they plain, where do they lie, do they overlap.

A plain array is a numpy.ndarray itself (no subclass), C-contiguous, aligned and writable. What the
entries here are given must at least be Python objects; everything else about them is looked at.
"""

from __future__ import annotations

from numba import njit, types

from nc10d.backend.cpu.native import offsets as at
from nc10d.backend.cpu.native.atomics import any_object, as_int, load, load_acquire, store
from nc10d.backend.cpu.native.cpython import (
    DATA_OFFSET,
    DIMS_OFFSET,
    DTYPE_OFFSET,
    FLAGS_OFFSET,
    LIST_ITEMS_OFFSET,
    PLAIN_FLAGS,
    TYPE_OFFSET,
)
from nc10d.backend.cpu.native.progress import (
    LOOKS,
    nc10d_run,
    nc10d_submit,
    nc10d_submit_here,
)
from nc10d.kernels.lazy import EntryPoint, entry_points, on_demand

SLICE_NS = 50_000_000
_WORD = types.int64


@njit(nogil=True)
def nc10d_plain(array: int, kind: int) -> bool:
    """Say whether an object is a plain array; `kind` is where the type ndarray lies."""
    if load(array + TYPE_OFFSET) != kind:
        return False
    return load(array + FLAGS_OFFSET) & PLAIN_FLAGS == PLAIN_FLAGS


@njit(nogil=True)
def nc10d_count(array: int) -> int:
    """Return how many elements an ndarray object has."""
    count = 1
    sizes = load(array + DIMS_OFFSET + 8)
    for i in range(load(array + DIMS_OFFSET) & 0xFFFFFFFF):
        count *= load(sizes + 8 * i)
    return count


@njit(nogil=True)
def nc10d_is(array: int, kind: int, dtype: int, count: int, length: int) -> bool:
    """Say whether an object is a plain array of a dtype, a size, and a length if that is not -1."""
    if not nc10d_plain(array, kind) or load(array + DTYPE_OFFSET) != dtype:
        return False
    if nc10d_count(array) != count:
        return False
    if length < 0:
        return True
    return load(array + DIMS_OFFSET) & 0xFFFFFFFF != 0 and length == load(
        load(array + DIMS_OFFSET + 8)
    )


@njit(nogil=True)
def nc10d_fits(known: int, x: int, y: int) -> bool:
    """Say whether two objects (or one twice) are arrays that a known operation is for."""
    kind, dtype = load(load(known + at.K_CHANNEL) + at.C_ARRAY_TYPE), load(known + at.K_DTYPE)
    if not nc10d_is(x, kind, dtype, load(known + at.K_X_COUNT), load(known + at.K_X_LENGTH)):
        return False
    if x == y or load(known + at.K_ONE) != 0:
        return x == y and load(known + at.K_ONE) != 0
    if not nc10d_is(y, kind, dtype, load(known + at.K_Y_COUNT), load(known + at.K_Y_LENGTH)):
        return False
    a, b = load(x + DATA_OFFSET), load(y + DATA_OFFSET)
    return a + load(known + at.K_X_BYTES) <= b or b + load(known + at.K_Y_BYTES) <= a


@on_demand(types.int64(any_object, any_object, any_object))
def _run_known(words: object, x: object, y: object) -> int:
    known = load(as_int(words) + DATA_OFFSET)
    if not nc10d_fits(known, as_int(x), as_int(y)):
        return at.BUSY
    a, b = load(as_int(x) + DATA_OFFSET), load(as_int(y) + DATA_OFFSET)
    return nc10d_run(load(known + at.K_CHANNEL), load(known + at.K_PROGRAM), a, b, SLICE_NS)


@on_demand(types.int64(any_object, _WORD, _WORD, any_object, any_object))
def _submit_known(words: object, known: int, deadline: int, x: object, y: object) -> int:
    if not nc10d_fits(known, as_int(x), as_int(y)):
        return at.BUSY
    channel = load(known + at.K_CHANNEL)
    descriptor = load(as_int(words) + DATA_OFFSET)
    users = descriptor + 8 * at.DESCRIPTOR_WORDS
    store(descriptor + at.D_PROGRAM, load(known + at.K_PROGRAM))
    store(descriptor + at.D_USERS, users)
    store(descriptor + at.D_DEADLINE, deadline)
    store(users, load(as_int(x) + DATA_OFFSET))
    store(users + 8, load(as_int(y) + DATA_OFFSET))
    if load(known + at.K_SHORT) != 0:
        return nc10d_submit_here(channel, descriptor, LOOKS)
    if load_acquire(channel + at.C_BROKEN) != 0:
        return at.BUSY
    return nc10d_submit(channel, descriptor)


@on_demand(types.int64(any_object))
def _address(array: object) -> int:
    return load(as_int(array) + DATA_OFFSET)


@on_demand(types.int64(any_object, _WORD, _WORD, _WORD))
def _read_arrays(arrays: object, count: int, kind: int, table: int) -> int:
    items = load(as_int(arrays) + LIST_ITEMS_OFFSET)
    for i in range(count):
        array = load(items + 8 * i)
        if not nc10d_plain(array, kind):
            return i
        row = table + 8 * i
        store(row, load(array + DATA_OFFSET))
        store(row + 8 * count, load(array + DTYPE_OFFSET))
        store(row + 16 * count, nc10d_count(array))
    return -1


@on_demand(types.int64(any_object, _WORD, _WORD, _WORD))
def _same_arrays(arrays: object, count: int, kind: int, table: int) -> int:
    items = load(as_int(arrays) + LIST_ITEMS_OFFSET)
    for i in range(count):
        array = load(items + 8 * i)
        row = table + 8 * i
        if (
            not nc10d_plain(array, kind)
            or load(row) != load(array + DATA_OFFSET)
            or load(row + 8 * count) != load(array + DTYPE_OFFSET)
            or load(row + 16 * count) != nc10d_count(array)
        ):
            return 0
    return 1


run_known: EntryPoint
"""run_known(words, x, y): run a known operation here and now; x and y are any objects.

`words` is the array that a known operation is in. As engine.run; BUSY also where x and y are not
such as it is for (the same one twice, or two that share no memory).
"""
submit_known: EntryPoint
"""submit_known(words, known, deadline_ns, x, y): fill in a descriptor and submit it.

`words` is zeroed and has room for two addresses; `known` is where the operation's words lie. A
short program is advanced in this thread first. DONE; BUSY as above, or if the channel is stopped
or its ring full; NEW_SITE as above; or a failure of what was advanced.
"""
address: EntryPoint
"""address(array): where an ndarray's data lies. Anything but an ndarray gives garbage."""
read_arrays: EntryPoint
"""read_arrays(list, count, id of the ndarray type, table): fill three columns of `count` words,
addresses, dtypes (as object addresses) and element counts. -1, or which is no plain ndarray.
"""
same_arrays: EntryPoint
"""same_arrays(list, count, id of the ndarray type, table): 1 if all are as the table says."""

__getattr__ = entry_points(__name__)
