"""Encode an object as a message: a walk without recursion that writes the header.

A plain value is written at once. A container opens a frame: its head is written, then the children.
After the last child the container gets a number, by which later occurrences refer to it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from nc10d.arrays.dtypes import DType, dtype_of
from nc10d.base.callable_values import CallableInt, CallableStr
from nc10d.codec import tags
from nc10d.codec.decoder import Array
from nc10d.codec.messages import EncodedMessage, MessageKind
from nc10d.codec.plain import encode_plain
from nc10d.codec.standard_types import codec_by_name
from nc10d.codec.tags import Tag
from nc10d.codec.type_registry import codec_of
from nc10d.errors import CodecError


def encode(value: object) -> EncodedMessage:
    """Return a value's message, which refers to the value's arrays and does not copy them.

    CodecError for an unsupported type (the message names it), for an object with arrays or
    registered types that contains itself, and for nesting deeper than MAX_DEPTH. A registered
    type's own function may raise anything.
    """
    stream = encode_plain(value)
    return walk(value) if stream is None else EncodedMessage(MessageKind.PLAIN, stream)


def walk(value: object) -> EncodedMessage:
    """Return the message for a value that need not be plain; errors are as in `encode`."""
    encoder = _Encoder()
    encoder.walk(value)
    return EncodedMessage(MessageKind.CODEC, bytes(encoder.header), encoder.chunks)


class _Frame:
    """A value whose children are being written; the first `hashed` children are parts of keys.

    `levels` is the nesting below it, so far.
    """

    __slots__ = ("children", "hashed", "levels", "taken", "value")

    def __init__(self, value: object, children: Iterator[object], hashed: int) -> None:
        self.value = value
        self.children = children
        self.hashed = hashed
        self.taken = self.levels = 0


class _Encoder:
    """The state of encoding a message."""

    def __init__(self) -> None:
        self.header = bytearray()
        self.chunks: list[Array] = []
        # By id, each written value's number and levels, and the value itself, which keeps the id
        # valid.
        self._seen: dict[int, tuple[int, object, int]] = {}
        self._frames: list[_Frame] = []
        self._count = 0
        self._open: set[int] = set()

    def walk(self, value: object) -> None:
        """Write a value and everything inside."""
        frames = self._frames = [_Frame(None, iter((value,)), 0)]
        while frames:
            frame = frames[-1]
            for child in frame.children:
                frame.taken += 1
                inner = self._put(child, frame.taken <= frame.hashed)
                if inner is not None:
                    frames.append(inner)
                    self._nest(0)
                    break
            else:
                frames.pop()
                self._close(frame)

    def _nest(self, levels: int) -> None:
        """Count a value with so many levels as a child of the innermost frame."""
        if len(self._frames) - 1 + levels > tags.MAX_DEPTH:
            raise CodecError(f"the object is nested deeper than {tags.MAX_DEPTH} levels")
        self._frames[-1].levels = max(self._frames[-1].levels, levels)

    def _put(self, value: Any, hashed: bool) -> _Frame | None:
        """Write a value; for a container, write its head and return the children's frame."""
        kind = type(value)
        write = _PLAIN.get(kind)
        if write is not None:
            write(self, value)
            return None
        if self._refer(value, hashed):
            return None
        write = _NUMBERED.get(kind)
        if write is not None:
            write(self, value)
            self._number(value)
            return None
        if kind is list and len(value) >= tags.PACKED and self._packed(value):
            self._number(value)
            return None
        if kind in _CONTAINERS or (write := _writer_for_numpy(kind)) is None:
            return self._open_frame(value, kind, hashed)
        write(self, value)
        return None

    def _refer(self, value: object, hashed: bool) -> bool:
        """Write a reference if the value was written before; return whether one was written."""
        seen = self._seen.get(id(value))
        if seen is None or (hashed and type(value) not in (str, bytes)):
            return False
        self.tagged(Tag.REF, tags.COUNT.pack(seen[0]))
        self._nest(seen[2])
        return True

    def _packed(self, value: list[Any]) -> bool:
        """Write a list of only floats, or only 64-bit ints, as a chunk; return whether it did."""
        found = _PACKS.get(type(value[0]))
        if found is None or len(set(map(type, value))) > 1:
            return False
        tag, dtype = found
        try:
            chunk = np.array(value, dtype)
        except OverflowError:
            return False
        self.tagged(tag, tags.INT64.pack(len(value)))
        self.chunks.append(chunk)
        return True

    def _number(self, value: object, levels: int = 0) -> None:
        self._seen[id(value)] = (self._count, value, levels)
        self._count += 1

    def _open_frame(self, value: Any, kind: type, hashed: bool) -> _Frame:
        if id(value) in self._open:
            raise CodecError(f"a {kind.__name__} contains itself, which can't be carried")
        tag = _CONTAINERS.get(kind)
        if tag is not None:
            count = len(value)
            children = iter(value) if tag is not Tag.DICT else iter([*value, *value.values()])
            self.tagged(tag, _length(count))
        else:
            tag, count = Tag.OBJECT, 2
            children = iter(_state(value, kind))
            self.header.append(tag)
        self._open.add(id(value))
        return _Frame(value, children, tags.hashed_children(tag, count, hashed))

    def _close(self, frame: _Frame) -> None:
        self._open.discard(id(frame.value))
        self._number(frame.value, frame.levels + 1)
        if self._frames:
            self._nest(frame.levels + 1)

    def tagged(self, tag: Tag, content: bytes) -> None:
        self.header.append(tag)
        self.header += content


