"""Casts and copies equal NumPy's astype, product and quotient, and change no other memory."""

import itertools
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nc10d.arrays.buffer import as_buffer
from nc10d.arrays.dtypes import DType, ElementKind
from nc10d.reducer.packing import DividedCopy, cast, copy_all
from nc10d.testing.reference import same_bits
from nc10d.testing.strategies import mixed_values

FLOATS = [dtype for dtype in DType if dtype.family is ElementKind.FLOAT]
SCALES = [1.0, 0.25, 1 / 3]
SIZES = [0, 1, 7, 31, 32, 33, 100]


def rounded(x, scale, dtype):
    """x * scale in the wider type (float32 at least), rounded to `dtype` by way of float32."""
    wide = np.float64 if np.float64 in (x.dtype, dtype.numpy) else np.float32
    with np.errstate(all="ignore"):
        product = x.astype(wide) * wide(scale)
        narrow = product if dtype is DType.FLOAT64 else product.astype(np.float32)
        return narrow.astype(dtype.numpy)


@pytest.mark.parametrize(("src", "dst"), [*itertools.permutations(FLOATS, 2)])
def test_a_cast_rounds_the_product_once(src, dst):
    values = mixed_values(src, max(SIZES), 1)
    for size, scale in itertools.product(SIZES, SCALES):
        found = np.zeros(size, dst.numpy)
        cast(values[:size], found, scale)
        expected = rounded(values[:size], scale, dst)
        missing = np.isnan(expected.astype(np.float64))
        assert np.array_equal(np.isnan(found.astype(np.float64)), missing)
        assert same_bits(found[~missing], expected[~missing]), (size, scale)


def copied(arrays, slots):
    copy_all([(y.ctypes.data, x.ctypes.data, x.nbytes) for x, y in zip(arrays, slots, strict=True)])
    return arrays


def divided(arrays, slots, past=False):
    for x, y in zip(arrays, slots, strict=True):
        DividedCopy(as_buffer(y), past).write(x.ctypes.data, 3)
    return [(x / 3).astype(x.dtype) for x in arrays]


def scaled(arrays, slots):
    for x, y in zip(arrays, slots, strict=True):
        cast(x, y, 1 / 3)
    return [x * x.dtype.type(1 / 3) for x in arrays]


def assert_only_slots_are_written(copy, arrays, gaps, flat):
    flat[:] = 77
    ends = np.cumsum([gap + x.size for gap, x in zip(gaps, arrays, strict=True)], dtype=int)
    slots = [flat[end - x.size : end] for end, x in zip(ends, arrays, strict=True)]
    expected = flat.copy()
    for end, x in zip(ends, copy(arrays, slots), strict=True):
        expected[end - x.size : end] = x
    assert same_bits(flat, expected)
    back = [np.zeros_like(x) for x in arrays]
    copied(slots, back)
    assert all(map(same_bits, back, slots))


@settings(deadline=None)
@given(
    data=st.data(),
    counts=st.lists(st.integers(0, 70), min_size=1, max_size=6),
    dtype=st.sampled_from(["float16", "float32", "float64", "int64", "uint8"]),
)
def test_copies_fill_their_slots_and_nothing_else(data, counts, dtype):
    gaps = [data.draw(st.integers(0, 5)) for _ in counts]
    arrays = [np.arange(i, i + n).astype(dtype) for i, n in enumerate(counts)]
    room = np.zeros(np.dtype(dtype).itemsize * (sum(counts) + sum(gaps) + 3) + 1, np.uint8)
    flat = room[data.draw(st.integers(0, 1)) :][: room.size - 1].view(dtype)  # of any alignment
    for copy in (copied, divided, scaled) if dtype.startswith("f") else (copied,):
        assert_only_slots_are_written(copy, arrays, gaps, flat)


@pytest.mark.parametrize("dtype", ["float32", "float64", "uint8", "complex64"])
@pytest.mark.parametrize("skew", [0, 1])
def test_many_bytes_stream_with_the_bits_of_few(dtype, skew):
    """Other kernels copy many bytes: at any alignment, and no writes outside of the slots."""
    counts, kind = [0, 1, 7, 31, 1000, 4099, 600_001], np.dtype(dtype)
    counts.append((9 << 20) // kind.itemsize)
    room = np.zeros(kind.itemsize * (sum(counts) + 9) + 32, np.uint8)
    at = -room.ctypes.data % 32 + skew
    flat = room[at : at + kind.itemsize * (sum(counts) + 5)].view(kind)
    arrays = [(np.arange(n) % 251 + i).astype(kind) for i, n in enumerate(counts)]
    gaps = [2, *[0] * (len(counts) - 1)]
    assert_only_slots_are_written(copied, arrays, gaps, flat)
    if kind.kind == "f":
        for copy in (partial(divided, past=True), scaled):
            assert_only_slots_are_written(copy, arrays, gaps, flat)


@pytest.mark.parametrize(
    ("array", "error", "words"),
    [
        (np.ones(3, np.float32), ValueError, "3 elements can't be cast to 4"),
        (np.ones((4, 2), np.float32)[:, 0], ValueError, "not contiguous"),
        (np.ones(4, np.int32), TypeError, "int32 can't be cast to float32"),
    ],
)
def test_a_mistake_raises_before_the_first_write(array, error, words):
    target = np.zeros(4, np.float32)
    with pytest.raises(error, match=words):
        cast(array, target)
    assert not target.any()


def test_a_read_only_target_is_refused():
    target = np.zeros(2, np.float32)
    target.flags.writeable = False
    with pytest.raises(ValueError, match="not writable"):
        cast(np.ones(2), target)
