"""Small arrays in plain objects: the pickle has a call of `array_from` for each array.

NumPy's scalars, and values of registered array types such as torch's tensors, have such calls too.
nc10d.codec.opcodes refuses a stream that names another function, or that uses this one other than
in a call. The arguments come from a peer, so `array_from` checks them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from nc10d.arrays.dtypes import DType, dtype_of
from nc10d.codec.decoder import Array, Locate, decoded
from nc10d.codec.type_registry import codec_named, codec_of
from nc10d.errors import CodecError

MOST_BYTES = 4096
"""The most bytes in a small array. A stream would be a second copy of a larger array."""
_MOST_DIMENSIONS = 64  # NumPy's

Call = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function and its arguments, as a pickler wants them."""


def call_for(value: Any) -> Call | None:
    """Return the call that makes a value from plain objects, None if there is none.

    A registered type's function for that may raise anything.
    """
    kind = type(value)
    if kind is np.ndarray:
        return None if value.nbytes > MOST_BYTES else (array_from, _arguments(value, value.shape))
    if isinstance(value, np.generic):
        return array_from, _arguments(value, None)
    codec = codec_of(kind)
    if codec is None or codec.move is None:
        return None
    # A large tensor must not be copied from its device here: the walk does that.
    nbytes = getattr(value, "nbytes", None)
    if type(nbytes) is not int or nbytes > MOST_BYTES:
        return None
    state = codec.encode(value)
    if type(state) is not np.ndarray or state.nbytes > MOST_BYTES:
        return None
    return array_from, (*_arguments(state, state.shape), codec.name)


def _arguments(value: Any, shape: Any) -> tuple[Any, ...]:
    return dtype_of(value.dtype).code, shape, value.tobytes()


def array_from(code: object, shape: object, content: object, name: object = None) -> Any:
    """Return an array with these bytes and the dtype with this code; a scalar without `shape`.

    With a `name` the result has the registered array type of that name. Inside a `located` block,
    `locate(array)` replaces the array. CodecError for arguments that no sender gives.
    """
    locate = _decoding.locate
    if locate is None:
        return _value(code, shape, content, name)
    with located(None):  # the user's functions may decode other objects
        value = _value(code, shape, content, name)
        return value if shape is None else decoded("map_location failed", locate, value)


def _value(code: object, shape: object, content: object, name: object) -> object:
    # Arguments may be tuples that are very long to hash, or to put into words.
    if type(code) is not int or type(content) is not bytes or len(content) > MOST_BYTES:
        raise CodecError("an array comes as the code of its dtype, its shape and its bytes")
    if shape is None:
        return _array(code, (), content)[()]
    array = _array(code, shape, content)
    if name is None:
        return array
    codec = codec_named(name)
    if codec.move is None:
        raise CodecError(f"{name!r} is no type of arrays")
    return decoded(f"the decoder of {name!r} failed", codec.decode, array)


def _array(code: int, shape: object, content: bytes) -> Array:
    dtype, itemsize = _element_type(code)
    if type(shape) is not tuple or len(shape) > _MOST_DIMENSIONS or set(map(type, shape)) - {int}:
        raise CodecError(f"an array's shape is a tuple of at most {_MOST_DIMENSIONS} ints")
    if not 0 <= min(shape, default=0) <= max(shape, default=0) < 1 << 63:  # before a product
        raise CodecError("an array's shape has a negative or a very large int")
    if prod(shape) * itemsize != len(content):
        raise CodecError(f"an array of the shape {shape} has other bytes than these")
    if dtype.kind == "b" and content.strip(b"\0\1"):
        raise CodecError("an array of truth values has others than 0 and 1")
    # A copy: the bytes may be another part of the object as well.
    return np.ndarray(shape, dtype, content).copy()


@lru_cache(len(DType))
def _element_type(code: int) -> tuple[np.dtype[Any], int]:
    for found in DType:
        if found.code == code:
            return found.numpy, found.itemsize
    raise CodecError(f"no element type has the code {code}")


class _Decoding(threading.local):
    """What is being decoded in this thread."""

    locate: Locate = None


_decoding = _Decoding()


class located:
    """In the with-block, `array_from` returns `locate(array)` for each array."""

    # `locate` is no argument of `array_from`, because a stream could then give one. Nor is it an
    # attribute in a subclass of pickle.Unpickler: that reads from a file, and from a file CPython
    # reads other bytes than from memory if a frame ends within an opcode.

    __slots__ = ("_locate", "_outer")

    def __init__(self, locate: Locate) -> None:
        self._locate = locate

    def __enter__(self) -> None:
        """Begin the block."""
        self._outer, _decoding.locate = _decoding.locate, self._locate

    def __exit__(self, *_: object) -> None:
        """End the block."""
        _decoding.locate = self._outer
