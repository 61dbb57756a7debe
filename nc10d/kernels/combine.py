"""LLVM code that combines two elements, for each pairwise step and type family.

Contract: `combine(step, dtype)` returns the function `(builder, x, y) -> x op y` on vectors of
stored elements (see `lanes`); the rules are those of `nc10d.arrays.dtypes`. `canonical` maps
kernels that compute the same bits to a single kernel, which is compiled once.
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from nc10d.arrays.dtypes import DType, ElementKind, ElementType, RecordType
from nc10d.kernels.simd import I8, NARROW, WIDEN, Builder, Value, is_nan, shuffle, splat
from nc10d.ops.reductions import PAIRWISE, Pairwise

Combine = Callable[[Builder, Value, Value], Value]
Convert = Callable[[Builder, Value], Value]

_REAL_PARTS = {DType.COMPLEX64: DType.FLOAT32, DType.COMPLEX128: DType.FLOAT64}
_UNSIGNED = {
    DType.INT8: DType.UINT8,
    DType.INT16: DType.UINT16,
    DType.INT32: DType.UINT32,
    DType.INT64: DType.UINT64,
}


def parts(dtype: DType) -> DType:
    """Return the parts' type for a complex number, and any other type itself."""
    return _REAL_PARTS.get(dtype, dtype)


def unsigned(dtype: DType) -> DType:
    """Return the unsigned int of the same width for an int, and any other type itself."""
    return _UNSIGNED.get(dtype, dtype)


def canonical(step: Pairwise, dtype: ElementType) -> tuple[str, ElementType]:
    """Return the step's name, and the type, whose kernel computes the same bits."""
    if step.own is not None or isinstance(dtype, RecordType):
        return step.name, dtype
    if dtype.family is ElementKind.BOOL:
        return step.of_truth, dtype
    if step.bitwise:
        return step.name, DType.UINT8
    if step.name == "SUM":
        return step.name, unsigned(parts(dtype))
    return step.name, dtype if step.exact else unsigned(dtype)


def combine(step: str, dtype: DType) -> Combine:
    """Return the function that emits `x op y`; the pair must be canonical."""
    if dtype not in WIDEN:
        return RULES[dtype.family][step]
    if step in _CHOICES:
        return _choose_float(_CHOICES[step], WIDEN[dtype])
    rule, widen, narrow = RULES[dtype.family][step], WIDEN[dtype], NARROW[dtype]
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
    """(ac - bd, ad + bc) for lane pairs, each operation rounded by itself."""
    pairs = range(0, x.type.count, 2)
    real = shuffle(b, x, x, [i for p in pairs for i in (p, p)])
    imaginary = shuffle(b, x, x, [i for p in pairs for i in (p + 1, p + 1)])
    swapped = shuffle(b, y, y, [i for p in pairs for i in (p + 1, p)])
    first, second = b.fmul(real, y), b.fmul(imaginary, swapped)
    minus, plus = b.fsub(first, second), b.fadd(first, second)
    return shuffle(b, minus, plus, [i for p in pairs for i in (p, p + 1 + x.type.count)])


_CHOICES = {"MAX": ">", "MIN": "<"}
_WRAPPING: dict[str, Combine] = {
    "SUM": Builder.add,
    "PRODUCT": Builder.mul,
    "BAND": Builder.and_,
    "BOR": Builder.or_,
    "BXOR": Builder.xor,
}
RULES: dict[ElementKind, dict[str, Combine]] = {
    ElementKind.BOOL: {s: _of_truth(_WRAPPING[s]) for s, step in PAIRWISE.items() if step.bitwise},
    ElementKind.UINT: _WRAPPING
    | {k: _choose_int(Builder.icmp_unsigned, c) for k, c in _CHOICES.items()},
    ElementKind.INT: _WRAPPING
    | {k: _choose_int(Builder.icmp_signed, c) for k, c in _CHOICES.items()},
    ElementKind.FLOAT: {"SUM": Builder.fadd, "PRODUCT": Builder.fmul}
    | {k: _choose_float(c) for k, c in _CHOICES.items()},
    ElementKind.COMPLEX: {"PRODUCT": _complex_product},
}
