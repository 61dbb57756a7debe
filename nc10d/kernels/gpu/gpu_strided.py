"""Copies between any strides by blocks of threads: a strided array to a contiguous one, and back.

Contract: a kernel is void(dst, src, count, used, dst_step, src_step, sides, place): int64, and
`sides` many of them. It copies `count` words from src to dst. Both have the same sides, which are
dimensions with a length and a step in bytes for each array; the innermost side comes first, and a
launch has at most SIDES. Steps may be negative, or 0 in src. Addresses and steps are multiples of a
word. src and dst share no byte.

A word's place along side k is derived from q(k) = index // (length(0) * ... * length(k - 1)):

    offset = q(0) * step(0) + sum of q(k) * (step(k) - step(k - 1) * length(k - 1)) for k >= 1

So a word needs a quotient for each further side. The host computes the divisor's reciprocal, and
the GPU multiplies: q(k) = (index * reciprocal >> 64) >> shift, exact for each index below 2**63
(Granlund and Montgomery, "Division by invariant integers using multiplication", 1994). `sides` has
four numbers for each side but the innermost: reciprocal, shift, and the factor of q(k) in dst and
in src. Consecutive threads copy consecutive words along the innermost side.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils

from nc10d.arrays.buffer import Buffer
from nc10d.kernels import simd
from nc10d.kernels.gpu.gpu_pack import THREADS, WORDS, Target, coordinates, pointer
from nc10d.kernels.simd import I64, Builder, Value

SIDES = 8
"""The dimensions in a launch: an array that needs more takes a launch for each place in these."""
WORDS_A_THREAD = 4
"""All loads of a thread come before its stores: memory is kept busy by loads in flight."""
BOUNDS = (THREADS, 5)
"""Five blocks on a multiprocessor at once: 48 registers a thread, for the addresses."""
SIGNATURE = types.void(
    *[types.int64] * 6, types.UniTuple(types.int64, 4 * (SIDES - 1)), types.int64
)
_WIDE = ir.IntType(128)


class Side(NamedTuple):
    """A dimension: the length, and the steps in the two arrays, in bytes."""

    length: int
    dst_step: int
    src_step: int


def strided_name(word: int) -> str:
    """Return the name of the kernel for words with so many bytes."""
    return f"strided_copy_b{8 * word}"


def strided_body(target: Target, word: int) -> Any:
    """Return the body for words with 1, 2, 4, 8 or 16 bytes."""
    block_of, thread_of, threads_of = coordinates(target)
    copy_words = _copy_words(target, word)

    def strided_copy(dst, src, count, used, dst_step, src_step, sides, place):  # type: ignore[no-untyped-def]
        """dst.flat[first : first + n : threads] = src.flat[first : first + n : threads]"""
        threads = threads_of(place)
        first = WORDS_A_THREAD * threads * block_of(place) + thread_of(place)
        copy_words(first, threads, count - 1, dst, src, used, dst_step, src_step, sides)

    return strided_copy


def _copy_words(target: Target, word: int) -> Any:
    """Return the function that copies a thread's words; past the last word, that one again."""

    @simd.emits(types.void(*[types.int64] * 8, SIGNATURE.args[6]), target.intrinsic)
    def copy_words(
        b: Builder,
        first: Value,
        stride: Value,
        last: Value,
        dst: Value,
        src: Value,
        used: Value,
        dst_step: Value,
        src_step: Value,
        sides: Value,
    ) -> None:
        places = []
        for number in range(WORDS_A_THREAD):
            index = b.add(first, b.mul(stride, I64(number)))
            index = b.select(b.icmp_signed("<", index, last), index, last)
            places.append((index, _Sum(b, dst), _Sum(b, src)))
        for index, to, at in places:
            to.add(index, dst_step)
            at.add(index, src_step)

        def add_sides(number: int) -> None:
            if number == SIDES:
                return
            with b.if_then(b.icmp_signed(">", used, I64(number))):
                numbers = range(4 * (number - 1), 4 * number)
                reciprocal, shift, in_dst, in_src = (b.extract_value(sides, i) for i in numbers)
                for index, to, at in places:
                    quotient = b.lshr(_high(b, index, reciprocal), shift)
                    to.add(quotient, in_dst)
                    at.add(quotient, in_src)
                add_sides(number + 1)

        add_sides(1)
        kind = WORDS[word]
        found = [b.load(pointer(b, target, at.value, kind), align=word) for _, _, at in places]
        for value, (_, to, _) in zip(found, places, strict=True):
            b.store(value, pointer(b, target, to.value, kind), align=word)

    return copy_words


