"""Blocks of threads copy between any strides: a GPU kernel's own body, thread by thread."""

import functools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llvmlite import ir
from numba import njit
from numba.extending import intrinsic

from nc10d.arrays.buffer import as_buffer
from nc10d.kernels.gpu import gpu_strided
from nc10d.kernels.gpu.gpu_pack import THREADS, Target
from nc10d.kernels.gpu.gpu_strided import SIDES, Side, reciprocal, sides_of, strided_launches
from nc10d.kernels.simd import I64


def coordinate(b, place, index):
    return b.load(b.inttoptr(b.add(place, I64(8 * index)), ir.PointerType(I64)), align=8)


CPU = Target(intrinsic, 0, coordinate)
POINT = np.dtype([("x", "f8"), ("on", "?"), ("y", "f4", (3,))])


@functools.cache
def every_thread(word):
    """Return a function that runs a kernel's body for all threads of all blocks in turn."""
    body = njit(gpu_strided.strided_body(CPU, word))

    @njit
    def run(arguments, sides, place, at, blocks, threads):
        dst, src, count, used, dst_step, src_step = arguments
        place[2] = threads
        for block in range(blocks):
            for thread in range(threads):
                place[0], place[1] = block, thread
                body(dst, src, count, used, dst_step, src_step, sides, at)

    return run


def run(launch):
    """Run a launch whose kernel is its word."""
    word, blocks, *arguments = launch
    addresses_and_steps = *arguments[:2], *arguments[4:6], *arguments[8:-1:4], *arguments[9:-1:4]
    assert all(number % word == 0 for number in addresses_and_steps), "a word is aligned"
    place = np.zeros(3, np.int64)
    ends = tuple(arguments[:6]), tuple(arguments[6:-1]), place, place.ctypes.data
    every_thread(word)(*ends, blocks, THREADS)


def launches(dst, src):
    """Return the launches that copy an array to a packed array."""
    width, sides = sides_of(as_buffer(src))
    return [*strided_launches(dst.ctypes.data, as_buffer(src).address, width, sides, int)]


def turned(sides):
    return [Side(length, src_step, dst_step) for length, dst_step, src_step in sides]


STEPS = st.sampled_from([1, 1, 2, 3, -1, -2])
ELEMENTS = st.sampled_from(
    [np.dtype(code) for code in ("i1", "f2", "f4", "f8", "c16")]
    + [np.dtype([("bytes", "u1", (count,))]) for count in (3, 6, 12, 15)]
    + [POINT]
)


@st.composite
def views(draw, repeated=True):
    """Draw a part of a transposed array, in places repeated along a new dimension."""
    dtype, shape = draw(ELEMENTS), draw(st.lists(st.integers(0, 6), max_size=4))
    shape = [*shape, *draw(st.sampled_from([[], [2] * 8, [200, 30]]))]
    nbytes = math.prod(shape) * dtype.itemsize
    room = np.random.default_rng(nbytes).integers(0, 256, nbytes + 16, np.uint8)
    odd = draw(st.sampled_from([0, 0, 1, 4, 8]))
    x = room[odd : odd + nbytes].view(dtype).reshape(shape)
    x = x.transpose(draw(st.permutations(range(x.ndim))))
    x = x[(*(slice(None, None, draw(STEPS)) for _ in shape), ...)]
    if repeated and draw(st.booleans()):
        x = np.broadcast_to(x, (3, *x.shape))
        x = x.transpose(draw(st.permutations(range(x.ndim))))
    return x


def same(found, expected):
    return found.tobytes() == expected.tobytes()


@settings(deadline=None, max_examples=100)
@given(views())
def test_a_gather_is_the_array_in_c_order(x):
    if x.size:
        copy = np.zeros(x.shape, x.dtype)
        for launch in launches(copy, x):
            run(launch)
        assert same(copy, x)


@settings(deadline=None, max_examples=60)
@given(views(repeated=False))
def test_a_scatter_writes_each_element_and_no_byte_between(x):
    if x.size:
        whole, values = x, np.array(x)
        while whole.base is not None:
            whole = whole.base
        random = np.random.default_rng(1).integers(0, 256, values.nbytes, np.uint8)
        values = random.view(values.dtype).reshape(values.shape)
        before = whole.copy()
        offset = as_buffer(x).address - whole.ctypes.data
        width, sides = sides_of(as_buffer(x))
        ends = as_buffer(x).address, values.ctypes.data
        for launch in strided_launches(*ends, width, turned(sides), int):
            run(launch)
        assert same(x, values)
        like = np.ndarray(x.shape, x.dtype, before, offset, x.strides)
        like[...] = values
        assert same(whole, before)


def test_a_transposed_matrix_is_a_single_launch_in_whole_elements():
    x = np.zeros((4096, 4096), np.float32)
    ((word, blocks, *_),) = launches(np.empty_like(x), x.T)
    assert (word, blocks) == (4, 4096 * 4096 // (4 * THREADS))


def test_dimensions_that_continue_each_other_are_one_side():
    x = np.zeros((6, 4, 10), np.float32)
    views = {"C": x, "rows": x[:, :, :7], "slices": x[::2], "column": x[:, 1, 3], "": x[:, :, ::2]}
    found = {name: len(sides_of(as_buffer(view))[1]) for name, view in views.items()}
    assert found == {"C": 0, "rows": 1, "slices": 1, "column": 1, "": 1}
    assert len(sides_of(as_buffer(x.transpose(2, 0, 1)))[1]) == 2


def test_words_are_as_wide_as_steps_and_addresses_allow():
    x = np.zeros((8, 64), np.float32)
    x = x[:, -x.ctypes.data % 16 // 4 :][:, :56]
    words = {
        16: x[:, :32],
        8: x[:, 2:30],
        4: x[:, :31],
        2: x[:, :16].view(np.uint8)[:, 2:62],
        1: x[:, :16].view(np.uint8)[:, 1:60],
    }
    copy = np.empty(64 << 10, np.uint8)
    copy = copy[-copy.ctypes.data % 16 :]
    assert {word: launches(copy, view)[0][0] for word, view in words.items()} == {
        word: word for word in words
    }


@pytest.mark.parametrize("dimensions", [SIDES, SIDES + 2])
def test_more_dimensions_than_a_launch_has_are_a_launch_for_each_outer_place(dimensions):
    x = np.arange(3**dimensions, dtype=np.int32).reshape((3,) * dimensions)
    x = x[(slice(None, None, -1),) * dimensions][(slice(0, 2),) * dimensions]
    copy = np.empty(x.shape, x.dtype)
    found = launches(copy, x)
    for launch in found:
        run(launch)
    assert len(found) == 2 ** (dimensions - SIDES)
    assert np.array_equal(copy, x)


DIVISORS = st.integers(1, 61).flatmap(lambda bits: st.integers(2, 1 << bits))


@given(DIVISORS, st.lists(st.integers(0, (1 << 63) - 1)))
def test_reciprocals_divide_each_index_exactly(divisor, indices):
    bits, shift = reciprocal(divisor)
    most = (1 << 63) // divisor * divisor
    for index in [*indices, divisor - 1, divisor, most - 1]:
        assert (index * (bits + (1 << 64)) >> 64) >> shift == index // divisor
