"""Ready-made reductions beside c10d's: argmax, log-sum-exp, moments, top-k, logical operations.

They are reductions of one's own (`own_reductions`), for any dtype that fits, and compiled for a
dtype at its first use. Rules:

- ARGMAX, ARGMIN take (value, index): a NaN wins, as in NumPy; among equal values the least index.
- LOGSUMEXP, softmax_merge compute in float64 by polynomials of their own, so that every CPU gives
  the same bits: exp and log1p have errors of at most 1 ulp.
- WELFORD takes (n, mean, m2), m2 the sum of squared differences from the mean (Chan, Golub and
  LeVeque 1983). softmax_merge takes (logsumexp, values) (Milakov and Gimelshein 2018).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from nc10d.ops.own_reductions import Elements, Place, field_dtypes, own_reduction
from nc10d.ops.reductions import ReduceOp, kind_of_own


def _made(
    name: str,
    step: Callable[..., Any],
    elements: Elements,
    takes: str,
    identity: Any = None,
    any_order: bool = False,
    map: Callable[[Any], Any] | None = None,
) -> ReduceOp:
    maker, _, argument = name.rstrip(")").partition("(")
    made_by = __name__, maker, (int(argument),) if argument else ()
    step.__name__ = maker  # in errors
    functions = {"step": step} if map is None else {"step": step, "map": map}
    own = own_reduction(functions, elements, takes, identity, name, name, made_by)
    return ReduceOp(kind_of_own(own, any_order))


# Which arrays a reduction takes


def _numbers(*places: Place) -> np.dtype[Any] | None:
    (dtype, _), *others = places
    return None if others or dtype.names else dtype


def _floats(*places: Place) -> np.dtype[Any] | None:
    dtype = _numbers(*places)
    return dtype if dtype is not None and "float" in dtype.name else None


def _records(*fields: tuple[str, int], floats: bool = False) -> Elements:
    """Return the function for records with these fields, each of (name, count), 0 for a scalar.

    It takes records with other names, and an array for each field; with `floats`, only floats, and
    rows of them.
    """
    shapes = [(count,) if count else () for _, count in fields]

    def elements(*places: Place) -> np.dtype[Any] | None:
        found = places[0][0]
        if len(places) > 1 or not found.names:
            pairs = zip(fields, field_dtypes(places, shapes, floats), shapes, strict=False)
            found = np.dtype([(name, dtype, shape) for (name, _), dtype, shape in pairs])
        parts = [found[name] for name in found.names or ()]
        fits = not floats or all("float" in part.base.name for part in parts)
        return found if fits and [part.shape for part in parts] == shapes else None

    return elements


# Exact reductions, which give the same bits in any order


def _extreme(least: bool) -> Callable[..., Any]:
    def extreme(a: Any, b: Any) -> Any:
        nan_a, nan_b = a[0] != a[0], b[0] != b[0]
        better = (b[0] < a[0] if least else b[0] > a[0]) | (nan_b & (not nan_a))
        same = (a[0] == b[0]) | (nan_a & nan_b)
        return b if better | (same & (b[1] < a[1])) else a

    return extreme


def _truth(a: Any) -> Any:
    return a != 0


def _land(a: Any, b: Any) -> Any:
    return (a != 0) & (b != 0)


def _lor(a: Any, b: Any) -> Any:
    return (a != 0) | (b != 0)


def _lxor(a: Any, b: Any) -> Any:
    return (a != 0) != (b != 0)


_PAIRS = _records(("value", 0), ("index", 0))
_TAKES_PAIRS = "(value, index): records of two scalars, or two arrays"
ARGMAX = _made("ARGMAX", _extreme(least=False), _PAIRS, _TAKES_PAIRS, any_order=True)
"""The greatest value and its index: for (values, indices), or records of both; a NaN wins."""
ARGMIN = _made("ARGMIN", _extreme(least=True), _PAIRS, _TAKES_PAIRS, any_order=True)
"""The least value and its index."""
MAXLOC = ARGMAX
"""ARGMAX by MPI's name."""
MINLOC = ARGMIN
"""ARGMIN by MPI's name."""
LAND = _made("LAND", _land, _numbers, "numbers", True, any_order=True, map=_truth)
"""1 where all ranks' elements are not 0."""
LOR = _made("LOR", _lor, _numbers, "numbers", False, any_order=True, map=_truth)
"""1 where any rank's element is not 0."""
LXOR = _made("LXOR", _lxor, _numbers, "numbers", False, any_order=True, map=_truth)
"""1 where an odd number of ranks' elements are not 0."""


def _check_count(name: str, count: object, most: int) -> None:
    if type(count) is not int or not 1 <= count <= most:
        raise ValueError(f"{name}: expected an int from 1 to {most}, got {count!r}")


