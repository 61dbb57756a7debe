"""Check that a pickle builds plain objects and can do nothing else; see nc10d.codec.plain.

`check` follows the unpickler's stack and memo. An item stands for an object there:

    word of an item     of a list, dict or set                        of any other object
    kind                _LIST, _DICT, _SET                            the others
    depth               levels of objects inside, seen so far         the same
    third               1 + its place in the memo, 0: not there yet;  weight: how many parts of the
                        -1: a reference from the memo                 object a hash visits

Row i of `items` has the item at place i in the stack, and behind that the item at place i in the
memo. A list, dict or set weighs 1.

A pickler fills a list, dict or set before it refers to the container again. So a stream that fills
a reference is refused, and the memo has the container's final depth. A reference from inside the
container is the exception: such a reference closes a cycle, and counts the depth so far.

So a hostile stream may lead from cycle to cycle over any number of levels, and that is harmless.
Every cycle has a list, dict or set. None of these can be hashed, so a hash, which recurses without
a limit, stays within MAX_DEPTH levels of tuples. Python bounds the recursion of `repr`, `==`,
copies and pickles by a RecursionError, and frees any depth with a bounded stack.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import carray, njit, types

from nc10d.codec.tags import MAX_DEPTH
from nc10d.kernels.cache import entry_points, on_demand
from nc10d.kernels.simd import I8, I64, Builder, Value, emits

ITEM_WORDS = 6
_HEAVIEST = 1 << 20
"""The most weight in all keys and set members: more would take a noticeable time to hash."""
_MOST_COPIED = 64
"""An object's arrays may have this many times the stream's bytes."""
_LEAF, _TUPLE, _LIST, _DICT, _SET, _MODULE, _NAME, _MARK, _FUNCTION = range(9)
"""The kinds of items; a frozenset counts as a tuple. No object has the last two as parts."""
_REFUSE, _SKIP, _PUSH, _GET, _KEEP, _BUILD, _FILL, _FIND, _CALL, _END = range(10)
"""The effects of opcodes. `_BUILD` makes a tuple of items, `_FILL` puts items into a container."""


def _table(*entries: tuple[int, Iterable[bytes]]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return a value for each opcode, 0 for those that no entry names."""
    table = np.zeros(256, np.int64)
    for value, codes in entries:
        table[list(b"".join(codes))] = value
    return table


# Python's module pickletools describes the opcodes.
_SIZED = (
    *(pickle.SHORT_BINUNICODE, pickle.SHORT_BINBYTES, pickle.LONG1, pickle.BINUNICODE),
    *(pickle.BINBYTES, pickle.LONG4, pickle.BINUNICODE8, pickle.BINBYTES8, pickle.BYTEARRAY8),
)
_BYTES = pickle.SHORT_BINBYTES, pickle.BINBYTES, pickle.BINBYTES8
_SHORT = *_SIZED[:3], pickle.PROTO, pickle.BININT1, pickle.BINGET
_ARGUMENT = _table(
    (1, _SHORT),
    (2, [pickle.BININT2]),
    (4, [*_SIZED[3:6], pickle.BININT, pickle.LONG_BINGET]),
    (8, [*_SIZED[6:], pickle.BINFLOAT, pickle.FRAME]),
)
"""The bytes in an opcode's argument."""
_HAS_CONTENT = _table((1, _SIZED))
"""Whether the argument gives how many bytes follow."""
_READ = _table((1, [*_SIZED, pickle.BINGET, pickle.LONG_BINGET, pickle.FRAME]))
"""Whether the argument matters here."""
_NUMBERS = pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.BINFLOAT
_CONSTANTS = pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.EMPTY_TUPLE
_KIND = _table(
    (_LIST, [pickle.EMPTY_LIST]),
    (_DICT, [pickle.EMPTY_DICT]),
    (_SET, [pickle.EMPTY_SET]),
    (_MARK, [pickle.MARK]),
)
"""The kind of the item that an opcode pushes."""
_CONTAINER = _table(
    (_LIST, [pickle.APPEND, pickle.APPENDS]),
    (_DICT, [pickle.SETITEM, pickle.SETITEMS]),
    (_SET, [pickle.ADDITEMS]),
)
"""The kind of the container that an opcode fills."""
_TAKES = _table(
    (1, [pickle.TUPLE1, pickle.APPEND]), (2, [pickle.TUPLE2, pickle.SETITEM]), (3, [pickle.TUPLE3])
)
"""How many items an opcode takes from the stack; 0: all down to a mark, and the mark."""
_EFFECT = _table(
    (_SKIP, [pickle.PROTO, pickle.FRAME]),
    (_PUSH, [*_SIZED, *_NUMBERS, *_CONSTANTS, pickle.EMPTY_LIST, pickle.EMPTY_DICT]),
    (_PUSH, [pickle.EMPTY_SET, pickle.MARK]),
    (_GET, [pickle.BINGET, pickle.LONG_BINGET]),
    (_KEEP, [pickle.MEMOIZE]),
    (_BUILD, [pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.TUPLE, pickle.FROZENSET]),
    (_FILL, [pickle.APPEND, pickle.APPENDS, pickle.SETITEM, pickle.SETITEMS, pickle.ADDITEMS]),
    (_FIND, [pickle.STACK_GLOBAL]),
    (_CALL, [pickle.REDUCE]),
    (_END, [pickle.STOP]),
)
_FROZENSET, _TEXT = pickle.FROZENSET[0], pickle.SHORT_BINUNICODE[0]
_HEAVY = _table((1, [pickle.LONG1, pickle.LONG4]), (1, [*_BYTES]))
"""Whether an item weighs one for each _WORD bytes. A hash of an int visits all bytes each time; an
array copies its bytes."""
_WORD = 8
_FUNCTION_MODULE = np.frombuffer(b"nc10d.codec.constructors", np.uint8)
_FUNCTION_NAME = np.frombuffer(b"array_from", np.uint8)
"""The module and the name of the function that a stream may call."""


