"""The compiled loop: makes C calls in order, read from a table, without the GIL.

A row is WORDS integers: a C function's address, the number of arguments, a mark, and up to eight
arguments. All are passed as 64 bits: the System V and the ARM ABI give each of the first eight
integers a register or a slot with that size, and the callee reads the declared width. After an
error the row's mark decides: in a GROUPED row the loop skips to the row that ENDS the group, and
runs that row, but no later row.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types

from nc10d.backend.cpu.native.atomics import load, store
from nc10d.kernels.cache import compiled
from nc10d.kernels.simd import I64, Builder, Value, emits

WORDS = 11
PLAIN, GROUPED, ENDS = 0, 1, 2
IN_PROGRESS = 7
"""ncclInProgress: no error, but rows after the group's end have to wait for that end."""
SCALE = 1000
"""An answer is SCALE * (row + 1) + code for an error, -row to continue there later, else 0."""
NO_CONTEXT = 1 << 30
"""In an answer, instead of row + 1: the device's context could not be made current."""

_ROW = 8 * WORDS


def _caller(count: int) -> Any:
    """Return an intrinsic that calls the C function at an address with `count` integers."""

    @emits(types.int64(types.int64, types.int64))
    def call(b: Builder, function: Value, arguments: Value) -> Value:
        kind = ir.FunctionType(ir.IntType(32), [I64] * count)
        table = b.inttoptr(arguments, I64.as_pointer())
        values = [b.load(b.gep(table, [I64(index)])) for index in range(count)]
        return b.sext(b.call(b.inttoptr(function, kind.as_pointer()), values), I64)

    return call


_call0, call1, call2, _call3 = map(_caller, (0, 1, 2, 3))
_call4, _call6, _call7, _call8 = map(_caller, (4, 6, 7, 8))


@njit(nogil=True)
def nc10d_nccl_call(row):  # type: ignore[no-untyped-def]
    """Make the call in the row at an address; return the result."""
    function, count, arguments = load(row), load(row + 8), row + 24
    if count == 7:
        return _call7(function, arguments)
    if count == 6:
        return _call6(function, arguments)
    if count == 8:
        return _call8(function, arguments)
    if count == 2:
        return call2(function, arguments)
    if count == 3:
        return _call3(function, arguments)
    if count == 1:
        return call1(function, arguments)
    if count == 4:
        return _call4(function, arguments)
    return _call0(function, arguments)


@njit(nogil=True)
def nc10d_nccl_rows(table, first, count):  # type: ignore[no-untyped-def]
    """Make the calls in rows first..count-1 of a table; see SCALE for the returned answer."""
    waiting = False
    index = first
    while index < count:
        row = table + index * _ROW
        mark = load(row + 16)
        code = nc10d_nccl_call(row)
        if code == IN_PROGRESS:
            waiting = True
        elif code != 0:
            failed = SCALE * (index + 1) + code
            if mark == GROUPED:
                while mark != ENDS:
                    index += 1
                    row = table + index * _ROW
                    mark = load(row + 16)
                nc10d_nccl_call(row)
            return failed
        index += 1
        if waiting and mark != GROUPED and index < count:
            return -index
    return 0


@compiled("int64(int64, int64, int64, int64, int64, int64, int64)")
def nc10d_nccl_run(table, first, count, device, current, ended, end):  # type: ignore[no-untyped-def]
    """Make the calls in rows first..count-1 with a device's context as the thread's current one.

    `device` is the address of two rows, which make the context current, and restore the former
    context. The default streams are the current context's. The parts that differ between launches
    are written to the table first: the stream `current`, and the event `ended`, which row `end`
    records and the next row waits for.
    """
    last = table + end * _ROW
    store(table + _ROW + 32, current)
    store(last + 24, ended)
    store(last + _ROW + 24, current)
    store(last + _ROW + 32, ended)
    code = nc10d_nccl_call(device)
    if code != 0:
        return SCALE * NO_CONTEXT + code
    answer = nc10d_nccl_rows(table, first, count)
    nc10d_nccl_call(device + _ROW)
    return answer


_SIZE = object.__basicsize__
"""The offset of a list's length, which the address of its items follows (CPython's header)."""


@compiled("int64(int64, int64, int64)")
def nc10d_nccl_same_objects(items, known, count):  # type: ignore[no-untyped-def]
    """Return whether a list has exactly these `count` objects, by their addresses (ids)."""
    if load(items + _SIZE) != count:
        return 0
    first = load(items + _SIZE + 8)
    for index in range(count):
        if load(first + 8 * index) != load(known + 8 * index):
            return 0
    return 1


@njit(nogil=True)
def nc10d_nccl_sort(keys, order, count):  # type: ignore[no-untyped-def]
    """order = keys[order].argsort(), by Shell's method: blocks are short, and often sorted."""
    gap = count // 2
    while gap > 0:
        for index in range(gap, count):
            this = load(order + 8 * index)
            place = index
            while place >= gap:
                other = load(order + 8 * (place - gap))
                if load(keys + 8 * other) <= load(keys + 8 * this):
                    break
                store(order + 8 * place, other)
                place -= gap
            store(order + 8 * place, this)
        gap //= 2


@compiled("int64(int64, int64, int64, int64, int64)")
def nc10d_nccl_uniform(places, table, count, itemsize, elements):  # type: ignore[no-untyped-def]
    """Fill in arrays' addresses and counts in `count` otherwise equal rows.

    `places` is the address where `count` addresses, as many counts, and as many scratch words lie.
    Returns whether the arrays have elements, are aligned, and share no memory; if not, the rows are
    unusable.
    """
    counts, order = places + 8 * count, places + 16 * count
    for index in range(count):
        address, n = load(places + 8 * index), load(counts + 8 * index)
        if n == 0 or address % min(itemsize, 8) != 0:
            return 0
        row = table + index * _ROW
        store(row + 24, address)
        store(row + 32, address)
        store(row + 40, n * elements)
        store(order + 8 * index, index)
    nc10d_nccl_sort(places, order, count)
    end = 0
    for index in range(count):
        at = load(order + 8 * index)
        address = load(places + 8 * at)
        if index > 0 and address < end:
            return 0
        end = address + load(counts + 8 * at) * itemsize
    return 1
