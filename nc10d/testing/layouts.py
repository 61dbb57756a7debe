"""An array's memory layouts, with guard bytes all around that show writes beside the elements.

`lay(x, layout)` copies `x` into separate memory. `intact(view)` returns whether every byte in
that memory that belongs to no element is unchanged: before, behind and between the elements.

>>> import numpy as np
>>> x = lay(np.arange(6.0).reshape(2, 3), "transposed")
>>> x.flags.c_contiguous, intact(x)
(False, True)
>>> x.base[0] = 0  # a byte in front of the first element
>>> intact(x)
False
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
GUARD = 64
FILL = 0xA5
Strides = tuple[int, ...]


def lay(x: Array, layout: str = "plain") -> Array:
    """Return a copy of `x`, with the same shape and dtype, in the layout with this name."""
    offset, strides, length = _LAYOUTS[layout](x)
    memory = np.full(length + 2 * GUARD, FILL, np.uint8)
    view: Array = np.ndarray(x.shape, x.dtype, memory, GUARD + offset, strides)
    view[...] = x
    return view


def intact(view: Array) -> bool:
    """Return whether only the elements of an array from `lay` were written."""
    memory = view.base
    assert isinstance(memory, np.ndarray), "not an array made by lay()"
    rest = memory.copy()
    offset = view.ctypes.data - memory.ctypes.data
    shape, strides = (*view.shape, view.itemsize), (*view.strides, 1)
    np.ndarray(shape, np.uint8, rest, offset, strides)[...] = FILL
    return bool((rest == FILL).all())


def _packed(x: Array) -> Strides:
    return tuple(x.itemsize * prod(x.shape[axis + 1 :]) for axis in range(x.ndim))


_LAYOUTS: dict[str, Callable[[Array], tuple[int, Strides, int]]] = {
    "plain": lambda x: (0, _packed(x), x.nbytes),
    "misaligned": lambda x: (1, _packed(x), x.nbytes + 1),
    "strided": lambda x: (0, tuple(3 * step for step in _packed(x)), 3 * x.nbytes),
    "reversed": lambda x: (
        x.nbytes - x.itemsize if x.size else 0,
        tuple(-step for step in _packed(x)),
        x.nbytes,
    ),
    "transposed": lambda x: (0, tuple(reversed(_packed(x.transpose()))), x.nbytes),
}
"""By layout: the first element's offset, the strides, and the memory's length in bytes."""
LAYOUTS = tuple(_LAYOUTS)
