"""The compiled loop: C calls one after another, read from a table, without the GIL.

A row is WORDS integers: the address of a C function, how many arguments it takes, a mark, and up to
eight arguments. All are passed as 64 bits: the System V and the ARM ABI give each of the first
eight integers a register or a slot of that size, of which the callee reads as much as it declared.
A mark says what an error means for the rows behind: GROUPED rows are skipped up to the row that
ENDS their group, which is run in any case; nothing behind that.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from nc10d.kernels.cache import compiled

WORDS = 11
PLAIN, GROUPED, ENDS = 0, 1, 2
IN_PROGRESS = 7
"""ncclInProgress: not an error, but rows behind the end of the group have to wait for it."""
SCALE = 1000
"""An answer is SCALE * (row + 1) + code for an error, -row where to go on later, 0 at the end."""

_ROW = 8 * WORDS
_I64 = ir.IntType(64)


def _caller(count: int) -> Any:
    """Return an intrinsic that calls the C function at an address with `count` integers."""

    @intrinsic
    def call(_typing: Any, function: Any, arguments: Any) -> Any:
        def generate(_context: Any, b: Any, _signature: Any, args: Any) -> Any:
            kind = ir.FunctionType(ir.IntType(32), [_I64] * count)
            table = b.inttoptr(args[1], _I64.as_pointer())
            values = [b.load(b.gep(table, [_I64(index)])) for index in range(count)]
            answer = b.call(b.inttoptr(args[0], kind.as_pointer()), values)
            return b.sext(answer, _I64)

        return types.int64(types.int64, types.int64), generate

    return call


_call0, _call1, _call2, _call3 = map(_caller, (0, 1, 2, 3))
_call6, _call7, _call8 = map(_caller, (6, 7, 8))


@intrinsic
def _word(_typing: Any, address: Any) -> Any:
    """Load the 64-bit integer at an address."""

    def generate(_context: Any, b: Any, _signature: Any, args: Any) -> Any:
        return b.load(b.inttoptr(args[0], _I64.as_pointer()))

    return types.int64(types.int64), generate


@njit(nogil=True)
def nc10d_nccl_call(row):  # type: ignore[no-untyped-def]
    """Make the call of the row at an address; return its result."""
    function, count, arguments = _word(row), _word(row + 8), row + 24
    if count == 7:
        return _call7(function, arguments)
    if count == 6:
        return _call6(function, arguments)
    if count == 8:
        return _call8(function, arguments)
    if count == 2:
        return _call2(function, arguments)
    if count == 3:
        return _call3(function, arguments)
    if count == 1:
        return _call1(function, arguments)
    return _call0(function, arguments)


@njit(nogil=True)
def nc10d_nccl_rows(table, first, count):  # type: ignore[no-untyped-def]
    """Make the calls of rows first..count-1 of a table; see SCALE for what is returned."""
    waiting = False
    index = first
    while index < count:
        row = table + index * _ROW
        mark = _word(row + 16)
        code = nc10d_nccl_call(row)
        if code == IN_PROGRESS:
            waiting = True
        elif code != 0:
            failed = SCALE * (index + 1) + code
            if mark == GROUPED:
                while mark != ENDS:
                    index += 1
                    row = table + index * _ROW
                    mark = _word(row + 16)
                nc10d_nccl_call(row)
            return failed
        index += 1
        if waiting and mark != GROUPED and index < count:
            return -index
    return 0


@intrinsic
def _set_word(_typing: Any, address: Any, value: Any) -> Any:
    """Store a 64-bit integer at an address."""

    def generate(_context: Any, b: Any, _signature: Any, args: Any) -> Any:
        b.store(args[1], b.inttoptr(args[0], _I64.as_pointer()))

    return types.void(types.int64, types.int64), generate


@compiled("int64(int64, int64, int64, int64, int64, int64, int64)")
def nc10d_nccl_run(table, first, count, device, current, ended, end):  # type: ignore[no-untyped-def]
    """Make the calls of rows first..count-1 with a device's context as the thread's current one.

    `device` is the address of two rows: what makes the context current, and what puts back the one
    before. The default streams are those of the current context. What differs from launch to launch
    is written to the table first: the stream `current` and the event `ended`, which row `end`
    records and the one behind it waits for.
    """
    last = table + end * _ROW
    _set_word(table + 32, current)
    _set_word(last + 24, ended)
    _set_word(last + _ROW + 24, current)
    _set_word(last + _ROW + 32, ended)
    code = nc10d_nccl_call(device)
    if code != 0:
        return SCALE + code
    answer = nc10d_nccl_rows(table, first, count)
    nc10d_nccl_call(device + _ROW)
    return answer


_SIZE = object.__basicsize__
"""Where a list keeps its length, and behind it the address of its items (CPython's header)."""


@compiled("int64(int64, int64, int64)")
def nc10d_nccl_same(items, known, count):  # type: ignore[no-untyped-def]
    """Say whether the list at an address has these `count` objects, by their addresses (ids)."""
    if _word(items + _SIZE) != count:
        return 0
    first = _word(items + _SIZE + 8)
    for index in range(count):
        if _word(first + 8 * index) != _word(known + 8 * index):
            return 0
    return 1


@njit(nogil=True)
def nc10d_nccl_sort(keys, order, count):  # type: ignore[no-untyped-def]
    """order = keys[order].argsort(), by Shell's method: blocks are short, and often sorted."""
    gap = count // 2
    while gap > 0:
        for index in range(gap, count):
            this = _word(order + 8 * index)
            place = index
            while place >= gap:
                other = _word(order + 8 * (place - gap))
                if _word(keys + 8 * other) <= _word(keys + 8 * this):
                    break
                _set_word(order + 8 * place, other)
                place -= gap
            _set_word(order + 8 * place, this)
        gap //= 2


@compiled("int64(int64, int64, int64, int64, int64)")
def nc10d_nccl_alike(places, table, count, itemsize, elements):  # type: ignore[no-untyped-def]
    """Fill in where arrays are, and how large, in `count` rows that are alike.

    `places` is the address of `count` addresses, as many counts, and as many words of room. Says
    whether the arrays have elements, are aligned, and lie apart; if not, no row is of use.
    """
    counts, order = places + 8 * count, places + 16 * count
    for index in range(count):
        address, n = _word(places + 8 * index), _word(counts + 8 * index)
        if n == 0 or address % min(itemsize, 8) != 0:
            return 0
        row = table + index * _ROW
        _set_word(row + 24, address)
        _set_word(row + 32, address)
        _set_word(row + 40, n * elements)
        _set_word(order + 8 * index, index)
    nc10d_nccl_sort(places, order, count)
    end = 0
    for index in range(count):
        at = _word(order + 8 * index)
        address = _word(places + 8 * at)
        if index > 0 and address < end:
            return 0
        end = address + _word(counts + 8 * at) * itemsize
    return 1
