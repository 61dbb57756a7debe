"""The PTX of the kernels has the bits of their bodies: the driver's text, run by an interpreter.

A body runs on the CPU, thread by thread; its PTX runs beside it, on the same values in a GPU's
addresses. The PTX of folds needs a compiler, which `make test-nccl` installs.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from cuda_tools import needs_compilers
from fold_twins import CPU, every_thread
from numba import njit
from ptx_interpreter import Fault, Kernel, Memory, launch, parse

from nc10d.arrays.buffer import as_buffer
from nc10d.arrays.dtypes import DType, element_of
from nc10d.kernels.gpu.gpu_pack import CHUNK, THREADS, cast_body, chunks_of, copy_body, packing_name
from nc10d.kernels.gpu.gpu_ptx import shipped_ptx
from nc10d.kernels.gpu.gpu_reduce import ROW_ALIGN, elements_a_block, fold_ptx
from nc10d.kernels.gpu.gpu_strided import SIDES, Side, sides_of, strided_launches, strided_name
from nc10d.ops import AVG, BXOR, MAX, PRODUCT, SUM, ReduceOp, premul_sum
from nc10d.testing.reference import same_bits
from nc10d.testing.strategies import mixed_values

pytestmark = needs_compilers
Array = np.ndarray[Any, Any]
Capability = tuple[int, int]
F32, BF16, F16, BYTE = DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16, DType.UINT8
E4M3, E5M2 = DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2
FLOATS = (F32, BF16, F16, E4M3, E5M2)
PAIRS = [(BYTE, BYTE), *itertools.product(FLOATS, FLOATS)]
TEXTS = [(7, 0), (10, 0)]
"""NVVM makes two texts of a fold: up to sm_90, and from sm_100 on."""
TABLE, CHUNKS, ARRAYS = 0x2_0000_0000, 0x7_FFFF_0000, 0x7F00_0000_0000
APART = 1 << 34
UNTOUCHED = 0xA5
each_pair = pytest.mark.parametrize(("src", "dst"), PAIRS, ids=lambda x: x.label)
each_text = pytest.mark.parametrize("capability", TEXTS, ids=["sm_70", "sm_100"])


def text_of(src: DType, dst: DType) -> str:
    """Return the PTX that the driver gets."""
    return shipped_ptx(packing_name(src, dst, src is not BYTE))


@functools.cache
def kernel_of(src: DType, dst: DType) -> Kernel:
    return parse(text_of(src, dst))


@functools.cache
def twin(src: DType, dst: DType) -> Callable[..., None]:
    """Return a function that runs the body of a kernel on the CPU, for all threads."""
    body = njit(copy_body(CPU) if src is BYTE else cast_body(CPU, src, dst))

    @njit
    def run(table, chunks, factor, place, at, blocks, threads):  # type: ignore[no-untyped-def]
        place[2] = threads
        for block in range(blocks):
            for thread in range(threads):
                place[0], place[1] = block, thread
                body(table, chunks, factor, at)

    return run


@dataclass
class Piece:
    """A row of the table, with the part from byte `first` on; arrays begin some elements late."""

    values: Array
    late: int = 0
    dst_late: int = 0
    first: int = 0
    more: int = 0
    """Bytes that the array has behind `values`."""


def aligned(nbytes: int) -> Array:
    room = np.full(nbytes + 64, UNTOUCHED, np.uint8)
    return room[-room.ctypes.data % 64 :][:nbytes]


def run_both(
    kernel: Kernel,
    src: DType,
    dst: DType,
    pieces: list[Piece],
    factor: float = 1.0,
    threads: int = THREADS,
    block: int = 0,
) -> Iterator[tuple[Array, Array, Array]]:
    """Yield each row's target by PTX and by the CPU, and how often PTX stored each byte.

    The launch's blocks begin at number `block`.
    """
    read, write = src.itemsize, dst.itemsize
    tables: tuple[list[list[int]], ...] = ([], [])
    sources, targets, ranges, kept = [], [], {}, []
    for number, piece in enumerate(pieces):
        count = piece.values.size
        source, found = (aligned((count + 32) * size) for size in (read, write))
        late, dst_late = piece.late * read, piece.dst_late * write
        source[late:][: count * read] = piece.values.view(np.uint8)
        nbytes, target_first = piece.first + count * read, piece.first // read * write
        place = ARRAYS + 2 * number * APART
        ranges |= {place + piece.first: source, place + APART + target_first: found.copy()}
        targets.append(place + APART + target_first)
        on_gpu = place + APART + dst_late, place + late
        on_cpu = found.ctypes.data + dst_late, source.ctypes.data + late
        tables[0].append([*on_gpu, nbytes + piece.more])
        tables[1].append([on_cpu[0] - target_first, on_cpu[1] - piece.first, nbytes + piece.more])
        sources.append(source)
        kept.append(found)
    # Only the chunks from `first` on are there.
    chunks = chunks_of([piece.values.nbytes for piece in pieces])
    chunks[:, 1] += np.array([piece.first for piece in pieces], np.int64)[chunks[:, 0]]
    gpu_table, cpu_table = (np.array(table, np.int64) for table in tables)
    ranges |= {TABLE: bytes_of(gpu_table), CHUNKS + 16 * block: bytes_of(chunks)}
    memory = Memory(ranges, writable=targets)
    blocks = range(block, block + len(chunks))
    launch(kernel, memory, [TABLE, CHUNKS, factor, 0], blocks, threads)
    place = np.zeros(3, np.int64)
    where = cpu_table.ctypes.data, chunks.ctypes.data
    twin(src, dst)(*where, factor, place, place.ctypes.data, len(chunks), threads)
    for target, expected in zip(targets, kept, strict=True):
        yield memory.bytes_at(target), expected, memory.stores_at(target)


def bytes_of(x: Array) -> Array:
    return np.ascontiguousarray(x).view(np.uint8).ravel()


def check(kernel: Kernel, src: DType, dst: DType, pieces: list[Piece], **how: Any) -> None:
    """Assert that PTX writes the body's bits, and each byte once."""
    found = run_both(kernel, src, dst, pieces, **how)
    for piece, (by_ptx, by_cpu, stores) in zip(pieces, found, strict=True):
        assert same_bits(by_ptx.view(dst.numpy), by_cpu.view(dst.numpy)), piece
        begin, nbytes = piece.dst_late * dst.itemsize, piece.values.size * dst.itemsize
        assert (stores[begin : begin + nbytes] == 1).all(), piece
        assert int(stores.sum()) == nbytes, piece


