"""Plain objects as pickles that cannot run code: Python's own pickler, and a check on the stream.

A plain object consists of None, bool, int, float, str, bytes, bytearray, list, tuple, dict, set and
frozenset, without their subclasses, and of small arrays: NumPy's arrays and scalars, and torch's
tensors. The pickle has only opcodes that build such values, or call the function in
nc10d.codec.constructors. The check does not trust the stream, and refuses all else:

- other opcodes, other functions' names, other uses of that function;
- lengths beyond the stream, references to values that do not exist;
- an item for a value that is no list, dict or set;
- deep nesting, because hashing a tuple recurses on the C stack;
- keys with many parts, because a short stream could build a tuple with 2**60 parts.

Only a stream that passes is unpickled.

Not done: values with registered types inside a pickle. Their decoders would hash and copy shared
values, a cycle through a state would lose its contents, and a user's function would run twice.
"""

from __future__ import annotations

import mmap
import pickle
from typing import Any

import numpy as np
import numpy.typing as npt

from nc10d.base.signal_errors import raised_here
from nc10d.codec import opcodes
from nc10d.codec.constructors import array_from, call_for, located
from nc10d.codec.decoder import Bytes, Locate, decoded
from nc10d.errors import CodecError

LARGEST_STREAM = 1 << 20
"""Larger objects are walked in Python: the check needs some memory for each byte in a stream."""
_PROTOCOL = 5


class _NotPlain(Exception):
    """A value has another type, or the stream grows too long."""


_REFUSALS = _NotPlain, ValueError, RuntimeError
"""Also raised if the file is full, the object too deep, or changed by another thread."""


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: object) -> Any:
        # Called for each value with another type, before any code of that type runs.
        if value is array_from:
            return NotImplemented  # by its name
        try:
            found = call_for(value)
        except raised_here(Exception):
            found = None  # the walk over the object raises it again
        if found is None:
            raise _NotPlain
        return found


def _refuse(_: pickle.PickleBuffer) -> None:
    # A PickleBuffer would arrive as bytes.
    raise _NotPlain


class PlainWriter:
    """Writes objects' streams, one at a time, into `memory`, from byte `start` on."""

    # The memory is an unnamed file with a fixed size: the pickler writes to it, and fails where
    # it ends, in C.

    __slots__ = ("clear_memo", "dump", "memory", "seek", "start", "tell")

    def __init__(self, start: int = 0) -> None:
        self.start = start
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # a forked child has a copy
        file = mmap.mmap(-1, start + LARGEST_STREAM, private)
        pickler = _Pickler(file, _PROTOCOL, buffer_callback=_refuse)
        self.memory = np.frombuffer(file, np.uint8)
        # What `write` calls, also for compiled code that writes.
        self.seek, self.tell = file.seek, file.tell
        self.dump, self.clear_memo = pickler.dump, pickler.clear_memo

    def write(self, value: Any) -> int:
        """Write an object; return where the stream ends in `memory`.

        The end is negative if the object is too long, or has another type than plain ones. The
        stream is not checked: it may still not be a plain object's.
        """
        self.seek(self.start)
        try:
            self.dump(value)
        except raised_here(*_REFUSALS):
            return -self.tell()
        finally:
            self.clear_memo()  # which keeps the parts of the object alive
        return self.tell()

    def clean_up(self, error: Exception) -> int:
        """Clean up after `dump`, called by compiled code, has raised an error.

        Returns what `write` would have returned; 0 if `write` would have raised the error.
        """
        self.clear_memo()
        return -self.tell() if isinstance(error, _REFUSALS) else 0


def encode_plain(value: object) -> bytes | None:
    """Return a plain object's stream, None for any other object."""
    writer = PlainWriter()
    stream = writer.memory[: max(0, writer.write(value))]
    return stream.tobytes() if is_plain(stream) else None


def decode_plain(stream: Bytes, locate: Locate = None) -> Any:
    """Return a stream's object; CodecError if the object is not plain.

    `locate` is as in nc10d.codec.decoder.
    """
    malformed = "the message of a plain object is malformed"
    if stream.size > LARGEST_STREAM or not is_plain(stream):
        raise CodecError(malformed)
    # A checked stream may still hold invalid UTF-8, an unhashable key or a cut frame.
    with located(locate):
        return decoded(malformed, pickle.loads, stream.data)


_KEPT = 1 << 16
_spare: list[npt.NDArray[np.int64]] = []
"""Memory for checks on up to _KEPT bytes: 3 MiB, used as far as streams reach. A check takes it."""


def is_plain(stream: Bytes) -> bool:
    """Return whether a pickle builds a plain object and can do nothing else.

    TypeError unless the stream lies in memory byte by byte.
    """
    size = stream.size
    if stream.dtype != np.uint8 or not stream.flags.c_contiguous:
        raise TypeError(f"a stream is contiguous bytes, got {stream.dtype}, {stream.strides}")
    if size > _KEPT:
        scratch = np.empty((size + 1, opcodes.ITEM_WORDS), np.int64)
        return bool(opcodes.check(stream.ctypes.data, size, scratch.ctypes.data, size + 1))
    try:
        scratch = _spare.pop()
    except IndexError:
        scratch = np.empty((_KEPT + 1, opcodes.ITEM_WORDS), np.int64)
    answer = bool(opcodes.check(stream.ctypes.data, size, scratch.ctypes.data, _KEPT + 1))
    _spare[:] = (scratch,)
    return answer
