"""Sums over all ranks with the same bits for any partition, order and number of ranks.

    total = nc10d.exact.sum(x)          # as if one rank had all elements and rounded once
    length = nc10d.exact.norm(gradient)

Common to all calls:

- Results are Python floats: the exact result, rounded once to float64, to the nearest, ties to
  even. That holds for every dtype: rounding to float32 afterwards rounds a second time.
- Arrays are host arrays of any library, of any shape and strides, with any floats: float64,
  float32, float16, bfloat16, 8-bit floats. TypeError for others: SUM of ints has the same bits in
  any order; complex arrays have a real and an imaginary part; device arrays are to be copied.
  Contiguous float32 and float64 arrays are fastest.
- Shapes may differ between ranks, and may be empty. The exact sum of nothing is 0.0.
- No intermediate result overflows or underflows: 1e308 + 1e308 - 1e308 is 1e308. A result is
  infinite if the exact one is too large for a float64, or if there are infinite elements.
- NaN among the elements, inf - inf and inf * 0 give NaN, with the bits of `math.nan`.
- An exact zero is 0.0, also for elements that are all -0.0. A result that is rounded to zero keeps
  its sign.
- `group` is what `nc10d.functional` takes; None is the default group. Calls block, and all ranks
  make the same calls: others are a CollectiveMismatch.
- Where the program flushes subnormal numbers to zero, as torch.set_flush_denormal(True) does, a
  call is a FloatingPointError.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nc10d import ops
from nc10d.api.functional import GroupLike, find_group
from nc10d.arrays.buffer import as_buffer
from nc10d.arrays.dtypes import DType, ElementKind
from nc10d.kernels import exact_sums
from nc10d.ops import Array

_TINY, _SMALLEST_NORMAL = 2.0**-1074, 2.0**-1022
_BUFFERED = 1 << 16
"""Elements of an array that are converted, or made contiguous, at a time."""
_WHY_NOT = {
    ElementKind.BOOL: "truth values: count them by all_reduce of an int",
    ElementKind.INT: "ints: all_reduce with SUM has the same bits in any order",
    ElementKind.UINT: "ints: all_reduce with SUM has the same bits in any order",
    ElementKind.COMPLEX: "complex numbers: pass x.real and x.imag",
    ElementKind.RECORD: "records: pass a field",
}


def sum(x: Array, group: GroupLike = None) -> float:  # noqa: A001  (NumPy's and torch's name)
    """Return the sum of all elements of all ranks' `x`."""
    return _sum("sum", group, x).rounded()


def mean(x: Array, group: GroupLike = None) -> float:
    """Return the sum of all elements of all ranks' `x`, divided by their number, rounded once.

    NaN if there are none.
    """
    total = _sum("mean", group, x)
    return total.rounded(total.count) if total.count else math.nan


def dot(x: Array, y: Array, group: GroupLike = None) -> float:
    """Return the sum of all products x[i] * y[i] of all ranks; no product is rounded.

    A rank's arrays have the same shape, else ValueError, and the same dtype, else TypeError.
    """
    return _sum("dot", group, x, y).rounded()


def norm(x: Array, group: GroupLike = None) -> float:
    """Return the square root of the sum of all elements' squares, rounded once.

    Squares neither overflow nor underflow: only a norm of 2**1024 or more is infinite.
    """
    return _sum("norm", group, x, x).root()


