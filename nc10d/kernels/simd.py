"""LLVM code for a few elements side by side: load, store, widen, narrow, combine.

Contract: everything here emits instructions into an `ir.IRBuilder` and works for any number of
lanes, so that a kernel's wide loop and last elements compute the same bits. Whole vectors are
loaded before any is stored, hence an output may be an input. Addresses need no alignment.

The narrow floats are stored as bits and computed as float32; `WIDEN` and `NARROW` convert. The
rounding is to the nearest, ties to even, as IEEE 754 and the OCP 8-bit format have it; the CPU's
own bfloat16 conversion is not used because that flushes subnormal numbers to zero.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import numba  # first and whole: threads that import its parts at once meet half of a module
from llvmlite import ir
from numba.extending import intrinsic as cpu_intrinsic

from nc10d.arrays.dtypes import DType, ElementKind

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
HALF, FLOAT, DOUBLE = ir.HalfType(), ir.FloatType(), ir.DoubleType()
Builder: TypeAlias = ir.IRBuilder
Value: TypeAlias = ir.Value

STORED: dict[DType, ir.Type] = {
    DType.BOOL: I8,
    DType.UINT8: I8,
    DType.INT8: I8,
    DType.UINT16: I16,
    DType.INT16: I16,
    DType.UINT32: I32,
    DType.INT32: I32,
    DType.UINT64: I64,
    DType.INT64: I64,
    DType.FLOAT16: I16,
    DType.BFLOAT16: I16,
    DType.FLOAT8_E4M3FN: I8,
    DType.FLOAT8_E5M2: I8,
    DType.FLOAT32: FLOAT,
    DType.FLOAT64: DOUBLE,
    DType.COMPLEX64: FLOAT,
    DType.COMPLEX128: DOUBLE,
}
"""An element's stored form; a complex number is two lanes."""


Emit = Callable[..., Value | None]


def emits(signature: Any, intrinsic: Callable[..., Any] = cpu_intrinsic) -> Callable[[Emit], Any]:
    """Make `emit(builder, *arguments)`, which emits instructions, a function in compiled code.

    `signature` is Numba's; an `emit` for a void function returns None. `intrinsic` is Numba's
    decorator for the machine that the code is for.
    """

    def declare(emit: Emit) -> Any:
        @intrinsic
        @functools.wraps(emit)  # Numba reads the parameters behind the first
        def function(_typing: Any, *_types: Any) -> Any:
            def generate(
                context: Any, b: Builder, _signature: Any, arguments: list[Value]
            ) -> Value:
                value = emit(b, *arguments)
                return context.get_dummy_value() if value is None else value

            return signature, generate

        return function

    return declare


def vector(element: ir.Type, lanes: int) -> ir.VectorType:
    """Return the vector type with `lanes` elements, also for 1: so LLVM adds no loops."""
    return ir.VectorType(element, lanes)


def load(b: Builder, address: Value, element: ir.Type, lanes: int) -> Value:
    """Load `lanes` elements from any address."""
    return b.load(b.inttoptr(address, vector(element, lanes).as_pointer()), align=1)


def store(b: Builder, value: Value, address: Value) -> None:
    """Store all lanes of `value` to any address."""
    b.store(value, b.inttoptr(address, value.type.as_pointer()), align=1)


def pointer_to(b: Builder, at: Value, kind: ir.Type) -> Value:
    """Return a pointer to another type, in the address space of the pointer `at`."""
    return b.bitcast(at, ir.PointerType(kind, at.type.addrspace))


def splat(like: Value, constant: float) -> ir.Constant:
    """Return `constant` in every lane of a vector, whose type is that of `like`."""
    return ir.Constant(like.type, [constant] * like.type.count)


def spread(b: Builder, scalar: Value, lanes: int) -> Value:
    """Return a run-time scalar in every lane."""
    one = b.insert_element(ir.Constant(vector(scalar.type, lanes), ir.Undefined), scalar, I32(0))
    return shuffle(b, one, one, [0] * lanes)


def shuffle(b: Builder, x: Value, y: Value, lanes: list[int]) -> Value:
    """Return the chosen lanes of x followed by y."""
    return b.shuffle_vector(x, y, ir.Constant(vector(I32, len(lanes)), lanes))


def _as(x: Value, element: ir.Type) -> ir.VectorType:
    return vector(element, x.type.count)


def is_nan(b: Builder, x: Value) -> Value:
    """Return the mask for lanes that are NaN."""
    return b.fcmp_unordered("uno", x, x)


# Widening: stored bits -> float32


@functools.cache
def _cpu_converts_half() -> bool:
    """Return whether the CPU has the float16 conversions; LLVM would call a missing function."""
    triple, _, features = numba.core.registry.cpu_target.target_context.codegen().magic_tuple()
    return "+f16c" in features or not triple.startswith("x86")


def _half_to_float(b: Builder, bits: Value) -> Value:
    if _cpu_converts_half():
        return b.fpext(b.bitcast(bits, _as(bits, HALF)), _as(bits, FLOAT))
    # With the exponent's bits in place a float32 is 2**112 too small; its largest is special.
    wide = b.zext(bits, _as(bits, I32))
    magnitude = b.and_(wide, splat(wide, 0x7FFF))
    sign = b.shl(b.and_(wide, splat(wide, 0x8000)), splat(wide, 16))
    small = b.bitcast(b.shl(magnitude, splat(wide, 13)), _as(bits, FLOAT))
    number = b.bitcast(b.fmul(small, splat(small, 2.0**112)), wide.type)
    special = b.icmp_unsigned(">=", magnitude, splat(wide, 0x7C00))
    number = b.select(special, b.or_(number, splat(wide, 0x7F800000)), number)
    return b.bitcast(b.or_(sign, number), _as(bits, FLOAT))