@functools.lru_cache(None, typed=True)
def topk(k: int) -> ReduceOp:
    """Return the reduction to the k greatest values and their indices, in descending order.

    For arrays (values, indices) whose last dimension is k, each rank's sorted so, or for records
    with two fields of k. A NaN comes first; among equal values the lower index.
    """
    _check_count("topk", k, 32)

    def merge(a: Any, b: Any, out: Any) -> None:
        i = j = 0
        for place in range(k):
            x, y = a[0][i], b[0][j]
            better = (y > x) | ((y != y) & (x == x))
            same = (x == y) | ((x != x) & (y != y))
            if better | (same & (b[1][j] < a[1][i])):
                out[0][place], out[1][place] = y, b[1][j]
                j += 1
            else:
                out[0][place], out[1][place] = x, a[1][i]
                i += 1

    elements = _records(("value", k), ("index", k))
    takes = f"(values, indices): two arrays whose last dimension is {k}, or records of {k} and {k}"
    return _made(f"topk({k})", merge, elements, takes, any_order=True)


# Log-sum-exp. The coefficients are Chebyshev fits, made for this file.

_LOG2E, _LN2, _LN2_HIGH, _LN2_LOW = (
    1.4426950408889634,
    0.6931471805599453,
    0.6931471803691238,  # its last 32 bits are 0, so that multiples are exact
    1.9082149292705877e-10,
)
_ROUND = 6755399441055744.0
"""1.5 * 2**52: a float with this added is rounded to an int, which stands in the last bits."""
_BIAS = np.int64(1023)
# Even and odd powers in turn, from the highest on: two chains that a CPU computes side by side.
_EXP_EVEN = (
    2.0914686968086876e-09,
    2.75572736431103e-07,
    2.4801587325547743e-05,
    0.0013888888888883748,
    0.04166666666666667,
    0.5,
)
_EXP_ODD = (
    2.5105217004720745e-08,
    2.7557255400206422e-06,
    0.00019841269874820627,
    0.008333333333326136,
    0.1666666666666667,
)
_LOG_EVEN = (0.14619343453512615, 0.18182896183483085, 0.28571428626570206, 0.666666666666667)
_LOG_ODD = (0.15331487235865734, 0.2222221103781659, 0.3999999999989819)


def _polynomial(x: Any, even: Any, odd: Any) -> Any:
    square, p, q = x * x, even[0], odd[0]
    for c in even[1:]:
        p = p * square + c
    for c in odd[1:]:
        q = q * square + c
    return p + x * q


def _exp(x: Any) -> Any:
    """Return exp(x) for x from -708 to 0, or NaN."""
    shifted = x * _LOG2E + _ROUND
    n = shifted - _ROUND
    r = (x - n * _LN2_HIGH) - n * _LN2_LOW
    bits = np.float64(shifted).view(np.int64) + _BIAS
    scale = np.int64(bits << 52).view(np.float64)
    return (1.0 + (r + r * r * _polynomial(r, _EXP_EVEN, _EXP_ODD))) * scale


def _log1p(t: Any) -> Any:
    """Return log(1 + t) for t from 0 to 1, or NaN."""
    large = t > 0.41421356237309515
    f = (t - 1.0) * 0.5 if large else t
    s = f / (2.0 + f)
    z = s * s
    return (2.0 * s + s * z * _polynomial(z, _LOG_EVEN, _LOG_ODD)) + (_LN2 if large else 0.0)


def _logaddexp(x: Any, y: Any) -> Any:
    """Return log(exp(x) + exp(y)); infinities as numbers say, a NaN gives NaN."""
    a, b = np.float64(x), np.float64(y)
    high, low = (a, b) if a > b else (b, a)
    difference = 0.0 if a == b else low - high
    return high + _log1p(_exp(-708.0 if difference < -708.0 else difference))


LOGSUMEXP = _made("LOGSUMEXP", _logaddexp, _floats, "floats", -math.inf)
"""log(exp(r0) + exp(r1) + ...), element by element, without overflow."""


@functools.lru_cache(None, typed=True)
def softmax_merge(d: int) -> ReduceOp:
    """Return the reduction that merges parts of a softmax, as of attention over a cut sequence.

    For rows of 1 + d floats, the log-sum-exp of the weights and d weighted means, or records of
    both. At most 520 bytes: 129 float32 or 65 float64.
    """
    _check_count("softmax_merge", d, 128)

    def merge(a: Any, b: Any, out: Any) -> None:
        total = _logaddexp(a[0], b[0])
        if total > -math.inf:  # else neither side has a weight
            x, y = np.float64(a[0]) - total, np.float64(b[0]) - total
            w = 0.0 if x < -708.0 else _exp(min(x, 0.0))
            v = 0.0 if y < -708.0 else _exp(min(y, 0.0))
            for i in range(d):
                out[1][i] = w * a[1][i] + v * b[1][i]
        out[0] = total

    elements = _records(("logsumexp", 0), ("value", d), floats=True)
    takes = f"rows of 1 + {d} floats: a last dimension of {1 + d}, d at most 64 for float64"
    return _made(f"softmax_merge({d})", merge, elements, takes)


def _welford(a: Any, b: Any) -> Any:
    n = a[0] + b[0]
    weight = b[0] / n if n > 0 else n
    difference = b[1] - a[1]
    mean = a[1] + difference * weight
    return n, mean, a[2] + b[2] + difference * difference * (a[0] * weight)


WELFORD = _made(
    "WELFORD",
    _welford,
    _records(("n", 0), ("mean", 0), ("m2", 0), floats=True),
    "(n, mean, m2): floats with a last dimension of 3, records of 3 floats, or three arrays",
    (0, 0, 0),
)
"""Count, mean and sum of squared differences from it: the moments of all ranks' samples."""