@dataclass(frozen=True, slots=True)
class _Sum:
    """The exact sum `units` * 2**`lowest` of `count` numbers; or NaN or infinity in `special`."""

    units: int
    lowest: int
    count: int
    special: float | None

    def rounded(self, parts: int = 1) -> float:
        """Return the sum divided by `parts`."""
        if self.special is not None:
            return self.special
        return _quotient(self.units, parts << -self.lowest)

    def root(self) -> float:
        """Return the square root."""
        if self.special is not None:
            return self.special
        # 64 bits of the root, and one that says whether there are more, round like the root.
        more = max(0, 64 - self.units.bit_length() // 2)
        square = self.units << 2 * more
        root = math.isqrt(square)
        return _quotient(2 * root + (root * root < square), 2 << more - self.lowest // 2)


def _quotient(numerator: int, denominator: int) -> float:
    """Return the quotient of two ints, rounded once (as Python's `/` is); infinite if too large."""
    try:
        return numerator / denominator
    except OverflowError:
        return math.inf if numerator > 0 else -math.inf


def _sum(name: str, group: GroupLike, *arrays: Array) -> _Sum:
    """Return the sum over all ranks of an array's elements, or of two arrays' products."""
    if _TINY * 1.0 == 0.0 or _SMALLEST_NORMAL * 0.5 == 0.0:
        raise FloatingPointError(
            f"exact.{name}: this thread flushes subnormal numbers to zero, so that sums are not "
            "exact: call torch.set_flush_denormal(False), or clear FTZ and DAZ in MXCSR"
        )
    found = find_group(group)
    hosts = [_host_array(name, x) for x in arrays]
    if hosts[0].shape != hosts[-1].shape:
        raise ValueError(f"exact.{name}: shapes differ: {hosts[0].shape} and {hosts[-1].shape}")
    if hosts[0].dtype != hosts[-1].dtype:
        raise TypeError(f"exact.{name}: dtypes differ: {hosts[0].dtype} and {hosts[-1].dtype}")
    wide = DType.FLOAT64 if hosts[0].dtype == np.float64 else DType.FLOAT32
    layout = exact_sums.LAYOUTS[wide, len(hosts) > 1]
    words = np.zeros(layout.words, np.int64)
    add = exact_sums.exact_kernel(layout)
    for pieces in _pieces(hosts, wide.numpy):
        first, last = pieces[0], pieces[-1]
        add(words.ctypes.data, first.ctypes.data, last.ctypes.data, first.size)
    found.all_reduce(words, ops.SUM.meant_for(f"exact.{name} of {wide.label}"))
    return _value(words.tolist(), layout.lowest)


def _host_array(name: str, x: Array) -> npt.NDArray[Any]:
    buffer = as_buffer(x)
    if buffer.dtype.family is not ElementKind.FLOAT:
        raise TypeError(f"exact.{name} is for floats, not for {_WHY_NOT[buffer.dtype.family]}")
    if buffer.device != "cpu":
        raise TypeError(f"exact.{name} is for host arrays: copy this from {buffer.device} first")
    return buffer.as_numpy()


def _pieces(
    hosts: list[npt.NDArray[Any]], dtype: np.dtype[Any]
) -> Iterator[tuple[npt.NDArray[Any], ...]]:
    """Yield contiguous pieces of `dtype`: views where the arrays are like that."""
    if all(x.flags.c_contiguous and x.dtype == dtype for x in hosts):
        flat = [x.reshape(-1) for x in hosts]
        for start in range(0, hosts[0].size, exact_sums.MOST_ELEMENTS):
            yield tuple(x[start : start + exact_sums.MOST_ELEMENTS] for x in flat)
        return
    flags = ("external_loop", "buffered", "zerosize_ok")
    options = {"casting": "unsafe", "order": "K", "buffersize": _BUFFERED}
    each = [["readonly", "contig"]] * len(hosts)
    for piece in np.nditer(hosts, flags, each, [dtype] * len(hosts), **options):
        yield piece if isinstance(piece, tuple) else (piece,)


def _value(words: list[int], lowest: int) -> _Sum:
    """Return what all ranks' words stand for."""
    *limbs, nans, infinities, negative, count = words
    units = 0
    for limb in reversed(limbs):
        units = (units << exact_sums.LIMB) + limb
    special = None
    if nans or (infinities and negative):
        special = math.nan
    elif infinities or negative:
        special = math.inf if infinities else -math.inf
    return _Sum(units, lowest, count, special)
