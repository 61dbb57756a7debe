"""The loops of every kernel: a wide step, a 16-byte step, and single elements for the rest.

Contract: a kernel takes raw addresses and a length in bytes, all int64. Outputs may be the
inputs themselves, without partial overlap; nothing needs alignment. A step is a straight
piece of vector code (`lanes`), loaded whole before it is stored: so the same loops serve every way
in which the addresses may coincide, and LLVM need not prove that they don't.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types

from nc10d.arrays.dtypes import DType
from nc10d.kernels.cache import compiled_callback
from nc10d.kernels.combine import Combine
from nc10d.kernels.simd import (
    I64,
    STORED,
    WIDEN,
    Builder,
    Value,
    emits,
    lanes_in,
    load,
    spread,
    store,
)

SIGNATURE = "void(int64, int64, int64, int64)"
MIDDLE = 16
LINE = 64
LONG = 4096
"""From how many bytes on a kernel with two inputs first goes to where a line of the output begins.
Wide stores that straddle two lines take up to twice as long, in a cache and outside."""

Prepare = Callable[[Builder, Value], Value]

_NUMBA_SCALAR = {
    ir.FloatType(): types.float32,
    ir.DoubleType(): types.float64,
    ir.IntType(8): types.uint8,
    ir.IntType(16): types.uint16,
    ir.IntType(32): types.uint32,
    ir.IntType(64): types.uint64,
}


def wide_bytes(dtype: DType) -> int:
    """Return a wide step's bytes: two AVX-512 registers, or 64 lanes that get widened."""
    return 64 * dtype.itemsize if dtype in WIDEN else 128


def binary_kernel(name: str, dtype: DType, rule: Combine, both: bool = False) -> Any:
    """Compile dst = a `rule` b, as a C function (dst, a, b, nbytes); if `both`, it is also b."""
    wide, single = wide_bytes(dtype), dtype.itemsize
    wide_step, middle_step, single_step = (
        _binary_step(dtype, rule, nbytes, both) for nbytes in (wide, MIDDLE, single)
    )

    def kernel(dst, a, b, nbytes):  # type: ignore[no-untyped-def]
        """dst[:] = a op b"""
        head, start = 0, 0
        if nbytes >= LONG and dst & (single - 1) == 0:
            head, start = -dst & (MIDDLE - 1), -dst & (LINE - 1)
        wide_end = start + ((nbytes - start) & -wide)
        middle_end = start + ((nbytes - start) & -MIDDLE)
        for at in range(0, head, single):
            single_step(dst + at, a + at, b + at)
        for at in range(head, start, MIDDLE):
            middle_step(dst + at, a + at, b + at)
        for at in range(start, wide_end, wide):
            wide_step(dst + at, a + at, b + at)
        for at in range(wide_end, middle_end, MIDDLE):
            middle_step(dst + at, a + at, b + at)
        for at in range(middle_end, nbytes, single):
            single_step(dst + at, a + at, b + at)

    return compile_kernel(kernel, name)


def unary_kernel(name: str, dtype: DType, prepare: Prepare, rule: Combine, wide: int) -> Any:
    """Compile dst = src `rule` prepare(arg), as a C function (dst, src, arg, nbytes)."""
    # `rule` gets the prepared scalar in every lane of its second vector.
    single = dtype.itemsize
    middle = min(wide, MIDDLE)
    scalar = _type_of_scalar(prepare)
    prepare_scalar = emits(scalar(types.int64))(prepare)
    wide_step, middle_step, single_step = (
        _unary_step(dtype, rule, nbytes, scalar) for nbytes in (wide, middle, single)
    )

    def kernel(dst, src, arg, nbytes):  # type: ignore[no-untyped-def]
        """dst[:] = src op arg"""
        value = prepare_scalar(arg)
        wide_end = nbytes & -wide
        middle_end = nbytes & -middle
        for at in range(0, wide_end, wide):
            wide_step(dst + at, src + at, value)
        for at in range(wide_end, middle_end, middle):
            middle_step(dst + at, src + at, value)
        for at in range(middle_end, nbytes, single):
            single_step(dst + at, src + at, value)

    return compile_kernel(kernel, name)


def compile_kernel(kernel: Any, name: str) -> Any:
    """Compile a kernel as a C function of this name."""
    # The name is the key in the cache and the symbol in memory: unique for each kernel.
    kernel.__name__ = kernel.__qualname__ = name
    return compiled_callback(SIGNATURE)(kernel)


@emits(types.void(*[types.int64] * 5))
def call_kernel(b: Builder, kernel: Value, dst: Value, x: Value, y: Value, nbytes: Value) -> None:
    """Call the C function at address `kernel` with four integers."""
    kind = ir.FunctionType(ir.VoidType(), [I64] * 4)
    b.call(b.inttoptr(kernel, kind.as_pointer()), (dst, x, y, nbytes))


def _binary_step(dtype: DType, rule: Combine, nbytes: int, both: bool) -> Any:
    element, lanes = STORED[dtype], lanes_in(dtype, nbytes)

    @emits(types.void(types.int64, types.int64, types.int64))
    def step(b: Builder, dst: Value, x: Value, y: Value) -> None:
        value = rule(b, load(b, x, element, lanes), load(b, y, element, lanes))
        store(b, value, dst)
        if both:
            store(b, value, y)

    return step


def _unary_step(dtype: DType, rule: Combine, nbytes: int, scalar_type: types.Type) -> Any:
    element, lanes = STORED[dtype], lanes_in(dtype, nbytes)

    @emits(types.void(types.int64, types.int64, scalar_type))
    def step(b: Builder, dst: Value, x: Value, scalar: Value) -> None:
        store(b, rule(b, load(b, x, element, lanes), spread(b, scalar, lanes)), dst)

    return step


def _type_of_scalar(prepare: Prepare) -> types.Type:
    """Return the type of the scalar that `prepare` makes from the kernel's int64 argument."""
    probe = ir.IRBuilder(ir.Function(ir.Module(), _ONE_INT, "probe").append_basic_block())
    return _NUMBA_SCALAR[prepare(probe, probe.function.args[0]).type]


_ONE_INT = ir.FunctionType(ir.VoidType(), [ir.IntType(64)])
