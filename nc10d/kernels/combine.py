"""LLVM code that combines two elements, for each kind of reduction and family of types.

Contract: `combine(kind, dtype)` returns the function `(builder, x, y) -> x op y` on vectors of
stored elements (see `lanes`); the rules are those of `nc10d.arrays.dtypes`. `canonical` maps
kernels that compute the same bits to a single kernel, which is compiled once.
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from nc10d.arrays.dtypes import DType, ElementKind
from nc10d.kernels.simd import I8, NARROW, WIDEN, Builder, Value, is_nan, shuffle, splat
from nc10d.ops import RedOp

Combine = Callable[[Builder, Value, Value], Value]
Convert = Callable[[Builder, Value], Value]

_REAL_PARTS = {DType.COMPLEX64: DType.FLOAT32, DType.COMPLEX128: DType.FLOAT64}
_UNSIGNED = {
    DType.INT8: DType.UINT8,
    DType.INT16: DType.UINT16,
    DType.INT32: DType.UINT32,
    DType.INT64: DType.UINT64,
}
_OF_TRUTH = {
    RedOp.SUM: RedOp.BOR,
    RedOp.MAX: RedOp.BOR,
    RedOp.PRODUCT: RedOp.BAND,
    RedOp.MIN: RedOp.BAND,
}
_SUMS = frozenset({RedOp.AVG, RedOp.PREMUL_SUM})
_BITWISE = frozenset({RedOp.BAND, RedOp.BOR, RedOp.BXOR})


def parts(dtype: DType) -> DType:
    """Return the type of a complex number's parts, and any other type itself."""
    return _REAL_PARTS.get(dtype, dtype)


def unsigned(dtype: DType) -> DType:
    """Return the unsigned int of the same width for an int, and any other type itself."""
    return _UNSIGNED.get(dtype, dtype)


def canonical(kind: RedOp, dtype: DType) -> tuple[RedOp, DType]:
    """Return the kind and type whose kernel computes the same bits."""
    if kind in _SUMS:
        kind = RedOp.SUM
    if dtype.family is ElementKind.BOOL:
        return _OF_TRUTH.get(kind, kind), dtype
    if kind in _BITWISE:
        return kind, DType.UINT8
    if kind is RedOp.SUM:
        return kind, unsigned(parts(dtype))
    return kind, unsigned(dtype) if kind is RedOp.PRODUCT else dtype


def combine(kind: RedOp, dtype: DType) -> Combine:
    """Return the function that emits `x op y`; the pair must be canonical."""
    if dtype not in WIDEN:
        return _RULES[dtype.family][kind]
    if kind in _CHOICES:
        return _choose_float(_CHOICES[kind], WIDEN[dtype])
    rule, widen, narrow = _RULES[dtype.family][kind], WIDEN[dtype], NARROW[dtype]
    return lambda b, x, y: narrow(b, rule(b, widen(b, x), widen(b, y)))


def _choose_float(comparison: str, widen: Convert = lambda _builder, x: x) -> Combine:
    """Take x where it wins or is NaN, else y; the stored bits are kept, nothing is rounded."""

    def emit(b: Builder, x: Value, y: Value) -> Value:
        wide = widen(b, x)
        wins = b.fcmp_ordered(comparison, wide, widen(b, y))
        return b.select(b.or_(wins, is_nan(b, wide)), x, y)

    return emit


def _choose_int(compare: Callable[..., Value], comparison: str) -> Combine:
    return lambda b, x, y: b.select(compare(b, comparison, x, y), x, y)


def _truth(b: Builder, x: Value) -> Value:
    """Return 0 or 1: a byte of a user's bool array may hold anything."""
    return b.zext(b.icmp_unsigned("!=", x, splat(x, 0)), ir.VectorType(I8, x.type.count))


def _of_truth(rule: Combine) -> Combine:
    return lambda b, x, y: rule(b, _truth(b, x), _truth(b, y))


def _complex_product(b: Builder, x: Value, y: Value) -> Value:
    """(ac - bd, ad + bc) for pairs of lanes, each operation rounded by itself."""
    pairs = range(0, x.type.count, 2)
    real = shuffle(b, x, x, [i for p in pairs for i in (p, p)])
    imaginary = shuffle(b, x, x, [i for p in pairs for i in (p + 1, p + 1)])
    swapped = shuffle(b, y, y, [i for p in pairs for i in (p + 1, p)])
    first, second = b.fmul(real, y), b.fmul(imaginary, swapped)
    minus, plus = b.fsub(first, second), b.fadd(first, second)
    return shuffle(b, minus, plus, [i for p in pairs for i in (p, p + 1 + x.type.count)])


_CHOICES = {RedOp.MAX: ">", RedOp.MIN: "<"}
_WRAPPING: dict[RedOp, Combine] = {
    RedOp.SUM: Builder.add,
    RedOp.PRODUCT: Builder.mul,
    RedOp.BAND: Builder.and_,
    RedOp.BOR: Builder.or_,
    RedOp.BXOR: Builder.xor,
}
_RULES: dict[ElementKind, dict[RedOp, Combine]] = {
    ElementKind.BOOL: {kind: _of_truth(_WRAPPING[kind]) for kind in _BITWISE},
    ElementKind.UINT: _WRAPPING
    | {k: _choose_int(Builder.icmp_unsigned, c) for k, c in _CHOICES.items()},
    ElementKind.INT: _WRAPPING
    | {k: _choose_int(Builder.icmp_signed, c) for k, c in _CHOICES.items()},
    ElementKind.FLOAT: {RedOp.SUM: Builder.fadd, RedOp.PRODUCT: Builder.fmul}
    | {k: _choose_float(c) for k, c in _CHOICES.items()},
    ElementKind.COMPLEX: {RedOp.PRODUCT: _complex_product},
}