def pieces_of(dtype: DType, seed: int) -> list[Piece]:
    """Return rows of all alignments and many lengths: whole chunks, tails, and none."""
    random = np.random.default_rng(seed)
    few, chunk = 16 // dtype.itemsize, CHUNK // dtype.itemsize
    lengths = [0, 1, few - 1, few, few + 1, 63, 4 * few * THREADS - 1, chunk - 1, chunk, chunk + 5]
    apart = itertools.product(range(few), repeat=2)
    lates = [late for late in apart if few <= 8 or 0 in late or late[0] == late[1]]
    pieces = [Piece(mixed_values(dtype, count, seed + count)) for count in lengths]
    for number, (late, dst_late) in enumerate(lates):
        count = int(random.integers(0, 2 * chunk if number % 29 == 28 else 3 * few))
        pieces.append(Piece(mixed_values(dtype, count, seed + number), late, dst_late))
    return pieces


@each_pair
def test_all_alignments_and_tails(src: DType, dst: DType) -> None:
    kernel = kernel_of(src, dst)
    check(kernel, src, dst, pieces_of(src, 1), factor=1 / 3)
    check(kernel, src, dst, pieces_of(src, 2)[:14], factor=-1e4, threads=32)


MANTISSAS = {F32: 23, BF16: 7, F16: 10, E4M3: 3, E5M2: 2}
FACTORS = [1 / 3, -(2.0**-20), 3e38, 1e-45, np.inf, np.nan, 0.0]


@pytest.mark.parametrize("src", FLOATS, ids=lambda x: x.label)
def test_every_value(src: DType) -> None:
    """All values of narrow types; of float32 those at a tie, and beside one."""
    pieces = by_words_and_singly(src)
    for index, dst in enumerate(FLOATS):
        kernel = kernel_of(src, dst)
        check(kernel, src, dst, pieces)
        for factor in (FACTORS[index], FACTORS[-1 - index]):
            check(kernel, src, dst, pieces[:1], factor=factor)
        tie = 1 + 2.0 ** -(1 + MANTISSAS[dst])  # times 1, for one: between two numbers of dst
        for factor in (tie, tie + 2.0**-23, tie - 2.0**-23):
            check(kernel, src, dst, pieces[2:] if src is F32 else pieces[::2], factor=factor)


def by_words_and_singly(dtype: DType) -> list[Piece]:
    """Return all values for each of a text's loops: of words, of elements, and of the rest."""
    values = every_value(dtype)
    few = np.random.default_rng(1).choice(values, 3 * THREADS)
    return [Piece(values), Piece(values, late=1), Piece(few, late=1)]


def every_value(dtype: DType) -> Array:
    if dtype.itemsize < 4:
        return np.arange(1 << 8 * dtype.itemsize, dtype=f"u{dtype.itemsize}").view(dtype.numpy)
    # All signs, exponents and first bits of a mantissa; the last bits are at a tie or beside it,
    # behind an even and an odd number.
    high = np.arange(1 << 14, dtype=np.uint32) << np.uint32(18)
    ties = [tie + by for tie in (0, 1 << 12, 3 << 12, 1 << 15, 3 << 15) for by in (-1, 0, 1)]
    return np.concatenate([high + np.uint32(tie % (1 << 18)) for tie in ties]).view(np.float32)