class _Sum:
    """An address to which parts of an offset are added."""

    def __init__(self, b: Builder, address: Value) -> None:
        self._b = b
        self._room = cgutils.alloca_once_value(b, address)

    def add(self, times: Value, step: Value) -> None:
        self._b.store(self._b.add(self.value, self._b.mul(times, step)), self._room)

    @property
    def value(self) -> Value:
        return self._b.load(self._room)


def _high(b: Builder, x: Value, y: Value) -> Value:
    """Return the upper half of the product of two unsigned numbers."""
    product = b.mul(b.zext(x, _WIDE), b.zext(y, _WIDE))
    return b.trunc(b.lshr(product, _WIDE(64)), I64)


def sides_of(x: Buffer) -> tuple[int, list[Side]]:
    """Return the bytes that are contiguous in an array, and the sides of copying it in C order.

    The array is src, and dst is packed. The innermost side comes first.
    """
    sides: list[Side] = []
    width = in_copy = x.dtype.itemsize
    for count, step in reversed(list(zip(x.shape, x.strides, strict=True))):
        if count == 1:
            continue
        if not sides and step == width:  # continues the contiguous bytes
            width *= count
        elif sides and step == sides[-1].length * sides[-1].src_step:  # continues the inner side
            sides[-1] = sides[-1]._replace(length=sides[-1].length * count)
        else:
            sides.append(Side(count, in_copy, step))
        in_copy *= count
    return width, sides


Launch = tuple[int, ...]
"""A kernel's handle, the number of blocks, and the arguments."""


def strided_launches(
    dst: int, src: int, width: int, sides: Sequence[Side], kernel: Callable[[int], int]
) -> Iterator[Launch]:
    """Yield the launches that copy `width` bytes at each place along the sides, innermost first.

    `kernel(word)` returns the kernel for such words. Launches are one, or for more than SIDES
    dimensions one for each place along the outermost.
    """
    together = dst | src | width | 16
    for side in sides:
        together |= side.dst_step | side.src_step
    word = together & -together
    if width > word:
        sides = [Side(width // word, word, word), *sides]
    inner, outer = sides[:SIDES] or [Side(1, 0, 0)], sides[SIDES:]
    count, arguments = _arguments(inner)
    blocks = -(-count // (THREADS * WORDS_A_THREAD))
    for places in itertools.product(*(range(side.length) for side in outer)):
        to = dst + sum(place * side.dst_step for place, side in zip(places, outer, strict=True))
        at = src + sum(place * side.src_step for place, side in zip(places, outer, strict=True))
        yield kernel(word), blocks, to, at, count, *arguments


def _arguments(sides: Sequence[Side]) -> tuple[int, Sequence[int]]:
    """Return the number of words, and a kernel's arguments behind that number."""
    count, found = 1, [len(sides), sides[0].dst_step, sides[0].src_step]
    for inner, side in itertools.pairwise(sides):
        count *= inner.length
        in_dst = side.dst_step - inner.dst_step * inner.length
        found += *reciprocal(count), in_dst, side.src_step - inner.src_step * inner.length
    found += [0] * 4 * (SIDES - len(sides))
    return count * sides[-1].length, [*found, 0]


def reciprocal(divisor: int) -> tuple[int, int]:
    """Return a divisor's reciprocal, whose 64 bits are given as an int64, and the shift."""
    shift = (divisor - 1).bit_length() - 1
    return -(-(1 << 64 + shift) // divisor) - (1 << 64), shift
