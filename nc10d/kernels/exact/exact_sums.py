"""Exact sums of floats, and of products of floats: integers in place of rounded numbers.

Contract: void(words, x, y, count), with the address of contiguous elements in `x`, and in `y` for
products; `words` is the address of the int64 words in `SumLayout`. A kernel adds its elements to
the number that the words hold. No bit is lost, so neither order nor partition matters, and ranks
may add their words.

Vector code sums a block. Each lane has a cascade of accumulators. A double that begins as
1.5 * 2**e rounds each addition to a multiple of 2**(e - 52); the lost part is exact (FastTwoSum,
Dekker 1971) and goes to the next accumulator, 43 bits below. The bits that an accumulator has
gained are an integer (as in Demmel and Nguyen 2015, and Rump, Ogita and Oishi 2008). If an element
was too large for the first accumulator, or had bits below the last, the block is added again: to
accumulators that fit its largest element, to more accumulators, at last as integers (Neal 2015). A
float64 product is a sum of two floats (Veltkamp's splitting, Dekker's product, no FMA) or, where
that is not exact, an integer; other products are exact as float64.

Three bins with 40 bits (Ahrens, Demmel and Nguyen 2020) need six words, but drop the bits below:
any order gives the same bits, but not always the rounded sum's. Words for the whole range are right
always, and a message has 136 to 1,104 bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils

from nc10d.arrays.dtypes import DType, ElementType
from nc10d.kernels import simd
from nc10d.kernels import words as memory
from nc10d.kernels.cache import compiled, entry_point, made_once
from nc10d.kernels.simd import DOUBLE, I32, I64, WIDEN, Builder, Value, emits, splat, vector

LIMB = 32
"""A limb's bits. The rest of its word is for carries: up to 2**30 ranks, or 2**17 blocks."""
COUNTS = 4
"""Words behind the limbs: how many elements are NaN, inf and -inf, and how many there are."""

_LANES = 8
_BLOCK = 256 * _LANES
_LEVEL_BITS = 43
_HEADROOM = 10
"""A first accumulator's exponent less the largest element's: 256 elements, sign, 1.5, rounding."""
_HIGHEST_TOP = 1023 - _HEADROOM
_LEAST_PRODUCT = 2.0**-960
"""Products from here on, and those that are zero, are sums of two floats."""
_LARGEST = 1.7976931348623157e308
_INTS = vector(I64, _LANES)


@dataclass(frozen=True, slots=True)
class SumLayout:
    """The words of a sum: `limbs` in units of 2**`lowest`, the lowest first, then COUNTS.

    The limbs have 64 bits more than a single element. A lane has `least` accumulators, and
    `most` in blocks that need more.
    """

    dtype: DType
    products: bool
    lowest: int
    limbs: int
    least: int
    most: int

    @property
    def name(self) -> str:
        """The kernel's name."""
        return f"exact_{'dot' if self.products else 'sum'}_{self.dtype.label}"


LAYOUTS: dict[tuple[ElementType, bool], SumLayout] = {
    (layout.dtype, layout.products): layout
    for layout in (
        # A float32 has up to 52 zeros at its end as a float64.
        *(SumLayout(dtype, False, -149 - 52, 13, 1, 7) for dtype in (DType.FLOAT32, *WIDEN)),
        *(SumLayout(dtype, True, 2 * (-149 - 52), 23, 2, 7) for dtype in (DType.FLOAT32, *WIDEN)),
        SumLayout(DType.FLOAT64, False, -1074, 68, 2, 6),
        SumLayout(DType.FLOAT64, True, 2 * -1074, 134, 4, 6),
    )
}
_kernels: dict[str, Any] = {}


def exact_kernel(layout: SumLayout) -> Callable[..., None]:
    """Return the kernel, which releases the GIL. May block to compile."""
    make = lambda: entry_point(compiled_kernel(layout))  # noqa: E731
    kernel: Callable[..., None] = made_once(_kernels, layout.name, make)
    return kernel