@each_pair
def test_arrays_of_more_than_two_to_the_31_elements(src: DType, dst: DType) -> None:
    kernel = kernel_of(src, dst)
    far = [(1 << 31) * src.itemsize, (1 << 32) - CHUNK, (1 << 33) + CHUNK]
    pieces = [Piece(mixed_values(src, CHUNK, at % 7), first=at, more=CHUNK * 9) for at in far]
    pieces.append(Piece(mixed_values(src, 77, 5), 1, 1, first=(1 << 33)))
    # So many blocks that 16 bytes for each are more than 2^32.
    for block in ((1 << 28) - 1, (1 << 31) - 1000):
        check(kernel, src, dst, pieces, factor=0.75, block=block)


WRONG = [
    (F16, F32, r"(prmt\.b32 .*), 4180;", r"\1, 4181;"),  # one byte of a word of another register
    (F32, BF16, r"(prmt\.b32 .*), 4180;", r"\1, 12372;"),
    (F32, BF16, r"(add\.s32 .*), 32767;", r"\1, 32768;"),  # a tie goes up
    (F32, BF16, r"(and\.b32 .*), 1;", r"\1, 0;"),  # a tie goes down
    (F32, BF16, r"(min\.s64 .*), 16384;", r"\1, 16380;"),
    (F32, F16, r"(ld\.global\.v4\.f32 .*)\+16\];", r"\1];"),
    (F32, F32, r"(mul\.lo\.s64 .*), 24;", r"\1, 16;"),
    (F32, F32, r"(shl\.b64 .*), 2;", r"\1, 3;"),
    (F32, F32, r"mul\.rn\.f32(.*), (%f\d+);", r"mul.rn.f32\1, 0f3F800000;"),
    (F16, F32, r"\{(%h\d+), (%h\d+)\}", r"{\2, \1}"),
    (F32, E5M2, r"setp\.nan\.f32", "setp.lt.f32"),
    (F32, E4M3, r"(min\.u32 .*), 127;", r"\1, 255;"),
    (E5M2, F32, r"(shl\.b16 .*), 8;", r"\1, 7;"),
    (BYTE, BYTE, r"(and\.b64 .*), 15;", r"\1, 7;"),
    (BYTE, BYTE, r"(and\.b64 .*), -16;", r"\1, -8;"),
    (BYTE, BYTE, r"@%p(\d+) bra", r"@!%p\1 bra"),
]


@pytest.mark.parametrize(("src", "dst", "right", "wrong"), WRONG)
def test_a_wrong_text_is_found(src: DType, dst: DType, right: str, wrong: str) -> None:
    text, changes = re.subn(right, wrong, text_of(src, dst), count=1)
    assert changes == 1, "the text has such an instruction"
    kernel = parse(text)

    def both() -> None:
        check(kernel, src, dst, pieces_of(src, 1), factor=1 / 3)
        check(kernel, src, dst, by_words_and_singly(src))

    with pytest.raises((AssertionError, Fault)):
        both()


WORDS = [1, 2, 4, 8, 16]


@functools.cache
def strided_kernel(word: int) -> Kernel:
    return parse(shipped_ptx(strided_name(word)))


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("dimensions", range(1, SIDES + 2))
def test_strided_arrays_are_gathered_and_scattered(word: int, dimensions: int) -> None:
    """An array with steps of all kinds, to a packed one in C order, and back."""
    random = np.random.default_rng(dimensions)
    shape = random.integers(2, max(3, 4000 ** (1 / dimensions)), dimensions)
    whole = random.integers(0, 256, (*(2 * shape), word), np.uint8)
    x = whole[tuple(slice(None, None, (-1) ** k * (1 + k % 2)) for k in range(dimensions))]
    x = x.transpose(*random.permutation(dimensions), dimensions)
    x = x.view({1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}[word])[..., 0]
    width, sides = sides_of(as_buffer(x))
    offset = as_buffer(x).address - whole.ctypes.data
    strided, packed = ARRAYS + offset, 2 * ARRAYS
    memory = Memory({ARRAYS: whole.ravel(), 2 * ARRAYS: aligned(x.nbytes)}, {2 * ARRAYS})
    for kernel, blocks, *arguments in strided_launches(packed, strided, width, sides, int):
        launch(strided_kernel(kernel), memory, arguments, range(blocks), THREADS)
    assert memory.bytes_at(packed).tobytes() == x.tobytes()
    values = random.integers(0, 256, x.nbytes, np.uint8)
    memory = Memory({ARRAYS: whole.ravel(), 2 * ARRAYS: values}, {ARRAYS})
    back = [Side(length, src_step, dst_step) for length, dst_step, src_step in sides]
    for kernel, blocks, *arguments in strided_launches(strided, packed, width, back, int):
        launch(strided_kernel(kernel), memory, arguments, range(blocks), THREADS)
    expected = whole.copy()
    np.ndarray(x.shape, x.dtype, expected, offset, x.strides)[...] = values.view(x.dtype).reshape(
        x.shape
    )
    assert memory.bytes_at(ARRAYS).tobytes() == expected.tobytes()


