"""Blocks of threads fold in rank order as the reference does: a GPU kernel's own body."""

import numpy as np
import pytest
from fold_twins import CPU, every_thread
from hypothesis import given, settings
from hypothesis import strategies as st

import nc10d
from nc10d.arrays.dtypes import DType, element_of
from nc10d.kernels.gpu.gpu_reduce import ROW_ALIGN, elements_a_block, fold_body
from nc10d.ops import AVG, BXOR, MAX, PRODUCT, SUM, premul_sum
from nc10d.testing import reference
from nc10d.testing.reference import same_bits
from nc10d.testing.strategies import mixed_values

LIST = np.dtype([("values", "f4", (3,)), ("weight", "f4")])
APART = np.dtype({"names": ["a", "b"], "formats": ["i4", "f8"], "offsets": [0, 8], "itemsize": 24})


@nc10d.reduction(LIST)
def heaviest(a, b):
    return b if b.weight > a.weight else a


@nc10d.reduction(APART, map=lambda x: (x.a + 1, x.b), finish=lambda x: (x.a, x.b / 2))
def apart(x, y):
    return x.a + y.a, x.b - y.b


NARROW = np.dtype([("kind", "i1"), ("rows", "f2", (2, 2)), ("on", "?", (3,))])


@nc10d.reduction(NARROW)
def narrow(a, b, out):
    out.rows[0, 1], out.on[2] = a.rows[0, 1] / (b.rows[1, 0] + 1), a.on[0] ^ b.on[1]


KNOWN = [
    (SUM, DType.FLOAT32),
    (AVG, DType.BFLOAT16),
    (premul_sum(0.3), DType.FLOAT16),
    (premul_sum(3), DType.INT16),
    (PRODUCT, DType.COMPLEX64),
    (AVG, DType.COMPLEX128),
    (AVG, DType.INT8),
    (BXOR, DType.UINT16),
    (SUM, DType.BOOL),
    (MAX, DType.FLOAT8_E5M2),
]


def folded(op, given, rank, shift=0):
    """Return what a rank's threads write, from the others' rows and its own array.

    The own array begins `shift` elements behind a multiple of 16 bytes; the room around the result
    must stay as it is.
    """
    dtype = given[0].dtype
    item, count = dtype.itemsize, given[0].size
    stride = -(-count * item // ROW_ALIGN) * ROW_ALIGN
    rows, mine = aligned(len(given) * stride), aligned((count + shift + 1) * item)
    for index, x in enumerate(given):
        rows[index * stride :][: count * item] = x.view(np.uint8) if index != rank else 0xEE
    mine[:], first = 0xEE, shift * item
    mine[first : first + count * item] = given[rank].view(np.uint8)
    at, element = mine.ctypes.data + first, element_of(dtype)
    share = elements_a_block(element)
    factor = int(np.float64(op.factor or 0).view(np.int64))
    facts = rows.ctypes.data, stride, rank, len(given), count, share, factor, 0
    every_thread(op.kind, element)([at, at, *facts], -(-count // share))
    around = np.concatenate([mine[:first], mine[first + count * item :]])
    assert (around == 0xEE).all(), "only the result is written"
    return mine[first : first + count * item].copy().view(dtype)


def aligned(nbytes):
    room = np.empty(nbytes + ROW_ALIGN, np.uint8)
    return room[-room.ctypes.data % ROW_ALIGN :][:nbytes]


@pytest.mark.parametrize(("op", "dtype"), KNOWN, ids=lambda x: getattr(x, "label", x.__repr__()))
@settings(max_examples=15)
@given(
    size=st.integers(1, 5),
    count=st.one_of(st.integers(1, 70), st.integers(4000, 4200)),
    shift=st.integers(0, 3),
    data=st.data(),
)
def test_known_reductions_have_the_bits_of_the_reference(op, dtype, size, count, shift, data):
    rank = data.draw(st.integers(0, size - 1))
    given = [mixed_values(dtype, count, seed) for seed in range(size)]
    assert same_bits(folded(op, given, rank, shift), reference.fold(given, op))


@pytest.mark.parametrize(("op", "dtype"), [(heaviest, LIST), (apart, APART), (narrow, NARROW)])
def test_own_reductions_have_the_bits_of_the_reference(op, dtype):
    random = np.random.default_rng(0)
    for size, count in ((1, 3), (4, 300)):
        given = [np.zeros(count, dtype) for _ in range(size)]
        for x in given:
            for name in dtype.names:
                x[name] = random.integers(0, 9, x[name].shape)
        for rank in range(size):
            assert same_bits(folded(op, given, rank), reference.fold(given, op))


def test_a_record_with_arrays_in_it_has_aligned_fields():
    odd = np.dtype([("kind", "i1"), ("values", "f4", (2,))])

    @nc10d.reduction(odd)
    def first(a, b):
        return a

    with pytest.raises(
        TypeError, match=r"first can't .*: offset 1 .* the field alignment 4.*\n.*line"
    ):
        fold_body(CPU, first.kind, element_of(odd))
