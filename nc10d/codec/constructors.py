"""The two functions that the stream of a plain object may call: `array_from` and `object_from`.

By them small arrays, NumPy's scalars and values of registered types are parts of plain objects.
nc10d.codec.opcodes refuses a stream that names another function, or does anything else with these
than to call them. Their arguments come from a peer, so they are checked here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from math import prod
from pickle import Unpickler
from typing import Any

import numpy as np

from nc10d.arrays.dtypes import DType, dtype_of
from nc10d.codec.decoder import Array, Locate, call_user
from nc10d.codec.standard_types import codec_by_name
from nc10d.codec.type_registry import codec_named, codec_of
from nc10d.errors import CodecError

MOST_BYTES = 4096
"""The bytes of a small array at most. A stream would be a second copy of a larger one."""
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
    codec = codec_of(kind) or codec_by_name(kind)
    if codec is None:
        return None
    if codec.move is None:
        return object_from, (codec.name, codec.encode(value))
    nbytes = getattr(value, "nbytes", None)
    if type(nbytes) is not int or nbytes > MOST_BYTES:  # before it is copied from a device
        return None
    state = codec.encode(value)
    if type(state) is not np.ndarray or state.nbytes > MOST_BYTES:
        return None
    return array_from, (*_arguments(state, state.shape), codec.name)


def _arguments(value: Any, shape: Any) -> tuple[Any, ...]:
    # The receiver's array has the bytearray as its memory: there is no other copy.
    return dtype_of(value.dtype).code, shape, bytearray(value.tobytes())


def array_from(code: Any, shape: Any, content: Any, name: Any = None, locate: Locate = None) -> Any:
    """Return an array of the dtype of a code in the memory of `content`; a scalar without `shape`.

    With a `name` it is the value of this registered type of arrays. `locate(it)` replaces it.
    CodecError for other arguments.
    """
    # These may be tuples that are very long to hash, or to put into words.
    if type(code) is not int or type(content) is not bytearray:
        raise CodecError("an array comes as the code of its dtype, its shape and its bytes")
    array: Any = _array(code, () if shape is None else shape, content)
    if shape is None:
        return array[()]
    if name is not None:
        codec = codec_named(name)
        if codec.move is None:
            raise CodecError(f"{name!r} is no type of arrays")
        array = call_user(f"the decoder of {name!r}", codec.decode, array)
    return array if locate is None else call_user("map_location", locate, array)


def _array(code: int, shape: Any, content: bytearray) -> Array:
    dtype, itemsize = _element_type(code)
    if type(shape) is not tuple or len(shape) > _MOST_DIMENSIONS or set(map(type, shape)) - {int}:
        raise CodecError(f"an array's shape is a tuple of at most {_MOST_DIMENSIONS} ints")
    if prod(shape) * itemsize != len(content):
        raise CodecError(f"an array of the shape {shape} has other bytes than these")
    if dtype.kind == "b" and content.strip(b"\0\1"):
        raise CodecError("an array of truth values has others than 0 and 1")
    return np.ndarray(shape, dtype, content)


@lru_cache(len(DType))
def _element_type(code: int) -> tuple[np.dtype[Any], int]:
    for found in DType:
        if found.code == code:
            return found.numpy, found.itemsize
    raise CodecError(f"no element type has the code {code}")


def object_from(name: Any, state: Any) -> Any:
    """Return the value of a registered type that has a state; CodecError if it has none."""
    codec = codec_named(name)
    if codec.move is not None:
        raise CodecError(f"{name!r} is a type of arrays")
    return call_user(f"the decoder of {name!r}", codec.decode, state)


FUNCTIONS = array_from, object_from


class LocatingUnpickler(Unpickler):
    """Reads the checked stream of a plain object, and replaces its arrays by `locate(array)`."""

    def __init__(self, file: Any, locate: Locate) -> None:
        super().__init__(file)
        self._locate = locate

    def find_class(self, module: str, name: str) -> Any:
        """Return one of FUNCTIONS: a checked stream names nothing else."""
        return object_from if name == "object_from" else partial(array_from, locate=self._locate)
