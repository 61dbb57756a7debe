"""Blocks of threads move the bytes that a loop would: a GPU kernel's own body, thread by thread."""

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llvmlite import ir
from numba import njit
from numba.extending import intrinsic

from nc10d.arrays.dtypes import DType
from nc10d.kernels.gpu import gpu_pack
from nc10d.kernels.simd import I64
from nc10d.reducer.packing import cast
from nc10d.testing.reference import same_bits
from nc10d.testing.strategies import mixed_values

F32, BF16, F16 = DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16
E4M3, E5M2 = DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2


def coordinate(b, place, index):
    return b.load(b.inttoptr(b.add(place, I64(8 * index)), ir.PointerType(I64)), align=8)


CPU = gpu_pack.Target(intrinsic, 0, coordinate)


@functools.cache
def every_thread(src=None, dst=None):
    """Return a function that runs a body for all threads of all blocks in turn."""
    body = njit(gpu_pack.copy_body(CPU) if src is None else gpu_pack.cast_body(CPU, src, dst))

    @njit
    def run(table, chunks, factor, place, at, count, threads):
        place[2] = threads
        for block in range(count):
            for thread in range(threads):
                place[0], place[1] = block, thread
                body(table, chunks, factor, at)

    return run


def launch(run, rows, factor=1.0, threads=gpu_pack.THREADS):
    table = np.array(rows, np.int64).reshape(-1, 3)
    chunks = gpu_pack.chunks_of([nbytes for _, _, nbytes in rows])
    place = np.zeros(3, np.int64)
    at = table.ctypes.data, chunks.ctypes.data, factor, place, place.ctypes.data
    run(*at, len(chunks), threads)


@given(sizes=st.lists(st.integers(0, 3 * gpu_pack.CHUNK), max_size=5))
def test_chunks_cover_each_row_once(sizes):
    chunks = gpu_pack.chunks_of(sizes).tolist()
    assert chunks == [
        [row, first] for row, size in enumerate(sizes) for first in range(0, size, gpu_pack.CHUNK)
    ]


SIZES = st.one_of(
    st.integers(0, 100),
    st.integers(gpu_pack.CHUNK - 40, gpu_pack.CHUNK + 40),
    st.integers(2 * gpu_pack.CHUNK, 3 * gpu_pack.CHUNK),
)
ODD = st.sampled_from([0, 0, 1, 2, 4, 8, 12])


@settings(deadline=None, max_examples=60)
@given(
    pieces=st.lists(st.tuples(SIZES, ODD, ODD), min_size=1, max_size=4),
    threads=st.sampled_from([256, 32]),
)
def test_a_copy_moves_each_byte_and_no_other_at_any_alignment(pieces, threads):
    random = np.random.default_rng(len(pieces))
    rows, pairs = [], []
    for size, dst_odd, src_odd in pieces:
        src, dst = random.integers(0, 256, size + 64, np.uint8), np.full(size + 64, 7, np.uint8)
        to, at = (-x.ctypes.data % 16 + odd for x, odd in ((dst, dst_odd), (src, src_odd)))
        rows.append((dst.ctypes.data + to, src.ctypes.data + at, size))
        expected = dst.copy()
        expected[to : to + size] = src[at : at + size]
        pairs.append((dst, expected, src))
    launch(every_thread(), rows, threads=threads)
    assert all(np.array_equal(dst, expected) for dst, expected, _ in pairs)


PAIRS = [(F32, F32), (F32, BF16), (BF16, F32), (F16, BF16), (F32, E4M3), (E5M2, F32)]


COUNTS = [0, 1, 5, 33, 600, gpu_pack.CHUNK // 4 + 41]
ROOM = 5120
"""Elements between rows: a multiple of 64, so all rows have the same alignment."""


def aligned(count, dtype):
    """Return zeros at a multiple of 64 bytes."""
    room = np.zeros(count * dtype.itemsize + 64, np.uint8)
    at = -room.ctypes.data % 64
    return room[at : at + count * dtype.itemsize].view(dtype.numpy)


def scaled(values, out, factor):
    if values.dtype == out.dtype:
        with np.errstate(all="ignore"):
            out[...] = values * np.float32(factor)
    else:
        cast(values, out, factor)


@pytest.mark.parametrize(("src", "dst"), PAIRS)
@pytest.mark.parametrize(("src_odd", "dst_odd"), [(0, 0), (1, 0), (0, 1), (3, 3)])
def test_a_cast_has_the_bits_of_the_cpus_own_kernel(src, dst, src_odd, dst_odd):
    size = ROOM * len(COUNTS)
    values, found, expected = aligned(size, src), aligned(size, dst), aligned(size, dst)
    values[...] = mixed_values(src, size, 3)
    rows = []
    for number, count in enumerate(COUNTS):
        at, to = ROOM * number + src_odd, ROOM * number + dst_odd
        rows.append((found[to:].ctypes.data, values[at:].ctypes.data, count * src.itemsize))
        scaled(values[at : at + count], expected[to : to + count], 1 / 3)
    launch(every_thread(src, dst), rows, 1 / 3)
    assert same_bits(found, expected)


def test_pairs_of_dtypes_without_a_kernel_body_are_unsupported():
    assert gpu_pack.supports(DType.INT64, DType.INT64)
    assert gpu_pack.supports(E4M3, F16)
    for src, dst in [(DType.FLOAT64, F32), (DType.INT32, F32), (DType.COMPLEX64, F32)]:
        assert not gpu_pack.supports(src, dst)
        assert not gpu_pack.supports(dst, src)
    with pytest.raises(TypeError, match="no GPU kernel from float64 to float32"):
        gpu_pack.packing_name(DType.FLOAT64, F32, False)
    with pytest.raises(TypeError, match="no GPU kernel from int64 to int64"):
        gpu_pack.packing_name(DType.INT64, DType.INT64, True)
