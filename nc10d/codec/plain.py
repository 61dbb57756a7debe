"""Plain objects as pickles that cannot run code: Python's own pickler, and a check of the stream.

A plain object consists of None, bool, int, float, str, bytes, bytearray, list, tuple, dict, set and
frozenset, and of no subclass of these. Its pickle contains opcodes that build such values, and no
opcode that names or calls anything. The check does not trust the stream, and refuses all else:

- other opcodes, lengths beyond the stream, references to values that do not exist;
- an item for a value that is no list, dict or set;
- deep nesting, because hashing a tuple recurses on the C stack;
- keys of many parts, because a short stream could build a tuple of 2**60 parts.

Only a stream that passes is unpickled.
"""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import numpy.typing as npt

from nc10d.codec import opcodes
from nc10d.errors import CodecError

LARGEST_STREAM = 1 << 20
"""Larger objects are walked in Python: the check needs some memory for each byte of a stream."""
_PROTOCOL = 5


class _NotPlain(Exception):
    """A value is of another type, or the stream grows too long."""


class _Writes:
    """A file that keeps what the pickler writes."""

    __slots__ = ("parts", "room")

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.room = LARGEST_STREAM

    def write(self, part: bytes) -> None:
        self.room -= len(part)
        if self.room < 0:
            raise _NotPlain
        self.parts.append(part)


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        # Called for each value that is not of a plain type, before any code of that type runs.
        raise _NotPlain


def _refuse(_: pickle.PickleBuffer) -> None:
    # A PickleBuffer would arrive as bytes.
    raise _NotPlain


def encode_plain(value: Any) -> bytes | None:
    """Return the stream of a plain object, None for any other object."""
    file = _Writes()
    try:
        _Pickler(file, _PROTOCOL, buffer_callback=_refuse).dump(value)
    except (_NotPlain, RuntimeError):  # too deep, or another thread changes the object
        return None
    stream = file.parts[0] if len(file.parts) == 1 else b"".join(file.parts)
    return stream if is_plain(np.frombuffer(stream, np.uint8)) else None


def decode_plain(stream: npt.NDArray[np.uint8]) -> Any:
    """Return the object of a stream; CodecError if it is not that of a plain object."""
    if stream.size > LARGEST_STREAM or not is_plain(stream):
        raise CodecError("the message of a plain object is malformed")
    try:
        return pickle.loads(stream.data)
    except (ValueError, TypeError, EOFError, pickle.UnpicklingError) as error:
        # Text that is no UTF-8, a key that can't be hashed, a frame that is cut.
        raise CodecError(f"the message of a plain object is malformed: {error}") from error


_FEW = 1024
_spare: list[npt.NDArray[np.int64]] = []
"""The memory of checks of up to _FEW bytes. A thread takes one out while it checks."""


def is_plain(stream: npt.NDArray[np.uint8]) -> bool:
    """Return whether a pickle builds a plain object and can do nothing else."""
    if stream.size > _FEW:
        return bool(opcodes.check(stream, np.empty((opcodes.ROWS, stream.size + 1), np.int64)))
    try:
        rows = _spare.pop()
    except IndexError:
        rows = np.empty((opcodes.ROWS, _FEW + 1), np.int64)
    answer = bool(opcodes.check(stream, rows))
    _spare[:] = (rows,)
    return answer
