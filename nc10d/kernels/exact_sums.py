"""Exact sums of floats, and of products of floats: integers in place of rounded numbers.

Contract: void(words, x, y, count), with the address of contiguous elements in `x`, and in `y` for
products; `words` is the address of int64 words, as `Layout` says. A kernel adds its elements to
what the words stand for. No bit is lost, so neither order nor partition matters, and ranks may add
their words.

The elements go in blocks. In a block's vector code each lane has a cascade of accumulators. A
double that begins as 1.5 * 2**e rounds each addition to a multiple of 2**(e - 52); the lost part is
exact (FastTwoSum, Dekker 1971) and goes to the next accumulator, 43 bits below. The bits of an
accumulator, less those of its beginning, are an integer (as in Demmel and Nguyen 2015; Rump, Ogita
and Oishi 2008 split like that). A block is not used if an element was too large for the first
accumulator or had bits below the last: the block is added again, with accumulators that fit its
largest element, or else element by element, as integers (as Neal 2015).

Three bins of 40 bits, as in Ahrens, Demmel and Nguyen 2020, need six words, but drop what lies
below the bins: any order gives the same bits, and these are not those of the rounded sum. Words for
the whole range cost a message of 136 to 1,104 bytes instead of 48, and the result is the best one.

Products of float32 are exact as float64. A product of float64 is the sum of two floats (Veltkamp's
and Dekker's, without FMA) or, outside the range where that is exact, an integer of 106 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils

from nc10d.arrays.dtypes import DType
from nc10d.kernels import words as memory
from nc10d.kernels.cache import compiled, entry_point, made_once
from nc10d.kernels.simd import DOUBLE, I64, STORED, Builder, Value, emits, load, splat, spread

LIMB = 32
"""Bits of a limb. The rest of its word is for carries: from 2**31 ranks, or MOST_ELEMENTS."""
MOST_ELEMENTS = 1 << 28
"""The most elements of a call."""
NAN, INFINITY, NEGATIVE_INFINITY, COUNT = range(-4, 0)
"""The words behind the limbs: how many elements or products are that, and how many there are."""

SIGNATURE = "void(int64, int64, int64, int64)"
_LANES = 8
_BLOCK = 256 * _LANES
_LEVEL_BITS = 43
_HEADROOM = 10
"""A first accumulator's exponent less the largest element's: 256 elements, sign, 1.5, rounding."""
_LARGEST_TOP = 1023 - _HEADROOM
_LEAST_PRODUCT = 2.0**-960
"""Nonzero products from here on are the sum of two floats."""
_LOW = (1 << LIMB) - 1
_SIGNIFICAND = (1 << 52) - 1
_HALF = 27
_HALF_LOW = (1 << _HALF) - 1
_LARGEST = 1.7976931348623157e308


@dataclass(frozen=True, slots=True)
class Layout:
    """The words of a sum: limbs in units of 2**`lowest`, the lowest first, then four counts.

    All elements or products are below 2**`highest`. A lane has `levels` accumulators.
    """

    dtype: DType
    products: bool
    lowest: int
    highest: int
    levels: int

    @property
    def limbs(self) -> int:
        """The number of limbs; 64 bits above `highest` are for carries."""
        return -((self.lowest - self.highest - 64) // LIMB)

    @property
    def words(self) -> int:
        """The number of words."""
        return self.limbs - NAN

    @property
    def name(self) -> str:
        """The kernel's name."""
        return f"exact_{'dot' if self.products else 'sum'}_{self.dtype.label}"


# A float32 has up to 52 zeros at its end as a float64.
LAYOUTS = {
    (layout.dtype, layout.products): layout
    for layout in (
        Layout(DType.FLOAT32, False, -149 - 52, 128, 2),
        Layout(DType.FLOAT32, True, -298 - 52, 256, 3),
        Layout(DType.FLOAT64, False, -1074, 1024, 3),
        Layout(DType.FLOAT64, True, -2148, 2048, 4),
    )
}
_kernels: dict[str, Any] = {}