def every_kernel() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the wide floats' kernels, by name, and calls that make them: for warming up."""
    for layout in LAYOUTS.values():
        if layout.dtype not in WIDEN:
            yield layout.name, partial(exact_kernel, layout)


def compiled_kernel(layout: SumLayout) -> Any:
    """Return the kernel as Numba has it. Blocks to compile."""
    size, limbs, lowest, levels = layout.dtype.itemsize, layout.limbs, layout.lowest, layout.most
    low = max(lowest + 52, -1022)
    quick, deep = (_block_sums(layout, low, count) for count in (layout.least, levels))
    largest, add_elements = _largest(layout), _add_elements(layout)

    def kernel(words, x, y, count):  # type: ignore[no-untyped-def]
        """words += sum(x), or sum(x * y)"""
        top, blocks, missed = low, 0, 0
        for start in range(0, count * size, _BLOCK * size):
            a, b = x + start, y + start
            end = min(_BLOCK * size, count * size - start)
            whole = end & -(_LANES * size)
            is_deep = 4 * missed > blocks
            while True:
                sums = deep(a, b, whole, top) if is_deep else quick(a, b, whole, top)
                own = top if sums[levels] else max((largest(a, b, whole) >> 52) - 1022, low)
                if sums[levels] or own > _HIGHEST_TOP or (own == top and is_deep):
                    break
                is_deep |= own == top
                top = own
            blocks, missed = blocks + 1, missed + is_deep
            if blocks & 0x1FFFF == 0:
                nc10d_carry(words, limbs)
            if sums[levels]:
                for level in range(levels):
                    exponent = max(top + _HEADROOM - level * _LEVEL_BITS, low)
                    nc10d_add_integer(words, sums[level], exponent - 52 - lowest)
            add_elements(words, a, b, whole if sums[levels] else 0, end)
        nc10d_carry(words, limbs)
        nc10d_add_word(words + 8 * (limbs + 3), count)

    kernel.__name__ = kernel.__qualname__ = layout.name
    return compiled("void(int64, int64, int64, int64)")(kernel)


# The vector code


def _block_sums(layout: SumLayout, low: int, levels: int) -> Any:
    """Return the function (x, y, nbytes, top) that sums a block, whose elements are < 2**top.

    The result has an int for each level in the layout, and whether these are the whole sum.
    """
    in_two = layout.products and layout.dtype is DType.FLOAT64

    @emits(types.UniTuple(types.int64, layout.most + 1)(*[types.int64] * 4))
    def block_sums(b: Builder, x: Value, y: Value, nbytes: Value, top: Value) -> Value:
        firsts = []
        for level in range(levels):
            exponent = b.add(top, I64(_HEADROOM - level * _LEVEL_BITS))
            exponent = b.select(b.icmp_signed(">", exponent, I64(low)), exponent, I64(low))
            firsts.append(simd.spread(b, b.fmul(_power(b, exponent), DOUBLE(1.5)), _LANES))
        sums = [cgutils.alloca_once_value(b, first) for first in firsts]
        limit = simd.spread(b, _power(b, top), _LANES)
        wrong, lost = (cgutils.alloca_once_value(b, ir.Constant(_INTS, None)) for _ in range(2))

        def keep(place: Value, found: Value) -> None:
            b.store(b.or_(b.load(place), found), place)

        def add(value: Value, level: int) -> None:
            for place in sums[level:]:
                before = b.load(place)
                after = b.fadd(before, value)
                value = b.fsub(value, b.fsub(after, before))
                b.store(after, place)
            keep(lost, b.bitcast(value, _INTS))

        for value, factors in _values(b, layout, x, y, nbytes):
            too_large = b.fcmp_unordered(">=", _size(b, value), limit)
            if in_two:
                too_large = b.or_(too_large, _is_small(b, value, *factors))
                add(_rest_of_product(b, value, *factors), 1)
            keep(wrong, b.sext(too_large, _INTS))
            add(value, 0)
        results = [
            _over_lanes(b, b.sub(b.bitcast(b.load(place), _INTS), b.bitcast(first, _INTS)), b.add)
            for place, first in zip(sums, firsts, strict=True)
        ]
        results += [I64(0)] * (layout.most - levels)
        lost_bits = b.shl(b.load(lost), splat(b.load(lost), 1))  # without a sign: -0.0 is nothing
        failed = _over_lanes(b, b.or_(lost_bits, b.load(wrong)), b.or_)
        return cgutils.pack_array(b, [*results, b.zext(b.icmp_signed("==", failed, I64(0)), I64)])

    return block_sums


