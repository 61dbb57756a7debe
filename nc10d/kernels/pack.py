"""Kernels that carry elements from array to array: copy, and cast with a factor; many at a time.

Contract: as in `reduce`, a kernel is void(dst, src, arg, nbytes), all int64, called by address;
nbytes are src's. `arg` is the address of a float64, the factor. `move_all` calls a kernel for every
row (dst, src, nbytes) of a table, without the GIL. Addresses need no alignment; src and dst share
no byte, or are the same. `arg` lives until the call is over.

A cast multiplies in the wider type (float32 at least) and rounds once, to the nearest even, as
`nc10d.arrays.dtypes` has it; from float64 to the narrow floats a cast goes by way of float32.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from llvmlite import ir
from numba import types

from nc10d.arrays.dtypes import DType, ElementKind
from nc10d.kernels import simd
from nc10d.kernels.cache import address_of, compiled, entry_point, made_once
from nc10d.kernels.copy import library_copy, quick_copy_address
from nc10d.kernels.loops import SIGNATURE, call_kernel, compile_kernel
from nc10d.kernels.simd import Builder, Value

STEP = 32
"""The elements in a cast's step: two AVX-512 registers of float32."""

_made: dict[str, Any] = {}


def copy_address() -> int:
    """Return the address of dst = src, by the C library where it is quick; arg is not looked at."""
    return quick_copy_address() or address_of(_made, "copy_bytes", _copy_kernel)


def cast_address(src: DType, dst: DType) -> int:
    """Return the address of dst = src * factor, for two different real floating types.

    TypeError for other types. May block to compile.
    """
    if src is dst or not {src.family, dst.family} == {ElementKind.FLOAT}:
        raise TypeError(f"arrays of {src.label} can't be cast to {dst.label}")
    name = f"cast_{src.label}_to_{dst.label}"
    return address_of(_made, name, lambda: _cast_kernel(src, dst, name))


def move_all(table: int, rows: int, kernel: int, factor: int) -> None:
    """Run `kernel` for each of the `rows` rows (dst, src, nbytes: int64) at `table`."""
    row_mover()(table, rows, kernel, factor)


def row_mover() -> Callable[[int, int, int, int], object]:
    """Return the compiled `move_all`, which a caller may keep: calling it enters no frame."""
    mover: Callable[[int, int, int, int], object] = made_once(
        _made, "move_rows", lambda: entry_point(compiled(SIGNATURE)(_move_rows))
    )
    return mover


def every_kernel() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the name of each kernel and the call that makes it: for warming up."""
    yield "move_rows", row_mover
    floats = [dtype for dtype in DType if dtype.family is ElementKind.FLOAT]
    yield "copy_bytes", copy_address
    for src, dst in itertools.permutations(floats, 2):
        name = f"cast_{src.label}_to_{dst.label}"
        yield name, functools.partial(cast_address, src, dst)


def _move_rows(table, rows, kernel, factor):  # type: ignore[no-untyped-def]
    """for dst, src, nbytes in table: kernel(dst, src, factor, nbytes)"""
    for row in range(rows):
        at = table + 24 * row
        call_kernel(kernel, _read(at), _read(at + 8), factor, _read(at + 16))


def _copy_kernel() -> Any:
    def kernel(dst, src, arg, nbytes):  # type: ignore[no-untyped-def]
        """dst[:] = src"""
        library_copy(dst, src, nbytes)

    return compile_kernel(kernel, "copy_bytes")


def _cast_kernel(src: DType, dst: DType, name: str) -> Any:
    wide_step, single_step = _cast_step(src, dst, STEP), _cast_step(src, dst, 1)
    read, write = src.itemsize, dst.itemsize

    def kernel(dst, src, arg, nbytes):  # type: ignore[no-untyped-def]
        """dst[:] = src * factor"""
        count = nbytes // read
        wide_end = count & -STEP
        factor = _read_double(arg)
        for at in range(0, wide_end, STEP):
            wide_step(dst + at * write, src + at * read, factor)
        for at in range(wide_end, count):
            single_step(dst + at * write, src + at * read, factor)

    return compile_kernel(kernel, name)


def _cast_step(src: DType, dst: DType, lanes: int) -> Any:
    middle = simd.DOUBLE if DType.FLOAT64 in (src, dst) else simd.FLOAT

    @simd.emits(types.void(types.int64, types.int64, types.float64))
    def step(b: Builder, to: Value, at: Value, factor: Value) -> None:
        x = _widened(b, simd.load(b, at, simd.STORED[src], lanes), src, middle)
        scale = factor if middle is simd.DOUBLE else b.fptrunc(factor, simd.FLOAT)
        simd.store(b, _narrowed(b, b.fmul(x, simd.spread(b, scale, lanes)), dst), to)

    return step


def _widened(b: Builder, x: Value, dtype: DType, middle: ir.Type) -> Value:
    wide = simd.WIDEN[dtype](b, x) if dtype in simd.WIDEN else x
    same = wide.type.element == middle
    return wide if same else b.fpext(wide, simd.vector(middle, wide.type.count))


def _narrowed(b: Builder, x: Value, dtype: DType) -> Value:
    if dtype is DType.FLOAT64:
        return x
    if x.type.element != simd.FLOAT:
        x = b.fptrunc(x, simd.vector(simd.FLOAT, x.type.count))
    return simd.NARROW[dtype](b, x) if dtype in simd.NARROW else x


@simd.emits(types.int64(types.int64))
def _read(b: Builder, address: Value) -> Value:
    return b.load(b.inttoptr(address, simd.I64.as_pointer()), align=8)


@simd.emits(types.float64(types.int64))
def _read_double(b: Builder, address: Value) -> Value:
    return b.load(b.inttoptr(address, simd.DOUBLE.as_pointer()), align=8)