def _bfloat_to_float(b: Builder, bits: Value) -> Value:
    wide = b.zext(bits, _as(bits, I32))
    return b.bitcast(b.shl(wide, splat(wide, 16)), _as(bits, FLOAT))


def _e5m2_to_float(b: Builder, bits: Value) -> Value:
    """An e5m2 number is the upper byte of the float16 with the same value."""
    half = b.zext(bits, _as(bits, I16))
    return _half_to_float(b, b.shl(half, splat(half, 8)))


def _e4m3_to_float(b: Builder, bits: Value) -> Value:
    """Read as a float16 with another exponent bit: 2**8 too small; all bits set is NaN."""
    wide = b.zext(bits, _as(bits, I16))
    magnitude = b.and_(wide, splat(wide, 0x7F))
    sign = b.shl(b.and_(wide, splat(wide, 0x80)), splat(wide, 8))
    small = _half_to_float(b, b.or_(sign, b.shl(magnitude, splat(wide, 7))))
    number = b.fmul(small, splat(small, 256.0))
    special = b.icmp_unsigned("==", magnitude, splat(wide, 0x7F))
    return b.select(special, splat(number, float("nan")), number)


# Narrowing: float32 -> stored bits, rounded once


def _float_to_bfloat(b: Builder, x: Value) -> Value:
    bits = b.bitcast(x, _as(x, I32))
    rounded = _round_off(b, bits, 16)
    quiet = b.or_(b.lshr(bits, splat(bits, 16)), splat(bits, 0x40))
    return b.trunc(b.select(is_nan(b, x), quiet, rounded), _as(x, I16))


def _round_off(b: Builder, bits: Value, count: int) -> Value:
    """Drop the lowest `count` bits, rounding to the nearest, ties to even."""
    odd = b.and_(b.lshr(bits, splat(bits, count)), splat(bits, 1))
    nudge = b.add(odd, splat(bits, (1 << (count - 1)) - 1))
    return b.lshr(b.add(bits, nudge), splat(bits, count))


def _to_small(
    stored: ir.IntType, mantissa: int, bias: int, overflow: int, nan: int
) -> Callable[[Builder, Value], Value]:
    """Return the narrowing to a smaller format; larger values become the code `overflow`."""
    # Below 2**(1 - bias) the result is a multiple of a unit: adding a float32 whose last
    # place is that unit makes the addition itself round.
    unit_anchor = float(2 ** (1 - bias - mantissa + 23))
    anchor_bits = (127 + 1 - bias - mantissa + 23) << 23
    smallest_normal = float(2.0 ** (1 - bias))
    rebias = (127 - bias) << mantissa

    def narrow(b: Builder, x: Value) -> Value:
        bits = b.bitcast(x, _as(x, I32))
        size_bits = b.and_(bits, splat(bits, 0x7FFFFFFF))
        size = b.bitcast(size_bits, x.type)
        rounded = _round_off(b, size_bits, 23 - mantissa)
        normal = b.sub(rounded, splat(bits, rebias))
        anchored = b.bitcast(b.fadd(size, splat(x, unit_anchor)), bits.type)
        subnormal = b.sub(anchored, splat(bits, anchor_bits))
        tiny = b.fcmp_ordered("<", size, splat(x, smallest_normal))
        code = b.select(tiny, subnormal, normal)
        large = b.icmp_unsigned(">", code, splat(bits, overflow))
        code = b.select(large, splat(bits, overflow), code)
        code = b.select(is_nan(b, x), splat(bits, nan), code)
        sign = b.lshr(b.sub(bits, size_bits), splat(bits, 32 - stored.width))
        return b.trunc(b.or_(sign, code), _as(x, stored))

    return narrow


_to_half_in_steps = _to_small(I16, mantissa=10, bias=15, overflow=0x7C00, nan=0x7E00)


def _float_to_half(b: Builder, x: Value) -> Value:
    if not _cpu_converts_half():
        return _to_half_in_steps(b, x)
    return b.bitcast(b.fptrunc(x, _as(x, HALF)), _as(x, I16))


WIDEN: dict[DType, Callable[[Builder, Value], Value]] = {
    DType.FLOAT16: _half_to_float,
    DType.BFLOAT16: _bfloat_to_float,
    DType.FLOAT8_E5M2: _e5m2_to_float,
    DType.FLOAT8_E4M3FN: _e4m3_to_float,
}
NARROW: dict[DType, Callable[[Builder, Value], Value]] = {
    DType.FLOAT16: _float_to_half,
    DType.BFLOAT16: _float_to_bfloat,
    DType.FLOAT8_E5M2: _to_small(I8, mantissa=2, bias=15, overflow=0x7C, nan=0x7E),
    DType.FLOAT8_E4M3FN: _to_small(I8, mantissa=3, bias=7, overflow=0x7F, nan=0x7F),
}


def lanes_in(dtype: DType, nbytes: int) -> int:
    """Return how many lanes `nbytes` of `dtype` are."""
    return nbytes // dtype.itemsize * (2 if dtype.family is ElementKind.COMPLEX else 1)
