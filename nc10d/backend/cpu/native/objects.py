"""Where NumPy and CPython keep what compiled code reads out of their objects.

The places are found by looking at objects that are known, and looked up again on others. Where
they are not as expected, importing this module (and so the engine) is an UnsupportedPlatform.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Sequence
from typing import Any

import numpy as np

from nc10d.errors import UnsupportedPlatform

Array = np.ndarray[Any, np.dtype[Any]]
TYPE_OFFSET = 8
"""Where every object keeps its type (CPython: count of references, type)."""
LIST_ITEMS_OFFSET = 24
"""Where a list keeps the address of its items (CPython: count, type, size, items)."""
PLAIN_FLAGS = 0x0501
"""C-contiguous, aligned and writable: NPY_ARRAY_CARRAY of NumPy's C interface."""
_HEAD_WORDS = 10  # of an ndarray; no build of CPython has a smaller object for one


def words_at(address: int, count: int) -> list[int]:
    """Return this many 8-byte integers from memory."""
    return list((ctypes.c_int64 * count).from_address(address))


def array_offsets(probe: Array) -> tuple[int, int, int, int] | None:
    """Return where `probe` keeps its data, its dimensions, its dtype and its flags; None if lost.

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
    """Say whether a list keeps its items where LIST_ITEMS_OFFSET says."""
    words = words_at(id(probe), 4)
    if words[TYPE_OFFSET // 8] != id(list) or words[2] != len(probe):
        return False  # before its fourth word is taken for an address
    return words_at(words[LIST_ITEMS_OFFSET // 8], len(probe)) == [id(x) for x in probe]


def _find() -> tuple[int, int, int, int]:
    frozen = np.zeros((2, 9), np.int16)
    frozen.flags.writeable = False
    probes: list[Array] = [np.zeros((3, 5, 7)), np.ones((4, 6), np.float32, order="F"), frozen]
    found = {array_offsets(probe) for probe in probes}
    (first, *others) = found
    if first is None or others or not list_is_known([object(), object(), object()]):
        raise UnsupportedPlatform(
            f"the cpu backend reads objects of CPython and NumPy, and those of "
            f"{platform.python_implementation()} {platform.python_version()} with NumPy "
            f"{np.__version__} are laid out in a way that it does not know"
        )
    return first


DATA_OFFSET, DIMS_OFFSET, DTYPE_OFFSET, FLAGS_OFFSET = _find()