def exact_kernel(layout: Layout) -> Callable[..., None]:
    """Return the kernel, which lets go of the GIL. May block to compile."""
    entry: Callable[..., None] = entry_point(dispatcher(layout))
    return entry


def dispatcher(layout: Layout) -> Any:
    """Return the kernel as Numba has it. May block to compile."""
    return made_once(_kernels, layout.name, lambda: _compile(layout))


def every_kernel() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the name of each kernel and the call that makes it: for warming up."""
    for layout in LAYOUTS.values():
        yield layout.name, partial(exact_kernel, layout)


def _compile(layout: Layout) -> Any:
    size, limbs, lowest, levels = layout.dtype.itemsize, layout.limbs, layout.lowest, layout.levels
    low = max(lowest + 52, -1022)
    block_sums, largest, add = _block_sums(layout, low), _largest(layout), _add_elements(layout)

    def kernel(words, x, y, count):  # type: ignore[no-untyped-def]
        """words += sum(x), or sum(x * y)"""
        top = -1022
        for start in range(0, count * size, _BLOCK * size):
            a, b = x + start, y + start
            end = min(_BLOCK * size, count * size - start)
            whole = end & -(_LANES * size)
            sums = block_sums(a, b, whole, top)
            if not sums[levels]:
                own = nc10d_top(largest(a, b, whole))
                if own != top and own <= _LARGEST_TOP:
                    top = own
                    sums = block_sums(a, b, whole, top)
            if sums[levels]:
                for level in range(levels):
                    exponent = max(top + _HEADROOM - level * _LEVEL_BITS, low)
                    nc10d_add_integer(words, sums[level], exponent - 52 - lowest)
            add(words, a, b, whole if sums[levels] else 0, end)
        nc10d_carry(words, limbs)
        last = words + 8 * (limbs + 3)
        memory.store(last, memory.load(last) + count)

    kernel.__name__ = kernel.__qualname__ = layout.name
    return compiled(SIGNATURE)(kernel)


# The vector code


def _block_sums(layout: Layout, low: int) -> Any:
    """Return the function of (x, y, nbytes, top) that sums a block, whose elements are < 2**top.

    The result has an int for each level, and whether these are the whole sum.
    """
    element, size, levels = STORED[layout.dtype], layout.dtype.itemsize, layout.levels
    in_two = layout.products and layout.dtype is DType.FLOAT64

    @emits(types.UniTuple(types.int64, levels + 1)(*[types.int64] * 4))
    def block_sums(b: Builder, x: Value, y: Value, nbytes: Value, top: Value) -> Value:
        firsts = [_first(b, top, _HEADROOM - level * _LEVEL_BITS, low) for level in range(levels)]
        sums = [cgutils.alloca_once_value(b, spread(b, first, _LANES)) for first in firsts]
        limit = spread(b, b.bitcast(b.shl(b.add(top, I64(1023)), I64(52)), DOUBLE), _LANES)
        lost = cgutils.alloca_once_value(b, b.bitcast(splat(limit, 0.0), _ints(_LANES)))

        def keep(found: Value) -> None:
            b.store(b.or_(b.load(lost), found), lost)

        def add(value: Value, level: int) -> None:
            for place in sums[level:]:
                before = b.load(place)
                after = b.fadd(before, value)
                value = b.fsub(value, b.fsub(after, before))
                b.store(after, place)
            bits = b.bitcast(value, _ints(_LANES))
            keep(b.and_(bits, splat(bits, (1 << 63) - 1)))  # -0.0 is nothing

        zero, step = ir.Constant(I64, 0), ir.Constant(I64, _LANES * size)
        with cgutils.for_range_slice(b, zero, nbytes, step, I64) as (at, _):
            value = _wide(b, load(b, b.add(x, at), element, _LANES))
            if layout.products:
                other = _wide(b, load(b, b.add(y, at), element, _LANES))
                product = b.fmul(value, other)
                if in_two:
                    keep(_mask(b, _is_small(b, value, other, product)))
                    add(_rest_of_product(b, value, other, product), 1)
                value = product
            keep(_mask(b, b.fcmp_unordered(">=", _size(b, value), limit)))
            add(value, 0)
        found = [_difference(b, b.load(s), first) for s, first in zip(sums, firsts, strict=True)]
        whole = b.zext(b.icmp_signed("==", _over_lanes(b, b.load(lost), b.or_), I64(0)), I64)
        return cgutils.pack_array(b, [*found, whole])

    return block_sums


def _first(b: Builder, top: Value, above: int, low: int) -> Value:
    """Return 1.5 * 2**max(top + above, low)."""
    exponent = b.add(top, I64(above))
    exponent = b.select(b.icmp_signed(">", exponent, I64(low)), exponent, I64(low))
    bits = b.or_(b.shl(b.add(exponent, I64(1023)), I64(52)), I64(1 << 51))
    return b.bitcast(bits, DOUBLE)


def _ints(lanes: int) -> ir.VectorType:
    return ir.VectorType(I64, lanes)


def _wide(b: Builder, x: Value) -> Value:
    return x if x.type.element == DOUBLE else b.fpext(x, ir.VectorType(DOUBLE, _LANES))


def _mask(b: Builder, condition: Value) -> Value:
    return b.sext(condition, _ints(_LANES))


def _size(b: Builder, x: Value) -> Value:
    bits = b.bitcast(x, _ints(_LANES))
    return b.bitcast(b.and_(bits, splat(bits, (1 << 63) - 1)), x.type)


def _difference(b: Builder, total: Value, first: Value) -> Value:
    """Return what the lanes have above `first`, in units of the last place."""
    bits = b.bitcast(total, _ints(_LANES))
    return _over_lanes(b, b.sub(bits, spread(b, b.bitcast(first, I64), _LANES)), b.add)


def _over_lanes(b: Builder, x: Value, combine: Callable[[Value, Value], Value]) -> Value:
    total = b.extract_element(x, I64(0))
    for lane in range(1, x.type.count):
        total = combine(total, b.extract_element(x, I64(lane)))
    return total


def _is_small(b: Builder, x: Value, y: Value, product: Value) -> Value:
    """Return the mask for products that are not zero and may have bits below a float64's last."""
    zero = splat(x, 0.0)
    nonzero = b.and_(b.fcmp_unordered("!=", x, zero), b.fcmp_unordered("!=", y, zero))
    small = b.fcmp_ordered("<", _size(b, product), splat(x, _LEAST_PRODUCT))
    return b.and_(nonzero, small)


