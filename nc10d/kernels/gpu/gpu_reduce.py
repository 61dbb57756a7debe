"""Folding by blocks of threads: all ranks' contributions to a chunk, in rank order, at once.

Contract: a kernel is void(dst, own, rows, stride, rank, size, count, share, factor, place), all
int64. Rank r's `count` elements lie at rows + r * stride, but those of `rank` at `own`; the kernel
writes finish(((prepare(x0) step prepare(x1)) step ...)) to dst, which may be `own`. Addresses are
aligned to `nc10d.arrays.dtypes.alignment`, rows and stride to ROW_ALIGN. A block of THREADS threads
folds `share` elements (`elements_a_block`). `factor` has the bits of PREMUL_SUM's float64; `place`
is as in `gpu_pack`.

A known reduction computes by the rules of the CPU's kernels, which give the same bits; numbers go
in 16-byte words where dst and own are aligned to that. One's own reduction runs the same function,
compiled for the GPU: the same bits but for what CUDA's library computes in its own way (exp, log).
A record with arrays in it needs aligned fields; other fields that are not aligned are read by
bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from numba import types
from numba.core import cgutils

from nc10d.arrays.dtypes import DType, ElementKind, ElementType, alignment, scalar
from nc10d.base.run_to_end import off_main
from nc10d.kernels import simd
from nc10d.kernels.combine import canonical, combine, unsigned
from nc10d.kernels.gpu.gpu_pack import THREADS, Target, coordinates, pointer, read, write
from nc10d.kernels.gpu.gpu_ptx import Capability, kept_ptx
from nc10d.kernels.own.element_forms import move, room
from nc10d.kernels.own.own_reduce import own_part
from nc10d.kernels.own.refusals import refusals
from nc10d.kernels.reduce import map_rule
from nc10d.kernels.simd import I64, Builder, Value
from nc10d.ops.reductions import ReductionKind

ROW_ALIGN = 16
_SIGNATURE = types.void(*[types.int64] * 10)
_BOUNDS = (THREADS, 4)
"""Four blocks on a multiprocessor at once: 64 registers a thread, for four loads on their way."""


def elements_a_block(element: ElementType) -> int:
    """Return how many elements a block folds: a 16-byte word a thread, or an element."""
    return THREADS * max(ROW_ALIGN // element.itemsize, 1)


def fold_name(kind: ReductionKind, element: ElementType) -> str:
    """Return the name of a kernel."""
    own = kind.pairwise.own
    step = kind.pairwise.name.lower() if own is None else f"own_{own.digest}"
    maps = "_map" * bool(kind.prepares) + "_finish" * bool(kind.finishes)
    return f"fold_{step}{maps}_{element.code:x}"


@functools.cache
@off_main
def fold_ptx(kind: ReductionKind, element: ElementType, capability: Capability) -> str:
    """Return PTX with the kernel for a reduction of such elements on a GPU, such as (9, 0).

    TypeError, which quotes the line, for a function that can't be compiled for GPUs. May block to
    compile.
    """
    body = functools.partial(fold_body, kind=kind, element=element)
    with refusals():
        return kept_ptx(fold_name(kind, element), body, _SIGNATURE, capability, _BOUNDS)


def fold_body(target: Target, kind: ReductionKind, element: ElementType) -> Any:
    """Return the body of a kernel."""
    block_of, thread_of, threads_of = coordinates(target)
    item, lanes = element.itemsize, 1
    if kind.pairwise.own is not None:
        one = several = _fold(target, item, _own(target, kind, element))
    else:
        lanes = ROW_ALIGN // item
        one = _fold(target, item, _known(kind, scalar(element), item, alignment(item)))
        wide = _known(kind, scalar(element), ROW_ALIGN, ROW_ALIGN)
        several = _fold(target, ROW_ALIGN, wide)

    def fold(dst, own, rows, stride, rank, size, count, share, factor, place):  # type: ignore[no-untyped-def]
        """dst[first : first + share] = reduce(step, rows[:, first : first + share])"""
        thread, threads = thread_of(place), threads_of(place)
        first = share * block_of(place)
        last = min(first + share, count)
        done = first
        # Loops without a range, whose length would be a division: a call, which costs registers.
        if lanes > 1 and (dst | own) & 15 == 0:
            done = first + ((last - first) & -lanes)
            i = first + lanes * thread
            while i < done:
                at = i * item
                several(dst + at, own + at, rows + at, stride, rank, size, factor)
                i += lanes * threads
        i = done + thread
        while i < last:
            at = i * item
            one(dst + at, own + at, rows + at, stride, rank, size, factor)
            i += threads

    return fold


Places = Sequence[Value]
Emit = Callable[[str, Any, Builder, Value, Value, Places], None]
"""Emits `to` = part(`places`), from (part, context, builder, arg, to, places); a copy if there is
no such part. `arg` is the kernel's factor for a map, the world size for a finish."""


def _own(target: Target, kind: ReductionKind, element: ElementType) -> Emit:
    own = kind.pairwise.own
    assert own is not None, kind
    has = {"step": True, "map": bool(kind.prepares), "finish": bool(kind.finishes)}
    parts = {
        part: own_part(own, part, element, target.compile, aligned=True)
        for part in has
        if has[part]
    }

    def emit(part: str, context: Any, b: Builder, _arg: Value, to: Value, places: Places) -> None:
        if part in parts:
            parts[part](context, b, to, places)
        else:
            move(b, to, places[0], element.itemsize, aligned=True)

    return emit


def _known(kind: ReductionKind, dtype: DType, nbytes: int, align: int) -> Emit:
    """Return the function that emits the parts of a known reduction, for `nbytes` of numbers."""
    step, stored = canonical(kind.pairwise, dtype)
    if kind.pairwise.bitwise and dtype.family is not ElementKind.BOOL:
        stored = unsigned(dtype)  # whole elements in place of bytes
    rule, lanes = combine(step, scalar(stored)), simd.lanes_in(dtype, nbytes)
    maps = {"map": kind.prepares, "finish": kind.finishes}

    def emit(part: str, _context: Any, b: Builder, arg: Value, to: Value, places: Places) -> None:
        x, *others = (read(b, at, simd.STORED[scalar(stored)], lanes, align) for at in places)
        if others:
            x = rule(b, x, *others)
        elif maps[part]:
            prepare, change, _ = map_rule(maps[part], dtype)
            x = change(b, x, simd.spread(b, prepare(b, arg), lanes))
        write(b, to, x, align)

    return emit


def _fold(target: Target, nbytes: int, emit: Emit) -> Any:
    """Return the function that folds so many bytes of each row; it gets their addresses."""

    @target.intrinsic
    def fold(_typing, _dst, _own, _rows, _stride, _rank, _size, _factor):  # type: ignore[no-untyped-def]
        def generate(context: Any, b: Builder, _signature: Any, given: Sequence[Value]) -> Value:
            dst, own, rows, stride, rank, size, factor = given

            def row(index: Value) -> Value:
                place = b.add(rows, b.mul(index, stride))
                mine = b.icmp_signed("==", index, rank)
                return pointer(b, target, b.select(mine, own, place))

            total, mapped = room(b, nbytes), room(b, nbytes)
            emit("map", context, b, factor, total, [row(I64(0))])
            with cgutils.for_range(b, b.sub(size, I64(1)), intp=I64) as loop:
                emit("map", context, b, factor, mapped, [row(b.add(loop.index, I64(1)))])
                emit("step", context, b, factor, total, [total, mapped])
            emit("finish", context, b, size, pointer(b, target, dst), [total])
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), generate

    return fold
