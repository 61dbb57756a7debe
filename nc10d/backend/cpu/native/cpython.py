"""Offsets inside NumPy's and CPython's objects that compiled code reads.

The offsets are found by searching objects with known contents, and checked on other objects. If
they are not as expected, importing this module (and so the engine) raises UnsupportedPlatform.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

import numpy as np

from nc10d.errors import UnsupportedPlatform
from nc10d.kernels.python_api import SIZE_OFFSET as SIZE_OFFSET
from nc10d.kernels.python_api import TYPE_OFFSET as TYPE_OFFSET

Array = np.ndarray[Any, np.dtype[Any]]
ITEMS_OFFSET = 24
"""Where a list keeps the address of the items (CPython: count, type, size, items)."""
TUPLE_OFFSET = 32 if sys.version_info >= (3, 14) else 24
"""Where a tuple keeps its items; since CPython 3.14 behind the hash."""
PLAIN_FLAGS = 0x0501
"""C-contiguous, aligned and writable: NPY_ARRAY_CARRAY in NumPy's C interface."""
_HEAD_WORDS = 10  # of an ndarray; no CPython build has a smaller object for one


def words_at(address: int, count: int) -> list[int]:
    """Return this many 8-byte integers from memory."""
    return list((ctypes.c_int64 * count).from_address(address))


def array_offsets(probe: Array) -> tuple[int, int, int, int] | None:
    """Return the offsets of data, dimensions, dtype and flags in `probe`; None if not found.

    The number of dimensions follows the data, then comes the address of their sizes; the flags
    follow the dtype.
    """
    words = words_at(id(probe), _HEAD_WORDS)
    if probe.ctypes.data not in words[:-2] or id(probe.dtype) not in words[:-1]:
        return None
    data, dtype = words.index(probe.ctypes.data), words.index(id(probe.dtype))
    good = (
        words[TYPE_OFFSET // 8] == id(type(probe))
        and words[data + 1] & 0xFFFFFFFF == probe.ndim
        and words_at(words[data + 2], probe.ndim) == list(probe.shape)
        and words[dtype + 1] & 0xFFFFFFFF == probe.flags.num
    )
    return (8 * data, 8 * data + 8, 8 * dtype, 8 * dtype + 8) if good else None


def list_is_known(probe: Sequence[object]) -> bool:
    """Return whether a list or tuple keeps its length and items where they are expected."""
    words = words_at(id(probe), 4)
    if words[TYPE_OFFSET // 8] != id(type(probe)) or words[SIZE_OFFSET // 8] != len(probe):
        return False  # before the fourth word is taken for an address
    first = id(probe) + TUPLE_OFFSET if type(probe) is tuple else words[ITEMS_OFFSET // 8]
    return words_at(first, len(probe)) == [id(x) for x in probe]


def _find() -> tuple[int, int, int, int]:
    frozen = np.zeros((2, 9), np.int16)
    frozen.flags.writeable = False
    probes: list[Array] = [np.zeros((3, 5, 7)), np.ones((4, 6), np.float32, order="F"), frozen]
    found = {array_offsets(probe) for probe in probes}
    (first, *others) = found
    some = [object(), object(), object()]
    if first is None or others or not (list_is_known(some) and list_is_known(tuple(some))):
        raise UnsupportedPlatform(
            f"the cpu backend reads objects of CPython and NumPy, and those of "
            f"{platform.python_implementation()} {platform.python_version()} with NumPy "
            f"{np.__version__} are laid out in a way that it does not know"
        )
    return first


DATA_OFFSET, DIMS_OFFSET, DTYPE_OFFSET, FLAGS_OFFSET = _find()


_LAYOUTS = {
    (3, 11): (56, 8, 32, 48),
    (3, 12): (56, 0, 0, 8),
    (3, 13): (72, -1, 0, 8),
    (3, 14): (72, -1, 0, 8),
}
FRAME, FRAME_BLOCK, FRAME_CODE, FRAME_OUTER = _LAYOUTS.get(sys.version_info[:2], (0, 0, 0, 0))
"""FRAME, in a thread's state: the innermost frame's address; if FRAME_BLOCK is not negative, the
address of a block with that address there. FRAME_CODE and FRAME_OUTER, in a frame: the code object,
and the calling frame."""
FRAME_INSTRUCTION = 56
"""In a frame: the current instruction."""
_INSIDE = 24  # in a frame object: the address of the frame itself


def first_instruction() -> tuple[int, int] | None:
    """Return the offset of the instructions in a code object; None if frames can't be read.

    The second number stands for a code object in frames without one: CPython puts such a frame
    between a function and the C code that calls that function. 0: this version has none.
    """
    known = sys.implementation.name == "cpython" and sys.version_info[:2] in _LAYOUTS
    return next(map(_look_at_frames, [None])) if known else None  # a call by C code


def _look_at_frames(_: None) -> tuple[int, int] | None:
    here = sys._getframe()
    outer = here.f_back
    if outer is None:
        return None
    state: int = _thread_state()
    inner, frame = _inside(here), _inside(outer)
    instruction = _word(frame + FRAME_INSTRUCTION)
    # The innermost frame is that of words_at, called by _word, called from here.
    innermost = _word(state + FRAME)
    if FRAME_BLOCK >= 0:
        innermost = _word(_word(state + FRAME) + FRAME_BLOCK)
    between = _word(inner + FRAME_OUTER)
    no_code = 0 if between == frame else _word(between + FRAME_CODE)
    good = (
        _word(_word(innermost + FRAME_OUTER) + FRAME_OUTER) == inner
        and _word(inner + FRAME_CODE) == id(here.f_code)
        and (between == frame or _word(between + FRAME_OUTER) == frame)
        and _word(frame + FRAME_CODE) == id(outer.f_code)
    )
    found = (instruction - id(outer.f_code) - outer.f_lasti, no_code) if good else None
    del here, outer  # a frame that refers to itself keeps all its callers' variables alive
    return found


def _inside(frame: FrameType) -> int:
    return _word(id(frame) + _INSIDE)


def _word(address: int) -> int:
    return words_at(address, 1)[0]


_thread_state = ctypes.pythonapi.PyGILState_GetThisThreadState
_thread_state.restype = ctypes.c_int64