@emits(types.CPointer(types.uint8)(types.int64))
def _pointer_to_bytes(b: Builder, address: Value) -> Value:
    return b.inttoptr(address, I8.as_pointer())


@emits(types.CPointer(types.int64)(types.int64))
def _pointer_to_words(b: Builder, address: Value) -> Value:
    return b.inttoptr(address, I64.as_pointer())


@njit(nogil=True)
def nc10d_bytes(address: int, size: int) -> Any:
    """Return the bytes at an address as an array."""
    return carray(_pointer_to_bytes(address), (size,))


@njit(nogil=True)
def nc10d_items(address: int, places: int) -> Any:
    """Return a check's memory at an address as an array."""
    return carray(_pointer_to_words(address), (places, ITEM_WORDS))


@njit(nogil=True)
def nc10d_number(stream: npt.NDArray[np.uint8], at: int, width: int) -> Any:
    """Return a little-endian number of up to 8 bytes; negative beyond an int64."""
    number: Any = np.int64(0)
    for i in range(width):
        number |= np.int64(stream[at + i]) << (8 * i)
    return number


@njit(nogil=True)
def nc10d_first_taken(items: Any, top: int, takes: int) -> int:
    """Return the place of the first item that an opcode takes, -1 if there are not so many."""
    first = top - takes
    if takes == 0:
        while first > 0 and items[first - 1, 0] < _MARK:
            first -= 1
        return first if first > 0 and items[first - 1, 0] == _MARK else -1
    for i in range(max(first, 0), top):
        if items[i, 0] >= _MARK:
            return -1
    return first


@njit(nogil=True)
def nc10d_is_container(kind: int) -> bool:
    """Return whether a kind is a list, dict or set."""
    return _LIST <= kind <= _SET


@njit(nogil=True)
def nc10d_weigh(items: Any, first: int, top: int, step: int) -> Any:
    """Return the weight of each `step`-th item from `first` on, at most _HEAVIEST."""
    weight: Any = np.int64(0)
    for i in range(first, top, step):
        one = 1 if nc10d_is_container(items[i, 0]) else items[i, 2]
        weight = min(weight + one, _HEAVIEST)
    return weight


@njit(nogil=True)
def nc10d_take_items(code: int, items: Any, top: int) -> Any:
    """Carry out an opcode that takes items; return the new top and the weight that is hashed.

    The top is -1 if the unpickler would fail, or would call another type's method.
    """
    takes = _TAKES[code]
    first = nc10d_first_taken(items, top, takes)
    below = first - 1 if takes else first - 2  # the item under what is taken, mark included
    depth = 1
    for i in range(max(first, 0), top):
        depth = max(depth, items[i, 1] + 1)
    if first < 0 or depth > MAX_DEPTH:
        return -1, 0
    if _EFFECT[code] == _BUILD:
        weight = 1 + nc10d_weigh(items, first, top, 1)
        items[below + 1, 0], items[below + 1, 1], items[below + 1, 2] = _TUPLE, depth, weight
        return below + 2, weight if code == _FROZENSET else 0
    kind = _CONTAINER[code]
    if below < 0 or items[below, 0] != kind or (kind == _DICT and (top - first) % 2 != 0):
        return -1, 0
    kept = items[below, 2]
    if kept < 0:
        return -1, 0
    items[below, 1] = max(items[below, 1], depth)
    if kept > 0:
        items[kept - 1, 4] = items[below, 1]
    step = 2 if kind == _DICT else 1
    return below + 1, 0 if kind == _LIST else nc10d_weigh(items, first, top, step)