@pytest.mark.parametrize("word", WORDS)
def test_strided_arrays_of_more_than_two_to_the_31_elements(word: int) -> None:
    """Rows of 1000 words, each second word of which is taken; and columns between them."""
    row, rows, columns = 1000, 1 << 16, 99
    sides = [Side(row, word, 2 * word), Side(rows, row * word, 1 << 20)]
    sides.append(Side(columns, rows * row * word, 1 << 38))
    words = 4 * THREADS
    (found,) = strided_launches(1 << 60, 1 << 50, word, sides, int)
    _, blocks, *arguments = found
    for block in (0, (1 << 31) // words, (1 << 32) // words, blocks - 1):
        indices = range(block * words, min((block + 1) * words, row * rows * columns))
        ranges = {(1 << 60) + indices[0] * word: aligned(len(indices) * word)}
        expected = list[Array]()
        for number in range(indices[0] // row, indices[-1] // row + 1):
            begin = (1 << 50) + number % rows * (1 << 20) + number // rows * (1 << 38)
            values = np.random.default_rng(number).integers(0, 256, 2 * row * word, np.uint8)
            ranges[begin] = values
            expected.append(values.reshape(row, 2, word)[:, 0])
        memory = Memory(ranges, {(1 << 60) + indices[0] * word})
        launch(strided_kernel(word), memory, arguments, [block], THREADS)
        first = indices[0] % row
        wanted = np.concatenate(expected)[first : first + len(indices)]
        assert memory.bytes_at((1 << 60) + indices[0] * word).tobytes() == wanted.tobytes()


KNOWN = [
    (SUM, DType.FLOAT32),
    (SUM, DType.FLOAT64),
    (SUM, DType.INT64),
    (AVG, DType.BFLOAT16),
    (AVG, DType.FLOAT32),
    (premul_sum(0.3), DType.FLOAT16),
    (premul_sum(3), DType.INT16),
    (PRODUCT, DType.COMPLEX64),
    (AVG, DType.INT8),
    (BXOR, DType.UINT16),
    (MAX, DType.FLOAT8_E5M2),
]


@each_text
@pytest.mark.parametrize(("op", "dtype"), KNOWN, ids=lambda x: getattr(x, "label", str(x)))
def test_a_fold_has_the_bits_of_its_body(
    op: ReduceOp, dtype: DType, capability: Capability
) -> None:
    element = element_of(dtype.numpy)
    kernel = parse(fold_ptx(op.kind, element, capability))
    item, share = dtype.itemsize, elements_a_block(element)
    for size, count, late in [(1, 70, 0), (2, share + 3, 1), (3, share, 0), (5, 2 * share - 1, 0)]:
        rank, stride = size // 2, -(-count * item // ROW_ALIGN) * ROW_ALIGN
        rows, mine = aligned(size * stride), aligned((count + late + 1) * item)
        for index in range(size):
            values = bytes_of(mixed_values(dtype, count, index))
            (mine[late * item :] if index == rank else rows[index * stride :])[: count * item] = (
                values
            )
        memory = Memory({ARRAYS: mine.copy(), 2 * ARRAYS: rows}, writable={ARRAYS})
        factor = int(np.float64(op.factor or 0).view(np.int64))
        facts = stride, rank, size, count, share, factor, 0
        blocks = -(-count // share)
        own = ARRAYS + late * item
        launch(kernel, memory, [own, own, 2 * ARRAYS, *facts], range(blocks), THREADS)
        own = mine.ctypes.data + late * item
        every_thread(op.kind, element)([own, own, rows.ctypes.data, *facts], blocks)
        assert same_bits(memory.bytes_at(ARRAYS).view(dtype.numpy), mine.view(dtype.numpy))
        assert int(memory.stores.sum()) == count * item


@pytest.mark.long
@each_pair
def test_many_values(src: DType, dst: DType) -> None:
    kernel = kernel_of(src, dst)
    random = np.random.default_rng(1)
    for seed in range(20):
        check(kernel, src, dst, pieces_of(src, 1000 * seed), factor=float(random.normal()))
        values = mixed_values(src, 1 << 18, seed)
        check(kernel, src, dst, [Piece(values)], factor=float(np.exp(random.normal() * 20)))
