"""Packing by blocks of threads: the loops of a CUDA kernel, which also run on the CPU.

Contract: a kernel is void(table, chunks, factor, place): int64, but the factor a float64. It is
launched with THREADS threads a block and a block for each chunk, so a whole bucket is a single
launch. The arrays are a table with rows (dst, src, src's nbytes), three int64 each, as for
`pack.move_all`, and a table with chunks (row, first byte), two int64 each: a chunk for each block.
A body does a thread's share. For a cast, addresses are aligned to an element; others need no
alignment. src and dst share no byte.

`Target` makes the code for a machine and defines `place`: on a CPU the address of three int64
(block, thread, threads in a block); a GPU has registers for these and ignores `place`. So a test
runs a kernel's very loops. A chunk is moved in 16-byte words if both sides are aligned to that,
else in the largest words that both are aligned to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from nc10d.arrays.dtypes import DType, ElementKind
from nc10d.kernels import simd
from nc10d.kernels.own.own_reduce import Compile, compile_on_cpu
from nc10d.kernels.simd import Builder, Value

CHUNK = 16 << 10
"""The bytes of src that a block moves: a bucket of a few MiB has enough blocks for a GPU."""
THREADS = 256
"""The threads of a block: each moves four 16-byte words of a chunk."""
WORDS = {
    1: simd.vector(simd.I8, 1),
    2: simd.vector(simd.I16, 1),
    4: simd.vector(simd.I32, 1),
    8: simd.vector(simd.I32, 2),
    16: simd.vector(simd.I32, 4),
}
"""Words by their bytes."""
BOUNDS = (THREADS, 6)
"""Six blocks on a multiprocessor at once: 40 registers a thread, and memory is kept busy."""
SIGNATURE = types.void(types.int64, types.int64, types.float64, types.int64)
_ALIGN = 16
_UNROLLED = 4

Chunks = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Target:
    """How code is made for a machine: Numba's `intrinsic`, and the address space of arrays.

    `coordinate(b, place, index)` emits code that reads block, thread or threads (0, 1, 2).
    `compile` makes a Python function one that bodies can call.
    """

    intrinsic: Callable[..., Any]
    space: int
    coordinate: Callable[[Builder, Value, int], Value]
    compile: Compile = compile_on_cpu


def chunks_of(nbytes: Sequence[int] | Chunks) -> Chunks:
    """Return the table of chunks for rows with so many bytes."""
    counts = -(-np.asarray(nbytes, np.int64) // CHUNK)
    rows = np.repeat(np.arange(len(counts)), counts)
    chunks_before = np.repeat(np.cumsum(counts) - counts, counts)
    return np.column_stack([rows, CHUNK * (np.arange(len(rows)) - chunks_before)])


def supports(src: DType, dst: DType) -> bool:
    """Return whether there is a body from `src` to `dst`: real floats but float64, or no change."""
    floats = {src.family, dst.family} == {ElementKind.FLOAT} and DType.FLOAT64 not in (src, dst)
    return src is dst or floats


def packing_name(src: DType, dst: DType, scaled: bool) -> str:
    """Return the name of the kernel for dst = src, or dst = src * factor where `scaled` or cast.

    TypeError for dtypes that are not real floats with at most 32 bits, unless for a plain copy.
    """
    if not supports(src, dst) or (scaled and not supports(src, DType.FLOAT32)):
        raise TypeError(f"there is no GPU kernel from {src.label} to {dst.label}")
    return f"cast_{src.label}_to_{dst.label}" if scaled or src is not dst else "copy_chunk"


def copy_body(target: Target) -> Any:
    """Return the body for dst[:] = src, for any dtype."""
    word = _word(target)
    block_of, thread_of, threads_of = coordinates(target)
    move64 = _move(target, 16, _UNROLLED)
    move16, move8, move4, move1 = (_move(target, word) for word in (16, 8, 4, 1))

    def copy_chunk(table, chunks, factor, place):  # type: ignore[no-untyped-def]
        """dst[first : first + CHUNK] = src[first : first + CHUNK], in bytes"""
        thread, threads = thread_of(place), threads_of(place)
        chunk = chunks + 16 * block_of(place)
        row, first = table + 24 * word(chunk), word(chunk + 8)
        dst, src = word(row) + first, word(row + 8) + first
        nbytes = min(word(row + 16) - first, CHUNK)
        odd = (dst | src) & 15
        done = 0
        if odd == 0:
            stride = 16 * threads
            if nbytes >= 4 * stride:  # once: a loop would be unrolled, which costs registers
                move64(dst + 16 * thread, src + 16 * thread, stride)
                done = 4 * stride
            at = done + 16 * thread
            done = nbytes & -16
            while at < done:
                move16(dst + at, src + at, 0)
                at += stride
        elif odd & 7 == 0:
            done = nbytes & -8
            at = 8 * thread
            while at < done:
                move8(dst + at, src + at, 0)
                at += 8 * threads
        elif odd & 3 == 0:
            done = nbytes & -4
            at = 4 * thread
            while at < done:
                move4(dst + at, src + at, 0)
                at += 4 * threads
        at = done + thread
        while at < nbytes:
            move1(dst + at, src + at, 0)
            at += threads

    return copy_chunk


def cast_body(target: Target, src: DType, dst: DType) -> Any:
    """Return the body for dst[:] = src * factor; float32 in between, rounded once."""
    read, write = src.itemsize, dst.itemsize
    lanes = 16 // min(read, write)
    word = _word(target)
    block_of, thread_of, threads_of = coordinates(target)
    wide_step, single_step = _cast(target, src, dst, lanes), _cast(target, src, dst, 1)

    def cast_chunk(table, chunks, factor, place):  # type: ignore[no-untyped-def]
        """dst[first : first + n] = src[first : first + n] * factor, in elements"""
        thread, threads = thread_of(place), threads_of(place)
        chunk = chunks + 16 * block_of(place)
        row, first = table + 24 * word(chunk), word(chunk + 8)
        to, at = word(row) + first // read * write, word(row + 8) + first
        count = min(word(row + 16) - first, CHUNK) // read
        done = 0
        if (to | at) & 15 == 0:
            done = count // lanes * lanes
            i = lanes * thread
            while i < done:
                wide_step(to + i * write, at + i * read, factor)
                i += lanes * threads
        i = done + thread
        while i < count:
            single_step(to + i * write, at + i * read, factor)
            i += threads

    return cast_chunk


def pointer(b: Builder, target: Target, address: Value, kind: ir.Type = simd.I8) -> Value:
    """Return an address in a target's memory as a pointer."""
    return b.inttoptr(address, ir.PointerType(kind, target.space))