@njit(nogil=True)
def nc10d_is_text(
    stream: npt.NDArray[np.uint8], start: int, size: int, text: npt.NDArray[np.uint8]
) -> bool:
    """Return whether the `size` bytes from `start` on are a text's."""
    same = 0
    while size == text.size and same < size and stream[start + same] == text[same]:
        same += 1
    return same == text.size


@njit(nogil=True)
def nc10d_text_kind(stream: npt.NDArray[np.uint8], start: int, size: int) -> int:
    """Return a short text's kind: the function's module or name, or any other."""
    if nc10d_is_text(stream, start, size, _FUNCTION_MODULE):
        return _MODULE
    return _NAME if nc10d_is_text(stream, start, size, _FUNCTION_NAME) else _LEAF


@njit(nogil=True)
def nc10d_is_plain_pickle(stream: npt.NDArray[np.uint8], items: Any) -> bool:
    """Return whether a pickle builds one plain object; `items` has a row more than its bytes."""
    size, at, top, kept = stream.size, 0, 0, 0
    hashed: Any = np.int64(0)
    copied: Any = np.int64(0)
    while at < size and hashed < _HEAVIEST:
        code, at = stream[at], at + 1
        effect, width = _EFFECT[code], _ARGUMENT[code]
        if effect == _REFUSE or width > size - at:
            return False
        if effect == _PUSH and not _READ[code]:
            kind = _KIND[code]
            items[top, 0], items[top, 1] = kind, 0
            items[top, 2] = 0 if nc10d_is_container(kind) else 1
            top, at = top + 1, at + width
            continue
        number = nc10d_number(stream, at, width if _READ[code] else 0)
        at += width
        if number < 0 or (effect != _GET and number > size - at):  # bytes that are not there
            return False
        start, at = at, at + (number if _HAS_CONTENT[code] else 0)
        if effect == _END:
            return at == size and top == 1 and items[0, 0] < _MARK
        if effect == _PUSH:
            kind = nc10d_text_kind(stream, start, number) if code == _TEXT else _KIND[code]
            weight = 1 + number // _WORD if _HEAVY[code] else 1
            items[top, 0], items[top, 1], items[top, 2] = kind, 0, weight
            top += 1
        elif effect == _GET:
            if number >= kept:
                return False
            for i in range(3):
                items[top, i] = items[number, 3 + i]
            top += 1
        elif effect == _KEEP:
            if top == 0 or items[top - 1, 0] == _MARK:
                return False
            for i in range(3):
                items[kept, 3 + i] = items[top - 1, i]
            kept += 1
            if nc10d_is_container(items[top - 1, 0]):
                if items[top - 1, 2] != 0:  # kept before
                    return False
                items[top - 1, 2], items[kept - 1, 5] = kept, -1
        elif effect in (_FIND, _CALL):
            wanted, needed = (_MODULE, _NAME) if effect == _FIND else (_FUNCTION, _TUPLE)
            top -= 1
            if top < 1 or items[top - 1, 0] != wanted or items[top, 0] != needed:
                return False
            if effect == _CALL:
                copied += items[top, 2] * _WORD
                if copied > _MOST_COPIED * size:  # the same bytes in many calls
                    return False
            items[top - 1, 0] = _FUNCTION if effect == _FIND else _LEAF
        elif effect != _SKIP:
            top, weight = nc10d_take_items(code, items, top)
            if top < 0:
                return False
            hashed += weight
    return False


@on_demand("boolean(int64, int64, int64, int64)")
def _check(stream: int, size: int, scratch: int, places: int) -> bool:
    """Return whether a pickle builds one plain object.

    `stream` is the address of `size` bytes, `scratch` that of places x ITEM_WORDS words, with
    more places than bytes. The caller keeps both in memory.
    """
    return nc10d_is_plain_pickle(nc10d_bytes(stream, size), nc10d_items(scratch, places))


__getattr__ = entry_points(__name__)
