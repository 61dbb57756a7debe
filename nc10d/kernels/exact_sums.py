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
from nc10d.kernels.simd import DOUBLE, I32, I64, STORED, Builder, Value, emits, load, splat, spread

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

    All elements or products are below 2**`highest`. A lane has `least` accumulators, and `most`
    in blocks that need more.
    """

    dtype: DType
    products: bool
    lowest: int
    highest: int
    least: int
    most: int

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
        Layout(DType.FLOAT32, False, -149 - 52, 128, 1, 7),
        Layout(DType.FLOAT32, True, -298 - 52, 256, 2, 7),
        Layout(DType.FLOAT64, False, -1074, 1024, 2, 6),
        Layout(DType.FLOAT64, True, -2148, 2048, 4, 6),
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
    size, limbs, lowest, levels = layout.dtype.itemsize, layout.limbs, layout.lowest, layout.most
    low = max(lowest + 52, -1022)
    quick, deep = (_block_sums(layout, low, count) for count in (layout.least, levels))
    largest, add = _largest(layout), _add_elements(layout)

    def kernel(words, x, y, count):  # type: ignore[no-untyped-def]
        """words += sum(x), or sum(x * y)"""
        top, missed, blocks = low, 0, 0
        for start in range(0, count * size, _BLOCK * size):
            a, b = x + start, y + start
            end = min(_BLOCK * size, count * size - start)
            whole = end & -(_LANES * size)
            is_deep = 4 * missed > blocks
            blocks += 1
            while True:
                sums = deep(a, b, whole, top) if is_deep else quick(a, b, whole, top)
                own = top if sums[levels] else max(nc10d_top(largest(a, b, whole)), low)
                if own > _LARGEST_TOP or (own == top and (is_deep or sums[levels])):
                    break
                if own == top:
                    is_deep = True
                    missed += 1
                top = own
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


def _block_sums(layout: Layout, low: int, levels: int) -> Any:
    """Return the function of (x, y, nbytes, top) that sums a block, whose elements are < 2**top.

    The result has an int for each of the layout's levels, and whether these are the whole sum.
    """
    in_two = layout.products and layout.dtype is DType.FLOAT64

    @emits(types.UniTuple(types.int64, layout.most + 1)(*[types.int64] * 4))
    def block_sums(b: Builder, x: Value, y: Value, nbytes: Value, top: Value) -> Value:
        firsts = [_first(b, top, _HEADROOM - level * _LEVEL_BITS, low) for level in range(levels)]
        sums = [cgutils.alloca_once_value(b, spread(b, first, _LANES)) for first in firsts]
        limit = _power(b, top, DOUBLE if layout.products else STORED[layout.dtype])
        none = ir.Constant(_ints(_LANES), None)
        wrong, lost = cgutils.alloca_once_value(b, none), cgutils.alloca_once_value(b, none)

        def keep(place: Value, found: Value) -> None:
            b.store(b.or_(b.load(place), found), place)

        def add(value: Value, level: int) -> None:
            for place in sums[level:]:
                before = b.load(place)
                after = b.fadd(before, value)
                value = b.fsub(value, b.fsub(after, before))
                b.store(after, place)
            keep(lost, b.bitcast(value, _ints(_LANES)))

        for value, factors in _values(b, layout, x, y, nbytes):
            if in_two:
                keep(wrong, _mask(b, _is_small(b, value, *factors)))
                add(_rest_of_product(b, value, *factors), 1)
            keep(wrong, _mask(b, b.fcmp_unordered(">=", _size(b, value), limit)))
            add(_wide(b, value), 0)
        found = [_difference(b, b.load(s), first) for s, first in zip(sums, firsts, strict=True)]
        bits = b.shl(b.load(lost), splat(none, 1))  # without the sign: -0.0 is nothing
        whole = b.icmp_signed("==", _over_lanes(b, b.or_(bits, b.load(wrong)), b.or_), I64(0))
        found += [I64(0)] * (layout.most - levels)
        return cgutils.pack_array(b, [*found, b.zext(whole, I64)])

    return block_sums


def _largest(layout: Layout) -> Any:
    """Return the function of (x, y, nbytes) for the size of the largest element or product."""

    @emits(types.float64(*[types.int64] * 3))
    def largest(b: Builder, x: Value, y: Value, nbytes: Value) -> Value:
        found = cgutils.alloca_once_value(b, ir.Constant(ir.VectorType(DOUBLE, _LANES), None))
        for value, _ in _values(b, layout, x, y, nbytes):
            size, before = _size(b, _wide(b, value)), b.load(found)
            b.store(b.select(b.fcmp_ordered(">", size, before), size, before), found)

        def larger(a: Value, c: Value) -> Value:
            return b.select(b.fcmp_ordered(">", c, a), c, a)

        return _over_lanes(b, b.load(found), larger)

    return largest


def _values(
    b: Builder, layout: Layout, x: Value, y: Value, nbytes: Value
) -> Iterator[tuple[Value, tuple[Value, ...]]]:
    """Yield inside a loop over a block: elements, or products and their factors."""
    element, step = STORED[layout.dtype], ir.Constant(I64, _LANES * layout.dtype.itemsize)
    with cgutils.for_range_slice(b, ir.Constant(I64, 0), nbytes, step, I64) as (at, _):
        value = load(b, b.add(x, at), element, _LANES)
        if layout.products:
            one, other = _wide(b, value), _wide(b, load(b, b.add(y, at), element, _LANES))
            yield b.fmul(one, other), (one, other)
        else:
            yield value, ()


def _first(b: Builder, top: Value, above: int, low: int) -> Value:
    """Return 1.5 * 2**max(top + above, low)."""
    exponent = b.add(top, I64(above))
    exponent = b.select(b.icmp_signed(">", exponent, I64(low)), exponent, I64(low))
    bits = b.or_(b.shl(b.add(exponent, I64(1023)), I64(52)), I64(1 << 51))
    return b.bitcast(bits, DOUBLE)


def _power(b: Builder, exponent: Value, kind: ir.Type) -> Value:
    """Return 2**exponent in all lanes; infinite if it is too large for a float32."""
    power = b.bitcast(b.shl(b.add(exponent, I64(1023)), I64(52)), DOUBLE)
    return spread(b, power if kind == DOUBLE else b.fptrunc(power, kind), _LANES)


def _ints(lanes: int) -> ir.VectorType:
    return ir.VectorType(I64, lanes)


def _wide(b: Builder, x: Value) -> Value:
    return x if x.type.element == DOUBLE else b.fpext(x, ir.VectorType(DOUBLE, _LANES))


def _mask(b: Builder, condition: Value) -> Value:
    return b.sext(condition, _ints(_LANES))


def _size(b: Builder, x: Value) -> Value:
    ints = ir.VectorType(I64 if x.type.element == DOUBLE else I32, _LANES)
    bits = b.bitcast(x, ints)
    return b.bitcast(b.and_(bits, splat(bits, (1 << (ints.element.width - 1)) - 1)), x.type)


def _difference(b: Builder, total: Value, first: Value) -> Value:
    """Return what the lanes have above `first`, in units of the last place."""
    bits = b.bitcast(total, _ints(_LANES))
    return _over_lanes(b, b.sub(bits, spread(b, b.bitcast(first, I64), _LANES)), b.add)


def _over_lanes(b: Builder, x: Value, combine: Callable[[Value, Value], Value]) -> Value:
    total = b.extract_element(x, I64(0))
    for lane in range(1, x.type.count):
        total = combine(total, b.extract_element(x, I64(lane)))
    return total


def _is_small(b: Builder, product: Value, x: Value, y: Value) -> Value:
    """Return the mask for products that are not zero and may have bits below a float64's last."""
    zero = splat(x, 0.0)
    nonzero = b.and_(b.fcmp_unordered("!=", x, zero), b.fcmp_unordered("!=", y, zero))
    small = b.fcmp_ordered("<", _size(b, product), splat(x, _LEAST_PRODUCT))
    return b.and_(nonzero, small)


def _rest_of_product(b: Builder, product: Value, x: Value, y: Value) -> Value:
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
    place, shift = words + 8 * (at >> 5), at & (LIMB - 1)
    sign = m >> 63  # without a branch: half of all elements would take it
    size = (m ^ sign) - sign
    low = (size << shift) & _LOW
    middle = (size >> (LIMB - shift)) & _LOW
    high = (size >> LIMB) >> (LIMB - shift)
    memory.store(place, memory.load(place) + ((low ^ sign) - sign))
    memory.store(place + 8, memory.load(place + 8) + ((middle ^ sign) - sign))
    memory.store(place + 16, memory.load(place + 16) + ((high ^ sign) - sign))


@njit(nogil=True)
def nc10d_carry(words: int, limbs: int) -> None:
    """Leave 32 bits in each limb but the last, which has the sign."""
    for at in range(words, words + 8 * (limbs - 1), 8):
        limb = memory.load(at)
        memory.store(at, limb & _LOW)
        memory.store(at + 8, memory.load(at + 8) + (limb >> LIMB))