def _largest(layout: SumLayout) -> Any:
    """Return the function (x, y, nbytes) for the bits of a block's largest size."""

    @emits(types.int64(*[types.int64] * 3))
    def largest(b: Builder, x: Value, y: Value, nbytes: Value) -> Value:
        def larger(one: Value, other: Value) -> Value:
            return b.select(b.icmp_signed(">", one, other), one, other)

        found = cgutils.alloca_once_value(b, ir.Constant(_INTS, None))
        for value, _ in _values(b, layout, x, y, nbytes):
            b.store(larger(b.bitcast(_size(b, value), _INTS), b.load(found)), found)
        return _over_lanes(b, b.load(found), larger)

    return largest


def _values(
    b: Builder, layout: SumLayout, x: Value, y: Value, nbytes: Value
) -> Iterator[tuple[Value, tuple[Value, ...]]]:
    """Yield, inside a loop over a block, its elements, or the products and their factors."""
    step = ir.Constant(I64, _LANES * layout.dtype.itemsize)
    with cgutils.for_range_slice(b, ir.Constant(I64, 0), nbytes, step, I64) as (at, _):
        value = _load(b, layout.dtype, b.add(x, at), _LANES)
        if layout.products:
            other = _load(b, layout.dtype, b.add(y, at), _LANES)
            yield b.fmul(value, other), (value, other)
        else:
            yield value, ()


def _load(b: Builder, dtype: DType, at: Value, lanes: int) -> Value:
    """Load elements as float64."""
    found = simd.load(b, at, simd.STORED[dtype], lanes)
    found = WIDEN[dtype](b, found) if dtype in WIDEN else found
    return found if dtype is DType.FLOAT64 else b.fpext(found, vector(DOUBLE, lanes))


def _power(b: Builder, exponent: Value) -> Value:
    """Return 2.0**exponent, which is normal."""
    return b.bitcast(b.shl(b.add(exponent, I64(1023)), I64(52)), DOUBLE)


def _size(b: Builder, x: Value) -> Value:
    bits = b.bitcast(x, _INTS)
    return b.bitcast(b.and_(bits, splat(bits, (1 << 63) - 1)), x.type)


def _over_lanes(b: Builder, x: Value, combine: Callable[[Value, Value], Value]) -> Value:
    total = b.extract_element(x, I32(0))
    for lane in range(1, x.type.count):
        total = combine(total, b.extract_element(x, I32(lane)))
    return total


def _is_small(b: Builder, product: Value, x: Value, y: Value) -> Value:
    """Return the mask for products that are not zero and may have bits below a float64's last."""
    zero = splat(x, 0.0)
    nonzero = b.and_(b.fcmp_unordered("!=", x, zero), b.fcmp_unordered("!=", y, zero))
    return b.and_(nonzero, b.fcmp_ordered("<", _size(b, product), splat(x, _LEAST_PRODUCT)))


def _rest_of_product(b: Builder, product: Value, x: Value, y: Value) -> Value:
    """Return x * y - product, exact if no part overflows; NaN or infinite otherwise."""
    (xh, xl), (yh, yl) = _split(b, x), _split(b, y)
    rest = b.fsub(product, b.fmul(xh, yh))
    rest = b.fsub(b.fsub(rest, b.fmul(xl, yh)), b.fmul(xh, yl))
    return b.fsub(b.fmul(xl, yl), rest)


