"""Packing equals NumPy's astype and product of each element, and changes no other memory."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.micro.flatten import Packer, pack, unpack
from nc10d.arrays.dtypes import DType, ElementKind
from nc10d.reducer.packing import cast
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


@st.composite
def pieces(draw):
    """Counts and offsets of arrays in a flat array, with gaps."""
    counts = draw(st.lists(st.integers(0, 70), max_size=6))
    gaps = draw(st.lists(st.integers(0, 5), min_size=len(counts), max_size=len(counts)))
    offsets = np.cumsum([0, *(c + g for c, g in zip(counts, gaps, strict=True))])
    return counts, [int(o) for o in offsets[:-1]], int(offsets[-1]) + draw(st.integers(0, 3))


PAIRS = [("float32", "float32"), ("float32", "float16"), ("int64", "int64")]


@settings(deadline=None)
@given(pieces=pieces(), pair=st.sampled_from(PAIRS), scale=st.sampled_from([1.0, 2.0]))
def test_packing_fills_the_places_and_nothing_else(pieces, pair, scale):
    counts, offsets, total = pieces
    arrays = [np.arange(i, i + n).astype(pair[0]) for i, n in enumerate(counts)]
    flat = np.full(total, 77, pair[1])
    expected = flat.copy()
    for x, at in zip(arrays, offsets, strict=True):
        expected[at : at + x.size] = (x * x.dtype.type(scale)).astype(pair[1])
    pack(arrays, flat, offsets, scale)
    assert same_bits(flat, expected)


@settings(deadline=None)
@given(pieces=pieces(), pair=st.sampled_from(PAIRS))
def test_unpacking_undoes_packing(pieces, pair):
    counts, offsets, total = pieces
    arrays = [np.arange(i, i + n).astype(pair[0]) for i, n in enumerate(counts)]
    flat = np.zeros(total, pair[1])
    pack(arrays, flat, offsets, 4.0 if pair[0] == "float32" else 1.0)
    back = [np.zeros_like(x) for x in arrays]
    unpack(flat, back, offsets, 0.25 if pair[0] == "float32" else 1.0)
    assert all(map(same_bits, back, arrays))


def test_arrays_of_any_shape_and_alignment_are_packed():
    room = np.zeros(4 * 7 + 1, np.uint8)
    odd = room[1:].view(np.float32)
    odd[:] = range(7)
    flat = np.zeros(9, np.float32)
    pack([odd, np.ones((1, 2), np.float32)], flat, [0, 7])
    assert flat.tolist() == [0, 1, 2, 3, 4, 5, 6, 1, 1]


FLAT = np.zeros(4, np.float32)
ONE = np.ones(2, np.float32)


@pytest.mark.parametrize(
    ("arrays", "offsets", "error", "words"),
    [
        ([ONE], [3], ValueError, "elements 3 to 5 are not all inside of 4"),
        ([ONE], [-1], ValueError, "elements -1 to 1"),
        ([np.ones((2, 2), np.float32)[:, 0]], [0], ValueError, "not contiguous"),
        ([ONE, np.ones(1)], [0, 2], TypeError, "one dtype, got float32, float64"),
        ([np.ones(2, np.int32)], [0], TypeError, "int32 can't be cast to float32"),
        ([ONE], [0, 1], ValueError, "argument"),
    ],
)
def test_a_mistake_raises_before_the_first_write(arrays, offsets, error, words):
    flat = FLAT.copy()
    with pytest.raises(error, match=words):
        pack(arrays, flat, offsets)
    assert not flat.any()


def test_a_read_only_target_is_refused():
    target = np.zeros(2, np.float32)
    target.flags.writeable = False
    with pytest.raises(ValueError, match="not writable"):
        unpack(FLAT, [target], [0])


def test_no_arrays_are_no_work():
    pack([], FLAT.copy(), [])


@settings(deadline=None)
@given(pieces=pieces(), pair=st.sampled_from(PAIRS), scale=st.sampled_from([1.0, 2.0]))
def test_a_packer_equals_pack_and_unpack_with_current_values(pieces, pair, scale):
    counts, offsets, total = pieces
    arrays = [np.zeros(n, pair[0]) for n in counts]
    flat, expected = np.full(total, 7, pair[1]), np.full(total, 7, pair[1])
    packer = Packer(arrays, flat, offsets)
    for step in range(2):
        for i, x in enumerate(arrays):
            x[:] = np.arange(x.size) + i + step
        pack(arrays, expected, offsets, scale)
        packer.pack(scale)
        assert same_bits(flat, expected)
        back = [np.zeros_like(x) for x in arrays]
        unpack(flat, back, offsets, scale)
        packer.unpack(scale)
        assert all(map(same_bits, arrays, back))


def moved(x):
    """Move the memory of `x`: large blocks come from the kernel and stay where they are."""
    count, before = x.size, x.ctypes.data
    x.resize(1 << 23, refcheck=False)
    x.resize(count, refcheck=False)
    assert x.ctypes.data != before


def test_a_packer_finds_an_array_that_has_moved_and_refuses_one_that_has_grown():
    moving, flat = np.ones(1000), np.zeros(1000)
    packer = Packer([moving], flat, [0])
    packer.pack()
    moved(moving)
    moving[:] = 5
    packer.pack()
    assert (flat == 5).all()
    moving.resize(1001, refcheck=False)
    with pytest.raises(ValueError, match="was resized"):
        packer.pack()


def test_a_packer_is_for_numpy_arrays_only():
    with pytest.raises(TypeError, match="plain NumPy arrays"):
        Packer([memoryview(bytearray(8))], np.zeros(2), [0])


@pytest.mark.parametrize("dtype", ["float32", "float64", "uint8", "complex64"])
@pytest.mark.parametrize("skew", [0, 1])
def test_large_buckets_stream_with_the_bits_of_small_ones(dtype, skew):
    """Other kernels pack large buckets: at any alignment, and no writes outside of the slots."""
    counts, kind = [0, 1, 7, 31, 1000, 4099, 600_001], np.dtype(dtype)
    total = sum(counts) + (9 << 20) // kind.itemsize
    counts.append(total - sum(counts))
    offsets = [int(end) + 2 for end in np.cumsum([0, *counts[:-1]])]
    room = np.zeros(kind.itemsize * (total + 9) + 32, np.uint8)
    at = -room.ctypes.data % 32 + skew
    flat = room[at : at + kind.itemsize * (total + 5)].view(kind)
    arrays = [(np.arange(n) % 251 + i).astype(kind) for i, n in enumerate(counts)]
    for scale in (1.0, 1 / 3) if dtype.startswith("float") else (1.0,):
        flat[:] = 77
        pack(arrays, flat, offsets, scale)
        expected = np.concatenate(arrays) * kind.type(scale)
        assert same_bits(flat[2 : 2 + total], expected)
        assert (flat[:2] == 77).all()
        assert (flat[2 + total :] == 77).all()
        back = [np.zeros_like(x) for x in arrays]
        unpack(flat, back, offsets)
        assert same_bits(np.concatenate(back), expected)
