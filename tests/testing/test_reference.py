"""The reference itself, against numbers computed by hand or in exact arithmetic."""

import doctest
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nc10d.ops import AVG, BXOR, MAX, MIN, PRODUCT, SUM, premul_sum
from nc10d.testing import reference


def ranks(*values, dtype=np.float64):
    return [np.array(v, dtype) for v in values]


def test_all_reduce_gives_every_rank_the_same_result():
    found = reference.all_reduce(ranks([1, 2], [3, 4], [5, 6]))
    assert [x.tolist() for x in found] == [[9, 12]] * 3
    assert found[0] is not found[1]


def test_reduce_changes_only_the_root():
    found = reference.reduce(ranks([1], [2], [4]), root=1, op=MAX)
    assert [x.tolist() for x in found] == [[1], [4], [4]]


def test_moving_collectives_move():
    a, b = ranks([1, 2], [3])
    assert [x.tolist() for x in reference.broadcast([a, b], root=1)] == [[3], [3]]
    assert [x.tolist() for x in reference.scatter([a, b])] == [[1, 2], [3]]
    assert [[x.tolist() for x in out] for out in reference.all_gather([a, b])] == [
        [[1, 2], [3]]
    ] * 2
    on_other, on_root = reference.gather([a, b], root=1)
    assert on_other is None
    assert [x.tolist() for x in on_root] == [[1, 2], [3]]
    (c, d), (e, f) = ranks([1], [2, 2]), ranks([3, 3, 3], [4])
    moved = reference.all_to_all([[c, d], [e, f]])
    assert [[x.tolist() for x in out] for out in moved] == [[[1], [3, 3, 3]], [[2, 2], [4]]]


def test_reduce_scatter_reduces_chunk_by_chunk():
    found = reference.reduce_scatter([ranks([1], [2, 3]), ranks([10], [20, 30])])
    assert [x.tolist() for x in found] == [[11], [22, 33]]


def test_inputs_are_left_alone():
    arrays = ranks([1.0], [2.0])
    for op in (SUM, AVG, PRODUCT, MIN, premul_sum(2.0)):
        reference.all_reduce(arrays, op)[0][:] = 99
    assert [x.tolist() for x in arrays] == [[1], [2]]


def test_zero_dimensions_and_no_elements_stay_so():
    assert reference.all_reduce(ranks(1.5, 2.5))[0].shape == ()
    assert reference.all_reduce(ranks([], []), AVG)[0].shape == (0,)
    assert reference.all_reduce(ranks([[1.0]], [[2.0]]), premul_sum(2.0))[0].shape == (1, 1)


def test_ints_wrap_and_their_average_truncates_toward_zero():
    assert reference.fold(ranks([127], [1], dtype=np.int8), SUM).tolist() == [-128]
    assert reference.fold(ranks([-4, 4], [-3, 3], dtype=np.int32), AVG).tolist() == [-3, 3]
    assert reference.fold(ranks([200], [1], dtype=np.uint8), premul_sum(2.0)).tolist() == [146]


def test_bool_sums_are_or_and_products_are_and():
    arrays = ranks([True, True, False], [True, False, False], dtype=bool)
    assert reference.fold(arrays, SUM).tolist() == [True, True, False]
    assert reference.fold(arrays, PRODUCT).tolist() == [True, False, False]
    assert reference.fold(arrays, BXOR).tolist() == [False, True, False]
    with pytest.raises(TypeError, match="AVG of bool"):
        reference.fold(arrays, AVG)


def test_nan_propagates_in_min_and_max():
    for op in (MIN, MAX):
        assert np.isnan(reference.fold(ranks([np.nan, 1], [1, np.nan]), op)).all()


def test_narrow_floats_round_at_every_hop():
    # 256 + 1 rounds back to 256 in bfloat16, each time: an exact sum would reach 260.
    arrays = ranks([256], [1], [1], [1], [1], dtype=ml_dtypes.bfloat16)
    assert reference.fold(arrays, SUM).tolist() == [256]


def test_factor_is_rounded_to_the_dtype_first():
    third = float(np.float16(1 / 3))
    found = reference.fold(ranks([3.0], dtype=np.float16), premul_sum(1 / 3))
    assert found.tolist() == [float(np.float16(3 * third))]


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False, width=16), min_size=2, max_size=2))
def test_one_hop_of_float16_is_the_exact_sum_rounded(values):
    exact = Fraction(values[0]) + Fraction(values[1])
    with np.errstate(over="ignore"):
        expected = np.float16(float(exact))  # a sum of two float16 is exact in a double
    found = reference.fold([np.array([v], np.float16) for v in values], SUM)
    assert found.tolist() == [expected]


def test_same_bits_sees_signs_of_zero_but_not_payloads():
    quiet = np.array([0x7FC00000, 0x7FC00001], np.uint32).view(np.float32)
    assert reference.same_bits(quiet[:1], quiet[1:])
    assert not reference.same_bits(np.array([0.0]), np.array([-0.0]))
    assert not reference.same_bits(np.array([1]), np.array([1.0]))
    assert not reference.same_bits(np.array([1.0]), np.array([[1.0]]))
    assert reference.same_bits(np.array([complex(np.nan, 1)]), np.array([complex(np.nan, 1)]))


def test_the_examples_in_its_docstring_hold():
    assert doctest.testmod(reference).failed == 0