def _word(target: Target) -> Any:
    """Return the function that reads an int64."""

    @simd.emits(types.int64(types.int64), target.intrinsic)
    def word(b: Builder, address: Value) -> Value:
        return b.load(pointer(b, target, address, simd.I64), align=8)

    return word


def coordinates(target: Target) -> list[Any]:
    """Return the functions of `place` that read block, thread, and threads in a block."""

    def reading(index: int) -> Any:
        @simd.emits(types.int64(types.int64), target.intrinsic)
        def coordinate(b: Builder, place: Value) -> Value:
            return target.coordinate(b, place, index)

        return coordinate

    return [reading(index) for index in range(3)]


def _move(target: Target, word: int, times: int = 1) -> Any:
    """Return the function that copies `times` words, `stride` bytes apart: loaded, then stored."""

    @simd.emits(types.void(types.int64, types.int64, types.int64), target.intrinsic)
    def move(b: Builder, to: Value, at: Value, stride: Value) -> None:
        kind, steps = WORDS[word], [b.mul(stride, simd.I64(i)) for i in range(times)]
        found = [b.load(pointer(b, target, b.add(at, step), kind), align=word) for step in steps]
        for value, step in zip(found, steps, strict=True):
            b.store(value, pointer(b, target, b.add(to, step), kind), align=word)

    return move


def _cast(target: Target, src: DType, dst: DType, lanes: int) -> Any:
    @simd.emits(types.void(types.int64, types.int64, types.float64), target.intrinsic)
    def step(b: Builder, to: Value, at: Value, factor: Value) -> None:
        align = _ALIGN if lanes > 1 else src.itemsize
        x = read(b, pointer(b, target, at), simd.STORED[src], lanes, align)
        wide = simd.WIDEN[src](b, x) if src in simd.WIDEN else x
        product = b.fmul(wide, simd.spread(b, b.fptrunc(factor, simd.FLOAT), lanes))
        y = simd.NARROW[dst](b, product) if dst in simd.NARROW else product
        write(b, pointer(b, target, to), y, _ALIGN if lanes > 1 else dst.itemsize)

    return step


def read(b: Builder, at: Value, element: ir.Type, lanes: int, align: int) -> Value:
    """Load elements: small elements as words, which NVVM loads at once, then taken apart."""
    parts = _parts(element, lanes)
    if parts == 1:
        return b.load(simd.pointer_to(b, at, simd.vector(element, lanes)), align=align)
    words = b.load(simd.pointer_to(b, at, simd.vector(simd.I32, lanes // parts)), align=align)
    shifts = [ir.Constant(words.type, [32 // parts * i] * words.type.count) for i in range(parts)]
    found = [b.trunc(b.lshr(words, by), simd.vector(element, words.type.count)) for by in shifts]
    return _interleaved(b, found)


def write(b: Builder, at: Value, value: Value, align: int) -> None:
    """Store elements as `read` loads them."""
    element, lanes = value.type.element, value.type.count
    parts = _parts(element, lanes)
    if parts > 1:
        wide = simd.vector(simd.I32, lanes // parts)
        found = ir.Constant(wide, [0] * wide.count)
        for i in range(parts):
            part = simd.shuffle(b, value, value, list(range(i, lanes, parts)))
            by = ir.Constant(wide, [32 // parts * i] * wide.count)
            found = b.or_(found, b.shl(b.zext(part, wide), by))
        value = found
    b.store(value, simd.pointer_to(b, at, value.type), align=align)


def _interleaved(b: Builder, parts: Sequence[Value]) -> Value:
    """Return lane 0 of each part, then lane 1 of each, and so on."""
    whole = parts[0]
    for at, part in enumerate(parts[1:], 1):
        # Bring both to the same length, then place the new lanes behind each group.
        count = part.type.count
        lanes = []
        for lane in range(count):
            lanes += [*range(lane * at, lane * at + at), whole.type.count + lane]
        padding = [min(lane, count - 1) for lane in range(whole.type.count)]
        whole = simd.shuffle(b, whole, simd.shuffle(b, part, part, padding), lanes)
    return whole


def _parts(element: ir.Type, lanes: int) -> int:
    """Return how many elements share a word; 1 where they need not."""
    small = isinstance(element, ir.IntType) and element.width < 32 and lanes > 1
    return 32 // element.width if small else 1
