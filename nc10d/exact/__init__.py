"""Sums over all ranks with the same bits for any partition, any order and any world size.

    total = nc10d.exact.sum(x)
    length = nc10d.exact.norm(gradient)

Common to all calls:

- Results are Python floats: the exact result, rounded once to float64, to the nearest, ties to
  even. That holds for every dtype; rounding to float32 afterwards is a second rounding.
- Arrays are host arrays from any library, with any shape and strides; those that are not
  C-contiguous are copied first. They hold float64, float32, float16, bfloat16 or 8-bit floats;
  TypeError for others. Ints need no such calls: SUM has the same bits in any order.
- All ranks pass the same dtype. Shapes may differ between ranks. Arrays may be empty; the exact sum
  is 0.0 without any element.
- No intermediate result overflows or underflows: 1e308 + 1e308 - 1e308 is 1e308. A result is
  infinite if the exact result is too large for a float64, or if elements are infinite.
- NaN among the elements, inf - inf and inf * 0 give NaN, with the bits in `math.nan`.
- An exact zero is 0.0, also for elements that are all -0.0. A result that is rounded to zero keeps
  its sign.
- `group` is as in `nc10d.functional`; None is the default group. Calls block, and are not possible
  in a coalescing block (ValueError). Ranks whose calls differ get a CollectiveMismatch.
- If the thread flushes subnormal numbers to zero, as after torch.set_flush_denormal(True), a call
  is a FloatingPointError.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from nc10d.api.functional import GroupLike, find_group
from nc10d.arrays.buffer import Buffer, as_buffer
from nc10d.arrays.dtypes import ElementKind
from nc10d.kernels.exact.exact_sums import COUNTS, LAYOUTS, LIMB, exact_kernel
from nc10d.ops import SUM, Array

_SMALLEST_NORMAL = 2.0**-1022


def sum(x: Array, group: GroupLike = None) -> float:
    """Add all elements in all ranks' `x`."""
    return _rounded(_quotient, *_words("sum", group, x))


def mean(x: Array, group: GroupLike = None) -> float:
    """Divide the sum by the number of all ranks' elements, rounded once; NaN if there are none."""
    return _rounded(_mean, *_words("mean", group, x))


def dot(x: Array, y: Array, group: GroupLike = None) -> float:
    """Add the products x[i] * y[i] of all ranks; no product is rounded.

    A rank's arrays have equal shapes, else ValueError, and dtypes, else TypeError.
    """
    return _rounded(_quotient, *_words("dot", group, x, y))


def norm(x: Array, group: GroupLike = None) -> float:
    """Return the root of all squares' sum, rounded once; no square is too large."""
    return _rounded(_root, *_words("norm", group, x, x))


def _words(name: str, group: GroupLike, x: Array, y: Array | None = None) -> tuple[list[int], int]:
    """Add all ranks' elements, or products; return the sum's words and its unit's exponent."""
    if _SMALLEST_NORMAL * 0.5 == 0.0:  # flushed as a result, or by the comparison
        raise FloatingPointError(
            f"exact.{name}: this thread flushes subnormal numbers to zero, so no sum is exact; end "
            "that by torch.set_flush_denormal(False), or by clearing FTZ and DAZ in MXCSR"
        )
    found = find_group(group)
    found.refuse_in_batch(f"exact.{name}")
    first = _host_buffer(name, x)
    last = first if y is None or y is x else _host_buffer(name, y)
    if first.shape != last.shape:
        raise ValueError(f"exact.{name}: shapes differ: {first.shape} and {last.shape}")
    if first.dtype is not last.dtype:
        raise TypeError(f"exact.{name}: dtypes differ: {first.dtype.label}, {last.dtype.label}")
    layout = LAYOUTS[first.dtype, y is not None]
    words = np.zeros(layout.limbs + COUNTS, np.int64)
    exact_kernel(layout)(words.ctypes.data, first.address, last.address, first.count)
    found.all_reduce(words, SUM.meant_for(f"exact.{name} of {first.dtype.label}"))
    return words.tolist(), layout.lowest


def _rounded(finish: Callable[[int, int, int], float], words: list[int], lowest: int) -> float:
    """Return finish(sum, 1, count), where the sum and 1 count units, 2**lowest."""
    *limbs, nans, infinite, negative, count = words
    if nans or (infinite and negative):
        return math.nan
    if infinite or negative:
        return math.inf if infinite else -math.inf
    units = 0
    for limb in reversed(limbs):
        units = (units << LIMB) + limb
    try:
        return finish(units, 1 << -lowest, count)
    except OverflowError:
        return math.inf if units > 0 else -math.inf


def _quotient(units: int, one: int, _count: int) -> float:
    return units / one  # ints: rounded once, also if the result is subnormal


def _mean(units: int, one: int, count: int) -> float:
    return units / (one * count) if count else math.nan


def _root(units: int, one: int, _count: int) -> float:
    # The root's first 64 bits, and a last bit that is set if more follow, round like the root.
    more = max(0, 64 - units.bit_length() // 2)
    square = units << 2 * more
    root = math.isqrt(square)
    return (2 * root + (root * root < square)) / (math.isqrt(one) << more + 1)


def _host_buffer(name: str, x: Array) -> Buffer:
    """Return an array's memory, or that of a contiguous copy; TypeError for other arrays."""
    buffer = as_buffer(x)
    if buffer.dtype.family is not ElementKind.FLOAT:
        hint = "all_reduce with SUM has the same bits in any order for ints"
        raise TypeError(f"exact.{name} is for floats, not {buffer.dtype.label} ({hint})")
    if buffer.device != "cpu":
        raise TypeError(f"exact.{name} is for host arrays: copy this from {buffer.device} first")
    return buffer if buffer.contiguous else as_buffer(np.ascontiguousarray(buffer.as_numpy()))
