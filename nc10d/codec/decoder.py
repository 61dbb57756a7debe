"""Decode a header and a payload to an object: a loop over tags, without recursion.

The stream is not trusted. Nothing is allocated from an announced size: a container grows as its
values are read, and arrays must lie within the payload. Values are checked only where the
container needs it: keys must be hashable and distinct.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterable, Sized
from math import prod
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from nc10d.arrays.dtypes import DType
from nc10d.base.signal_errors import raised_here
from nc10d.codec import tags
from nc10d.codec.tags import Tag
from nc10d.codec.type_registry import codec_named
from nc10d.errors import CodecError

Array = np.ndarray[Any, np.dtype[Any]]
Bytes = npt.NDArray[np.uint8]
T = TypeVar("T")
C = TypeVar("C", bound=Sized)
Locate = Callable[[Any], Any] | None
"""A function that replaces each received array (map_location), or None."""
_ALIGN = 64
"""A payload's chunks begin at multiples of this number of bytes."""
_DTYPES = {dtype.code: dtype for dtype in DType}
_MOST_WASTED = 64
"""An array may keep alive this many times its own size; a smaller array is copied."""


def aligned(nbytes: int) -> int:
    """Return the next multiple of 64."""
    return -(-nbytes // _ALIGN) * _ALIGN


def rounded(nbytes: int) -> int:
    """Round `nbytes` up by at most 1/16 or 63: to one of 16 sizes between powers of two.

    >>> rounded(1), rounded(5000), rounded(1 << 20)
    (64, 5120, 1048576)
    """
    step = max(_ALIGN, 1 << max(0, (nbytes - 1).bit_length() - 5))
    return -(-nbytes // step) * step


class Payload:
    """A received message's chunks, taken in their order.

    The chunks lie in `memory`, except those in `long`, which come with the place in `memory`
    before which each belongs.
    """

    def __init__(self, memory: Bytes, long: Iterable[tuple[int, Bytes]] = ()) -> None:
        self._memory = memory
        self._long = deque(long)
        self._at = 0

    @property
    def nbytes(self) -> int:
        """The bytes in the memory that the chunks share."""
        return self._memory.size

    def take(self, nbytes: int) -> Bytes:
        """Return the next chunk, a view; CodecError if fewer bytes are left."""
        if nbytes and self._long and self._long[0][0] == self._at:
            _, chunk = self._long.popleft()
            if chunk.size != nbytes:
                raise CodecError(f"the header asks for {nbytes} bytes of {chunk.size}")
            return chunk
        if not 0 <= nbytes <= self._memory.size - self._at:
            left = self._memory.size - self._at
            raise CodecError(f"the header asks for {nbytes} bytes, and the payload has {left}")
        chunk = self._memory[self._at : self._at + nbytes]
        self._at += aligned(nbytes)
        return chunk

    def finish(self) -> None:
        """Raise CodecError if bytes are left."""
        if self._long:
            raise CodecError(f"the header leaves {len(self._long)} chunks of the payload")
        if self._at < self._memory.size:
            raise CodecError(f"the header leaves {self._memory.size - self._at} bytes of payload")


def decode(header: memoryview, payload: Payload, locate: Locate = None) -> Any:
    """Return a stream's value; CodecError for a malformed stream.

    Arrays are writable and C-contiguous. They are views of the payload, unless they are small
    compared with it. `locate(array)` is called for each NumPy array, and each value with a type
    that is registered as an array; its result replaces the array.
    """
    decoder = _Decoder(bytes(header), payload, locate)
    try:
        value = decoder.walk()
    except CodecError:
        raise
    except raised_here(Exception) as error:  # any type: hashing a key may call the user's code
        where = f"byte {decoder.at} of {len(header)}"
        raise CodecError(f"a malformed stream, at {where}: {error}") from error
    decoder.finish()
    return value


class _Frame:
    """A container whose children are being read; `levels` is the nesting below it, so far."""

    __slots__ = ("count", "hashed", "items", "levels", "tag")

    def __init__(self, tag: Tag, count: int, inside_key: bool) -> None:
        self.tag = tag
        self.count = 2 * count if tag is Tag.DICT else count
        self.hashed = tags.hashed_children(tag, count, inside_key)
        self.items: list[object] = []
        self.levels = 0


class _Decoder:
    """The state of decoding a stream: position, open containers and numbered values."""

    def __init__(self, header: bytes, payload: Payload, locate: Locate) -> None:
        self.at = 0
        self._header = header
        self._payload = payload
        self._locate = locate
        self._numbered: list[object] = []
        self._levels: list[int] = []  # of the numbered values
        self._frames: list[_Frame] = []

    def walk(self) -> object:
        """Read a value and everything inside."""
        frames = self._frames
        while True:
            hashed = bool(frames) and len(frames[-1].items) < frames[-1].hashed
            code = self._header[self.at]
            self.at += 1
            if code in _BUILD:
                self._open(Tag(code), hashed)
            else:
                value = self._refer(hashed) if code == Tag.REF else _READ[code](self)
                if not frames:
                    return value
                frames[-1].items.append(value)
            while len(frames[-1].items) == frames[-1].count:
                frame = frames.pop()
                value = self.number(self._built(frame), frame.levels + 1)
                if not frames:
                    return value
                self._nest(frame.levels + 1)
                frames[-1].items.append(value)

    def finish(self) -> None:
        """Raise CodecError if bytes are left in the header or the payload."""
        if self.at < len(self._header):
            raise CodecError(f"{len(self._header) - self.at} bytes follow the object")
        self._payload.finish()

    def _built(self, frame: _Frame) -> object:
        value = _BUILD[frame.tag](frame.items)
        return self._located(value) if _is_array(frame) else value

    def _located(self, array: object) -> object:
        return (
            array if self._locate is None else decoded("map_location failed", self._locate, array)
        )

    def _open(self, tag: Tag, hashed: bool) -> None:
        count = 2 if tag is Tag.OBJECT else self.unpack(tags.COUNT)[0]
        self._frames.append(_Frame(tag, count, hashed))
        self._nest(0)

    def _nest(self, levels: int) -> None:
        """Count a value with so many levels as a child of the innermost container."""
        if len(self._frames) + levels > tags.MAX_DEPTH:
            raise CodecError(f"the stream is nested deeper than {tags.MAX_DEPTH} levels")
        if self._frames:
            self._frames[-1].levels = max(self._frames[-1].levels, levels)

    def _refer(self, hashed: bool) -> object:
        number = self.unpack(tags.COUNT)[0]
        value = self._numbered[number]
        self._nest(self._levels[number])
        # A hash walks a shared structure once for each path to it: a short stream could have 2**60.
        if hashed and type(value) not in (str, bytes):
            raise CodecError("a key refers to a container")
        return value

    def number(self, value: T, levels: int = 0) -> T:
        """Give a value the next number; return the value."""
        self._numbered.append(value)
        self._levels.append(levels)
        return value

    def unpack(self, form: struct.Struct) -> tuple[Any, ...]:
        """Read fields with fixed sizes."""
        found = form.unpack_from(self._header, self.at)
        self.at += form.size
        return found

    def take(self, nbytes: int) -> bytes:
        """Read `nbytes` bytes; CodecError if fewer are left."""
        end = self.at + nbytes
        if end > len(self._header):
            raise CodecError(f"{nbytes} bytes are announced, {len(self._header) - self.at} follow")
        content, self.at = self._header[self.at : end], end
        return content

    def counted(self) -> bytes:
        """Read a length and as many bytes."""
        return self.take(self.unpack(tags.COUNT)[0])

    def dtype(self, code: int) -> DType:
        found = _DTYPES.get(code)
        if found is None:
            raise CodecError(f"no element type has the code {code}")
        return found

    def blob(self) -> Any:
        """Read a byte string from the payload."""
        return self._payload.take(self.unpack(tags.INT64)[0])

    def packed(self, dtype: type) -> list[object]:
        """Read a list of numbers from the payload."""
        numbers: list[Any] = self._payload.take(8 * self.unpack(tags.INT64)[0]).view(dtype).tolist()
        return numbers

    def array(self) -> object:
        code, ndim = self.unpack(tags.ARRAY)
        dtype = self.dtype(code)
        shape = [self.unpack(tags.INT64)[0] for _ in range(ndim)]
        if any(n < 0 for n in shape):
            raise CodecError(f"an array can't have the shape {shape}")
        elements = self._payload.take(prod(shape) * dtype.itemsize)
        if dtype is DType.BOOL and (elements > 1).any():
            raise CodecError("an array of truth values has others than 0 and 1")
        if elements.size * _MOST_WASTED < self._payload.nbytes:
            elements = elements.copy()
        array = elements.view(dtype.numpy).reshape(shape)
        inner = self._frames and _is_array(self._frames[-1])
        return array if inner else self._located(array)

    def scalar(self) -> object:
        dtype = self.dtype(self.take(1)[0])
        content = self.take(dtype.itemsize)
        if dtype is DType.BOOL and content[0] > 1:
            raise CodecError(f"a truth value is 0 or 1, not {content[0]}")
        return np.frombuffer(content, dtype.numpy)[0]


def _is_array(frame: _Frame) -> bool:
    """Return whether a frame's object has a type registered as an array, such as a tensor."""
    return frame.tag is Tag.OBJECT and codec_named(frame.items[0]).move is not None


def _distinct(found: C, count: int) -> C:
    if len(found) != count:
        raise CodecError(f"{count} keys or elements are announced, {len(found)} differ")
    return found


def _dict(items: list[Any]) -> dict[object, object]:
    count = len(items) // 2
    return _distinct(dict(zip(items[:count], items[count:], strict=True)), count)


def _object(items: list[Any]) -> object:
    name, state = items
    codec = codec_named(name)
    return decoded(f"the decoder of {codec.name!r} failed", codec.decode, state)


def decoded(failure: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return `function(*arguments)`; CodecError begins with `failure` if the call fails.

    For calls that may run the user's code, which may raise anything.
    """
    try:
        return function(*arguments)
    except CodecError:
        raise
    except raised_here(Exception) as error:
        raise CodecError(f"{failure}: {type(error).__name__}: {error}") from error


_BUILD: dict[int, Callable[[list[Any]], object]] = {
    Tag.LIST: lambda items: items,
    Tag.TUPLE: tuple,
    Tag.DICT: _dict,
    Tag.SET: lambda items: _distinct(set(items), len(items)),
    Tag.FROZENSET: lambda items: _distinct(frozenset(items), len(items)),
    Tag.OBJECT: _object,
}
_READ: dict[int, Callable[[_Decoder], object]] = {
    Tag.NONE: lambda d: None,
    Tag.FALSE: lambda d: False,
    Tag.TRUE: lambda d: True,
    Tag.INT8: lambda d: d.unpack(tags.INT8)[0],
    Tag.INT64: lambda d: d.unpack(tags.INT64)[0],
    Tag.BIG_INT: lambda d: int.from_bytes(d.counted(), "little", signed=True),
    Tag.FLOAT: lambda d: d.unpack(tags.FLOAT)[0],
    Tag.COMPLEX: lambda d: complex(*d.unpack(tags.COMPLEX)),
    Tag.TEXT: lambda d: d.number(str(d.counted(), "utf-8", "surrogatepass")),
    Tag.BYTES: lambda d: d.number(d.counted()),
    Tag.BYTE_ARRAY: lambda d: d.number(bytearray(d.counted())),
    Tag.BLOB: lambda d: d.number(d.blob().tobytes()),
    Tag.BLOB_ARRAY: lambda d: d.number(bytearray(d.blob())),
    Tag.FLOATS: lambda d: d.number(d.packed(np.float64)),
    Tag.INTS: lambda d: d.number(d.packed(np.int64)),
    Tag.ARRAY: lambda d: d.number(d.array()),
    Tag.SCALAR: _Decoder.scalar,
    Tag.DTYPE: lambda d: d.dtype(d.take(1)[0]).numpy,
}
