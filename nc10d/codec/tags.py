"""A header's format: each value is a tag byte and its content. Little-endian, packed.

    value     := tag, then by tag
    INT8      int8                              INT64   int64
    BIG_INT   length, two's complement          FLOAT   float64          COMPLEX  2 x float64
    TEXT      length, UTF-8 (surrogates as three bytes)
    BYTES     length, the bytes                 BLOB, BLOB_ARRAY  int64: bytes in the payload
    BYTE_ARRAY length, the bytes
    LIST TUPLE SET FROZENSET   count, that many values
    FLOATS INTS                int64: a list of so many float64 or int64 in the payload
    DICT      count, that many keys, as many values
    OBJECT    registered name, state: two values
    ARRAY     dtype code (uint8), dimensions (uint8), int64 each; elements in the payload, C order
    SCALAR    dtype code, the element           DTYPE   dtype code
    REF       uint32: the number of an earlier text, byte string, container, object or array

A length or count is a uint32. A value gets its number at its end, so a REF can't point at a value
around it. Keys and set members are hashed: there a REF may point at text or bytes only, because
otherwise a short stream could build a tuple with 2**60 parts that must be hashed.
"""

from __future__ import annotations

import enum
import struct

MAX_DEPTH = 256
"""The deepest nesting of values: hashing tuples recurses on the C stack, without a limit."""


class Tag(enum.IntEnum):
    """A value's first byte."""

    NONE = 0
    FALSE = 1
    TRUE = 2
    INT8 = 3
    INT64 = 4
    BIG_INT = 5
    FLOAT = 6
    COMPLEX = 7
    TEXT = 8
    BYTES = 9
    BYTE_ARRAY = 10
    BLOB = 11
    BLOB_ARRAY = 12
    LIST = 13
    TUPLE = 14
    DICT = 15
    SET = 16
    FROZENSET = 17
    OBJECT = 18
    ARRAY = 19
    SCALAR = 20
    DTYPE = 21
    REF = 22
    FLOATS = 23
    INTS = 24


COUNT = struct.Struct("<I")
INT8 = struct.Struct("<b")
INT64 = struct.Struct("<q")
FLOAT = struct.Struct("<d")
COMPLEX = struct.Struct("<dd")
ARRAY = struct.Struct("<BB")

LARGEST_COUNT = 2**32 - 1
PACKED = 16
"""A list with at least this many floats, or 64-bit ints, travels like an array."""
INLINE = 1024
"""Byte strings longer than this travel in the payload, which saves a copy."""


def hashed_children(tag: Tag, count: int, inside_key: bool) -> int:
    """Return how many of a container's first children are hashed, by it or by a key around it.

    >>> hashed_children(Tag.DICT, 3, False), hashed_children(Tag.LIST, 3, True)
    (3, 6)
    """
    if inside_key:
        return 2 * count
    return count if tag in _HASHING else 0


_HASHING = frozenset({Tag.DICT, Tag.SET, Tag.FROZENSET})