def _length(count: int) -> bytes:
    if count > tags.LARGEST_COUNT:
        raise CodecError(f"{count} items or bytes are more than a header has room for")
    return tags.COUNT.pack(count)


def _state(value: Any, kind: type) -> Sequence[object]:
    """Return the name and state of a value with a registered type; CodecError for other types."""
    codec = codec_of(kind) or codec_by_name(kind)
    if codec is None:
        how = "register the type (nc10d.register_dataclass, nc10d.register_type)"
        if hasattr(kind, "state_dict"):
            how = "send its state_dict()"
        elif kind.__module__.partition(".")[0] == "torch" and "nc10d.torch" not in sys.modules:
            how = "import nc10d.torch on all ranks"
        raise CodecError(
            f"objects of type {kind.__module__}.{kind.__qualname__} can't be carried: {how}, or "
            "call with allow_pickle=True or set NC10D_ALLOW_PICKLE=1 on all ranks"
        )
    return codec.name, codec.encode(value)


# Writers of values without children


def _int(encoder: _Encoder, value: int) -> None:
    if -128 <= value < 128:
        encoder.tagged(Tag.INT8, tags.INT8.pack(value))
    elif -(2**63) <= value < 2**63:
        encoder.tagged(Tag.INT64, tags.INT64.pack(value))
    else:
        size = value.bit_length() // 8 + 1
        encoder.tagged(Tag.BIG_INT, _length(size) + value.to_bytes(size, "little", signed=True))


def _text(encoder: _Encoder, value: str) -> None:
    content = value.encode("utf-8", "surrogatepass")
    encoder.tagged(Tag.TEXT, _length(len(content)) + content)


def _byte_string(inline: Tag, blob: Tag) -> Callable[[_Encoder, Any], None]:
    def write(encoder: _Encoder, value: Any) -> None:
        if len(value) <= tags.INLINE:
            encoder.tagged(inline, _length(len(value)) + value)
        else:
            encoder.tagged(blob, tags.INT64.pack(len(value)))
            encoder.chunks.append(np.frombuffer(value, np.uint8))

    return write


def _dtype(dtype: np.dtype[Any]) -> DType:
    try:
        return dtype_of(dtype)
    except TypeError:
        message = f"NumPy's {dtype} can't be carried: only the dtypes of the collectives are"
        raise CodecError(f"{message}, in this machine's byte order") from None


def _array(encoder: _Encoder, value: Array) -> None:
    head = tags.ARRAY.pack(_dtype(value.dtype).code, value.ndim)
    encoder.tagged(Tag.ARRAY, head + b"".join(tags.INT64.pack(n) for n in value.shape))
    encoder.chunks.append(value)


def _scalar(encoder: _Encoder, value: np.generic) -> None:
    encoder.tagged(Tag.SCALAR, bytes([_dtype(value.dtype).code]) + value.tobytes())


def _dtype_object(encoder: _Encoder, value: np.dtype[Any]) -> None:
    encoder.tagged(Tag.DTYPE, bytes([_dtype(value).code]))


_Writer = Callable[[_Encoder, Any], None]


def _writer_for_numpy(kind: type[object]) -> _Writer | None:
    """Return and cache the writer for a type of NumPy scalars or dtypes; None for others."""
    if not issubclass(kind, (np.generic, np.dtype)):
        return None
    _PLAIN[kind] = _scalar if issubclass(kind, np.generic) else _dtype_object
    return _PLAIN[kind]


_PLAIN: dict[type, _Writer] = {
    type(None): lambda e, _: e.header.append(Tag.NONE),
    bool: lambda e, value: e.header.append(Tag.TRUE if value else Tag.FALSE),
    int: _int,
    CallableInt: _int,
    float: lambda e, value: e.tagged(Tag.FLOAT, tags.FLOAT.pack(value)),
    complex: lambda e, value: e.tagged(Tag.COMPLEX, tags.COMPLEX.pack(value.real, value.imag)),
}
_NUMBERED: dict[type, _Writer] = {
    str: _text,
    CallableStr: _text,
    bytes: _byte_string(Tag.BYTES, Tag.BLOB),
    bytearray: _byte_string(Tag.BYTE_ARRAY, Tag.BLOB_ARRAY),
    np.ndarray: _array,
}
_PACKS: dict[type, tuple[Tag, type[np.generic]]] = {
    float: (Tag.FLOATS, np.float64),
    int: (Tag.INTS, np.int64),
}
_CONTAINERS: dict[type, Tag] = {
    list: Tag.LIST,
    tuple: Tag.TUPLE,
    dict: Tag.DICT,
    set: Tag.SET,
    frozenset: Tag.FROZENSET,
}