def _rest_of_product(b: Builder, x: Value, y: Value, product: Value) -> Value:
    """Return x * y - product, exact if no part overflows; NaN or infinite otherwise."""
    (xh, xl), (yh, yl) = _split(b, x), _split(b, y)
    rest = b.fsub(product, b.fmul(xh, yh))
    rest = b.fsub(b.fsub(rest, b.fmul(xl, yh)), b.fmul(xh, yl))
    return b.fsub(b.fmul(xl, yl), rest)


def _split(b: Builder, x: Value) -> tuple[Value, Value]:
    """Return two floats of 26 bits whose sum is x (Veltkamp 1968)."""
    scaled = b.fmul(x, splat(x, 2.0**_HALF + 1))
    high = b.fsub(scaled, b.fsub(scaled, x))
    return high, b.fsub(x, high)


# A block's elements, one by one


def _element(dtype: DType) -> Any:
    @emits(types.float64(types.int64))
    def element(b: Builder, at: Value) -> Value:
        x = b.load(b.inttoptr(at, STORED[dtype].as_pointer()), align=1)
        return x if x.type == DOUBLE else b.fpext(x, DOUBLE)

    return element


@emits(types.int64(types.float64))
def _bits(b: Builder, x: Value) -> Value:
    return b.bitcast(x, I64)


