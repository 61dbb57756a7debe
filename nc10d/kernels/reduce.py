"""Reduction kernels: a small C function for each operation and element type, by address.

Contract: `void(dst, a, b, nbytes)`, all int64, computes dst = a op b by the rules of
`nc10d.arrays.dtypes`; `void(dst, src, arg, nbytes)` are the maps that AVG ends and PREMUL_SUM
begins with. dst may be a, b or neither, without partial overlap; addresses need no alignment;
nbytes is a multiple of the item size (0 is fine). Kernels never fail, allocate or take the GIL.

A kernel is compiled (or loaded, see `cache`) when first asked for, and stays for good. Functions
that a program makes again and again have the same kernel if they are equal; others have their own.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from nc10d.arrays.dtypes import DType, ElementKind, ElementType, allows, check_reduce, scalar
from nc10d.kernels import simd
from nc10d.kernels.cache import address_of
from nc10d.kernels.combine import Combine, canonical, combine, parts, unsigned
from nc10d.kernels.loops import Prepare, binary_kernel, unary_kernel, wide_bytes
from nc10d.kernels.own.own_reduce import own_kernel
from nc10d.kernels.simd import Builder, Value
from nc10d.ops import ReduceOp
from nc10d.ops.reductions import EXAMPLES, kind_named, step_named

BOTH = ("SUM", "AVG")
"""The reductions for which there are kernels that write to both operands."""

_kernels: dict[str, Any] = {}
_addresses: dict[tuple[str, ElementType], int] = {}


def address(kernel: str, dtype: ElementType) -> int:
    """Return a kernel's address by the name that programs give it; see `Kernel`.

    May block to compile.
    """
    make = _MAPS.get(kernel)
    return kernel_address(kernel, dtype) if make is None else make(scalar(dtype))


def kernel_address(step: str, dtype: ElementType) -> int:
    """Return the address of dst = a op b, by the name of the pairwise step.

    The name of one's own reduction may end with "/map" or "/finish". TypeError if `dtype` has no
    such operation. May block to compile.
    """
    found = _addresses.get((step, dtype))
    return _resolve(step, dtype) if found is None else found


def _resolve(step: str, dtype: ElementType) -> int:
    name, _, part = step.partition("/")
    known = step_named(name)
    if known.own is not None:
        own, part = known.own, part or "step"
        symbol = f"own_{own.name}_{part}_{own.digest}_{dtype.code:x}"
        found = address_of(_kernels, symbol, lambda: own_kernel(symbol, own, part, dtype))
    else:
        check_reduce(dtype, ReduceOp(kind_named(step)))
        same, stored = canonical(known, dtype)
        symbol = f"{same.lower()}_{stored.label}"
        rule = combine(same, scalar(stored))
        found = address_of(_kernels, symbol, lambda: binary_kernel(symbol, scalar(stored), rule))
    return _addresses.setdefault((step, dtype), found)


def both_address(reduction: str, dtype: DType) -> int:
    """Return the address of a = b = a op b, called with (a, a, b, nbytes); AVG halves.

    For sums and averages of gradients: real and complex floats. May block to compile.
    """
    assert reduction in BOTH, reduction
    assert dtype.family in (ElementKind.FLOAT, ElementKind.COMPLEX), dtype
    kind = kind_named(reduction)
    same, found = canonical(kind.pairwise, dtype)
    stored = scalar(found)
    total = combine(same, stored)
    rule = _halved(stored, total) if kind.finishes else total
    name = f"both_{reduction.lower()}_{stored.label}"
    return address_of(_kernels, name, lambda: binary_kernel(name, stored, rule, both=True))


def _halved(dtype: DType, rule: Combine) -> Combine:
    """Halve the rounded result of `rule`: the same bits as from a division by two."""
    halve = _widened(dtype, lambda b, x, y: b.fmul(x, simd.splat(x, 0.5)))
    return lambda b, x, y: halve(b, rule(b, x, y), y)


def divide_address(dtype: DType) -> int:
    """Return the address of dst = src / arg, where arg is the world size (AVG's last step)."""
    # Ints truncate toward zero; both parts of a complex number are divided.
    return _unary("divide", parts(dtype), *map_rule("DIVIDE", dtype))


def scale_address(dtype: DType) -> int:
    """Return the address of dst = src * factor; arg is the factor's address, a float64."""
    prepare, rule, wide = map_rule("SCALE", dtype)

    def load_factor(b: Builder, arg: Value) -> Value:
        return prepare(b, b.load(b.inttoptr(arg, simd.I64.as_pointer()), align=1))

    return _unary("scale", unsigned(parts(dtype)), load_factor, rule, wide)


def _unary(what: str, dtype: DType, prepare: Prepare, rule: Combine, wide: int) -> int:
    name = f"{what}_{dtype.label}"
    return address_of(_kernels, name, lambda: unary_kernel(name, dtype, prepare, rule, wide))


def every_kernel() -> Iterator[tuple[str, Callable[[], int]]]:
    """Yield the name of each distinct kernel and the call that makes it: for warming up."""
    allowed = [(op, dtype) for op in EXAMPLES for dtype in DType if allows(dtype, op)]
    for (step, dtype), asked in {canonical(op.pairwise, d): (op, d) for op, d in allowed}.items():
        make = functools.partial(kernel_address, asked[0].pairwise.name, asked[1])
        yield f"{step.lower()}_{dtype.label}", make
    for dtype in dict.fromkeys(parts(d) for op, d in allowed if op.kind.finishes):
        yield f"divide_{dtype.label}", functools.partial(divide_address, dtype)
    for reduction, dtype in itertools.product(BOTH, DType):
        if dtype.family is ElementKind.FLOAT:
            name = f"both_{reduction.lower()}_{dtype.label}"
            yield name, functools.partial(both_address, reduction, dtype)
    for dtype in dict.fromkeys(unsigned(parts(d)) for op, d in allowed if op.kind.prepares):
        yield f"scale_{dtype.label}", functools.partial(scale_address, dtype)


_MAPS: dict[str, Callable[[DType], int]] = {
    **{f"BOTH_{reduction}": functools.partial(both_address, reduction) for reduction in BOTH},
    "DIVIDE": divide_address,
    "SCALE": scale_address,
}

# How the maps compute: (prepare the scalar, apply it to a vector, the wide step's bytes)

Map = tuple[Prepare, Combine, int]


def map_rule(name: str, dtype: DType) -> Map:
    """Return how "DIVIDE" or "SCALE" computes, by the world size or the bits of a float64."""
    real = parts(dtype)
    assert real.family is not ElementKind.BOOL, "the map of a bool is refused earlier"
    by_float, by_int = _MAP_RULES[name]
    return by_float(real) if real.family is ElementKind.FLOAT else by_int(real)


def _widened(dtype: DType, rule: Combine) -> Combine:
    """Apply `rule` to a narrow float's float32, and round once."""
    if dtype not in simd.WIDEN:
        return rule
    return lambda b, x, y: simd.NARROW[dtype](b, rule(b, simd.WIDEN[dtype](b, x), y))


def _divide_float(dtype: DType) -> Map:
    real = simd.DOUBLE if dtype is DType.FLOAT64 else simd.FLOAT

    def count(b: Builder, arg: Value) -> Value:
        return b.sitofp(arg, real)

    return count, _widened(dtype, Builder.fdiv), wide_bytes(dtype)


def _divide_int(dtype: DType) -> Map:
    """Divide 64-bit numbers in turn: the world size may not fit the type, and CPUs don't
    divide int vectors."""
    signed = dtype.family is ElementKind.INT
    extend, divide = (Builder.sext, Builder.sdiv) if signed else (Builder.zext, Builder.udiv)

    def rule(b: Builder, x: Value, y: Value) -> Value:
        wide = x if x.type == y.type else extend(b, x, y.type)
        quotient = divide(b, wide, y)
        return quotient if x.type == y.type else b.trunc(quotient, x.type)

    return lambda _b, arg: arg, rule, dtype.itemsize


def _scale_float(dtype: DType) -> Map:
    def factor(b: Builder, arg: Value) -> Value:
        wide = b.bitcast(arg, simd.DOUBLE)
        return wide if dtype is DType.FLOAT64 else _rounded(b, b.fptrunc(wide, simd.FLOAT), dtype)

    return factor, _widened(dtype, Builder.fmul), wide_bytes(dtype)


def _rounded(b: Builder, scalar: Value, dtype: DType) -> Value:
    """Round a float32 to the array's dtype, and widen the result again."""
    if dtype not in simd.WIDEN:
        return scalar
    one = simd.spread(b, scalar, 1)
    return b.extract_element(simd.WIDEN[dtype](b, simd.NARROW[dtype](b, one)), simd.I64(0))


def _scale_int(dtype: DType) -> Map:
    def factor(b: Builder, arg: Value) -> Value:
        whole = b.fptosi(b.bitcast(arg, simd.DOUBLE), simd.I64)
        return whole if dtype.itemsize == 8 else b.trunc(whole, simd.STORED[dtype])

    return factor, Builder.mul, wide_bytes(dtype)


_MAP_RULES = {"DIVIDE": (_divide_float, _divide_int), "SCALE": (_scale_float, _scale_int)}