def _split(b: Builder, x: Value) -> tuple[Value, Value]:
    """Return two floats with 26 bits whose sum is x (Veltkamp 1968)."""
    scaled = b.fmul(x, splat(x, 2.0**27 + 1))
    high = b.fsub(scaled, b.fsub(scaled, x))
    return high, b.fsub(x, high)


# Elements as integers, element by element


def _add_elements(layout: SumLayout) -> Any:
    """Return the function that adds a block's elements from byte `start` to byte `end`."""
    size, lowest, products = layout.dtype.itemsize, layout.lowest, layout.products
    counts = 8 * layout.limbs

    @emits(types.float64(types.int64))
    def element(b: Builder, at: Value) -> Value:
        return b.extract_element(_load(b, layout.dtype, at, 1), I32(0))

    def add_elements(words, x, y, start, end):  # type: ignore[no-untyped-def]
        for at in range(start, end, size):
            a, b = element(x + at), element(y + at) if products else 1.0
            if not (abs(a) <= _LARGEST and abs(b) <= _LARGEST):
                value = a * b
                place = 0 if value != value else 8 if value > 0.0 else 16
                nc10d_add_word(words + counts + place, 1)
            elif products:
                nc10d_add_product(words, a, b, lowest)
            else:
                m, exponent = nc10d_parts(a)
                nc10d_add_integer(words, m, exponent - lowest)

    # Compiled helpers have names that are unique in the package.
    add_elements.__qualname__ = f"nc10d_add_to_{layout.name}"
    return njit(nogil=True)(add_elements)


@emits(types.int64(types.float64))
def _bits(b: Builder, x: Value) -> Value:
    return b.bitcast(x, I64)


@njit(nogil=True)
def nc10d_parts(x: float) -> tuple[int, int]:
    """Return the integer m and the exponent e for a finite x = m * 2**e."""
    found, hidden = _bits(x), 1 << 52
    biased = found >> 52 & 0x7FF
    size = found & (hidden - 1) | (hidden if biased else 0)
    return (-size if found < 0 else size), max(biased, 1) - 1075


@njit(nogil=True)
def nc10d_add_product(words: int, x: float, y: float, lowest: int) -> None:
    """words += x * y, for finite numbers"""
    (m, at), (n, more) = nc10d_parts(x), nc10d_parts(y)
    (mh, ml), (nh, nl) = divmod(m, 1 << 27), divmod(n, 1 << 27)
    at += more - lowest
    nc10d_add_integer(words, ml * nl, at)
    nc10d_add_integer(words, mh * nl + ml * nh, at + 27)
    nc10d_add_integer(words, mh * nh, at + 54)


@njit(nogil=True)
def nc10d_add_integer(words: int, m: int, at: int) -> None:
    """words += m * 2**at, in units of the first limb; m has fewer than 63 bits"""
    place, shift, mask = words + 8 * (at // LIMB), at % LIMB, (1 << LIMB) - 1
    sign = m >> 63  # no branch: half the elements would take it
    size = (m ^ sign) - sign
    limbs = size << shift & mask, size >> (LIMB - shift) & mask, size >> LIMB >> (LIMB - shift)
    nc10d_add_word(place, (limbs[0] ^ sign) - sign)
    nc10d_add_word(place + 8, (limbs[1] ^ sign) - sign)
    nc10d_add_word(place + 16, (limbs[2] ^ sign) - sign)


@njit(nogil=True)
def nc10d_carry(words: int, limbs: int) -> None:
    """Leave 32 bits in each limb but the last, which has the sign."""
    for at in range(words, words + 8 * (limbs - 1), 8):
        carry = memory.load(at) >> LIMB
        nc10d_add_word(at, -(carry << LIMB))
        nc10d_add_word(at + 8, carry)


@njit(nogil=True)
def nc10d_add_word(address: int, value: int) -> None:
    """words[0] += value"""
    memory.store(address, memory.load(address) + value)