def _largest(layout: Layout) -> Any:
    """Return the function for the size of a block's largest element or product."""
    element, size, products = _element(layout.dtype), layout.dtype.itemsize, layout.products

    def largest(x, y, nbytes):  # type: ignore[no-untyped-def]
        found = 0.0
        for at in range(0, nbytes, size):
            value = abs(element(x + at) * element(y + at) if products else element(x + at))
            found = value if value > found else found
        return found

    return _helper(largest, layout)


def _add_elements(layout: Layout) -> Any:
    """Return the function that adds the elements from byte `start` to byte `end` to the words."""
    element, size, products = _element(layout.dtype), layout.dtype.itemsize, layout.products
    special, lowest = 8 * layout.limbs, layout.lowest
    in_two = products and layout.dtype is DType.FLOAT64

    def add_elements(words, x, y, start, end):  # type: ignore[no-untyped-def]
        for at in range(start, end, size):
            a = element(x + at)
            b = element(y + at) if products else 1.0
            value = a * b
            if not (abs(a) <= _LARGEST and abs(b) <= _LARGEST):
                kind = 0 if value != value else 8 if value > 0.0 else 16
                place = words + special + kind
                memory.store(place, memory.load(place) + 1)
            elif in_two:
                nc10d_add_product(words, a, b, lowest)
            else:
                m, exponent = nc10d_parts(value)
                nc10d_add_integer(words, m, exponent - lowest)

    return _helper(add_elements, layout)


def _helper(function: Any, layout: Layout) -> Any:
    """Return a function for compiled code, under a name that no other in the package has."""
    function.__qualname__ = f"nc10d_{function.__name__}_{layout.name}"
    return njit(nogil=True)(function)


@njit(nogil=True)
def nc10d_parts(x: float) -> tuple[int, int]:
    """Return the integer m and the exponent e of a finite x = m * 2**e."""
    found = _bits(x)
    size, exponent = found & _SIGNIFICAND, found >> 52 & 0x7FF
    if exponent:
        size |= _SIGNIFICAND + 1
    else:
        exponent = 1
    return (-size if found < 0 else size), exponent - 1075


@njit(nogil=True)
def nc10d_top(size: float) -> int:
    """Return the least e from -1022 on with size < 2**e."""
    return (_bits(size) >> 52) - 1022


@njit(nogil=True)
def nc10d_add_product(words: int, x: float, y: float, lowest: int) -> None:
    """words += x * y, of finite numbers"""
    (m, at), (n, more) = nc10d_parts(x), nc10d_parts(y)
    at += more - lowest
    high, low = m >> _HALF, m & _HALF_LOW
    upper, lower = n >> _HALF, n & _HALF_LOW
    nc10d_add_integer(words, low * lower, at)
    nc10d_add_integer(words, high * lower + low * upper, at + _HALF)
    nc10d_add_integer(words, high * upper, at + 2 * _HALF)


@njit(nogil=True)
def nc10d_add_integer(words: int, m: int, at: int) -> None:
    """words += m * 2**at, in units of the first limb; m has fewer than 63 bits"""
    place, shift, size = words + 8 * (at // LIMB), at % LIMB, abs(m)
    pieces = (size << shift) & _LOW, (size >> (LIMB - shift)) & _LOW, (size >> LIMB) >> (LIMB - shift)
    for number in range(3):
        piece = -pieces[number] if m < 0 else pieces[number]
        memory.store(place + 8 * number, memory.load(place + 8 * number) + piece)


@njit(nogil=True)
def nc10d_carry(words: int, limbs: int) -> None:
    """Leave 32 bits in each limb but the last, which has the sign."""
    for at in range(words, words + 8 * (limbs - 1), 8):
        limb = memory.load(at)
        memory.store(at, limb & _LOW)
        memory.store(at + 8, memory.load(at + 8) + (limb >> LIMB))
