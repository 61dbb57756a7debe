"""Check that a pickle builds plain objects and can do nothing else; see nc10d.codec.plain."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np

from nc10d.codec.tags import MAX_DEPTH
from nc10d.kernels.cache import entry_points, on_demand

_MOST_HASHED = 1 << 24
"""Parts of keys and members of sets, in all; more would take a noticeable time to hash."""
_LEAF, _TUPLE, _LIST, _DICT, _SET, _MARK = range(6)
"""The kinds of items on the unpickler's stack; a frozenset counts as a tuple."""

# Opcodes by the form of their argument; see the module pickletools of Python.
_COUNTED_1 = tuple(pickle.SHORT_BINUNICODE + pickle.SHORT_BINBYTES + pickle.LONG1)
_COUNTED_4 = tuple(pickle.BINUNICODE + pickle.BINBYTES + pickle.LONG4)
_COUNTED_8 = tuple(pickle.BINUNICODE8 + pickle.BINBYTES8 + pickle.BYTEARRAY8)
_BYTES_1 = tuple(pickle.PROTO + pickle.BININT1 + pickle.BINGET)
_BYTES_2 = tuple(pickle.BININT2)
_BYTES_4 = tuple(pickle.BININT + pickle.LONG_BINGET)
_BYTES_8 = tuple(pickle.BINFLOAT + pickle.FRAME)
# Opcodes by their effect.
_NOTHING = tuple(pickle.PROTO + pickle.FRAME)
_LEAVES = (
    *_COUNTED_1,
    *_COUNTED_4,
    *_COUNTED_8,
    *_BYTES_2,
    *tuple(pickle.NONE + pickle.NEWTRUE + pickle.NEWFALSE),
    *tuple(pickle.BININT + pickle.BININT1 + pickle.BINFLOAT + pickle.EMPTY_TUPLE),
)
_TUPLES = tuple(pickle.TUPLE1 + pickle.TUPLE2 + pickle.TUPLE3)
_FROM_MARK = tuple(pickle.TUPLE + pickle.FROZENSET)
_GETS = tuple(pickle.BINGET + pickle.LONG_BINGET)
_EMPTY_LIST, _EMPTY_DICT = pickle.EMPTY_LIST[0], pickle.EMPTY_DICT[0]
_EMPTY_SET = pickle.EMPTY_SET[0]
_MARKS, _MEMOIZE, _STOP = pickle.MARK[0], pickle.MEMOIZE[0], pickle.STOP[0]
_APPEND, _APPENDS = pickle.APPEND[0], pickle.APPENDS[0]
_SETITEM, _SETITEMS, _ADDITEMS = pickle.SETITEM[0], pickle.SETITEMS[0], pickle.ADDITEMS[0]
_FRAME, _FROZEN = pickle.FRAME[0], pickle.FROZENSET[0]


@on_demand("boolean(Array(uint8, 1, 'C', readonly=True), int64[:, ::1])")
def _check(stream: Any, rows: Any) -> bool:
    """Walk over the opcodes. `rows` is a stack and a memo, with room for an item of each byte.

    The first three rows are kind and depth of the stack's items, and the parts that a hash of each
    visits; the last three are the same of the memo's items.
    """
    size, at, top, kept, hashed = stream.size, 0, 0, 0, 0
    while at < size:
        code = stream[at]
        at += 1
        counted = 1 if code in _COUNTED_1 else 4 if code in _COUNTED_4 else 8
        if counted == 8 and code not in _COUNTED_8:
            counted = 0
        width = counted
        if code in _BYTES_1:
            width = 1
        elif code in _BYTES_2:
            width = 2
        elif code in _BYTES_4:
            width = 4
        elif code in _BYTES_8:
            width = 8
        if width > size - at:
            return False
        number: Any = np.int64(0)
        if counted or code in _GETS or code == _FRAME:
            for i in range(width):
                number |= np.int64(stream[at + i]) << (8 * i)
        at += width
        if counted:
            if number < 0 or number > size - at:
                return False
            at += number

        if code in _NOTHING:
            if number < 0 or number > size - at:  # the frame is cut
                return False
            continue
        if code == _STOP:
            return at == size and top == 1 and rows[0, 0] != _MARK
        if code == _MEMOIZE:
            if top == 0 or rows[0, top - 1] == _MARK:
                return False
            for row in range(3):
                rows[3 + row, kept] = rows[row, top - 1]
            kept += 1
            continue

        kind, depth, parts = _LEAF, 0, 1
        if code in _GETS:
            if number < 0 or number >= kept:
                return False
            kind, depth, parts = rows[3, number], rows[4, number], rows[5, number]
        elif code == _MARKS:
            kind = _MARK
        elif code == _EMPTY_LIST:
            kind = _LIST
        elif code == _EMPTY_DICT:
            kind = _DICT
        elif code == _EMPTY_SET:
            kind = _SET
        elif code not in _LEAVES:
            # -- an opcode that takes items from the stack: those from `first` on
            first = top
            if code in _TUPLES:
                first = top - (code - _TUPLES[0] + 1)
            elif code == _APPEND:
                first = top - 1
            elif code == _SETITEM:
                first = top - 2
            else:
                while first > 0 and rows[0, first - 1] != _MARK:
                    first -= 1
                first = first if first > 0 else -1
            if first < 0:
                return False
            target = first - 1  # the mark, or the value that gets an item
            inner = 0
            for i in range(first, top):
                if rows[0, i] == _MARK:
                    return False
                inner = max(inner, rows[1, i])
                parts += rows[2, i]
            parts = min(parts, _MOST_HASHED)
            if inner >= MAX_DEPTH:
                return False
            if code in _TUPLES or code in _FROM_MARK:
                kind, depth = _TUPLE, inner + 1
                if code == _FROZEN:
                    hashed += parts
                top = first if code in _TUPLES else target
            else:
                if code in (_APPENDS, _SETITEMS, _ADDITEMS):
                    target -= 1
                if target < 0:
                    return False
                wanted = _DICT
                if code in (_APPEND, _APPENDS):
                    wanted = _LIST
                elif code == _ADDITEMS:
                    wanted = _SET
                elif code not in (_SETITEM, _SETITEMS):
                    return False  # none of a plain object's
                if rows[0, target] != wanted or (wanted == _DICT and (top - first) % 2):
                    return False
                if wanted == _SET:
                    hashed += parts
                if wanted == _DICT:
                    for i in range(first, top, 2):
                        hashed += rows[2, i]
                rows[1, target] = max(rows[1, target], inner + 1)
                top = target + 1
                if hashed >= _MOST_HASHED:
                    return False
                continue
            if hashed >= _MOST_HASHED:
                return False
        rows[0, top], rows[1, top], rows[2, top] = kind, depth, parts
        top += 1
    return False


__getattr__ = entry_points(__name__)
