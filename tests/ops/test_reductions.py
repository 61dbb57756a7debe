"""A reduction is a single object for each kind, factor and purpose, also after pickling."""

import copy
import math
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nc10d.errors import CollectiveMismatch
from nc10d.ops import AVG, SUM, premul_sum
from nc10d.ops.reductions import REDUCE_OPS
from nc10d.testing import run_ranks

REDUCTIONS = st.one_of(st.sampled_from(REDUCE_OPS), st.builds(premul_sum, st.floats(-2, 2)))
PURPOSES = st.text(max_size=3)


@given(op=REDUCTIONS, purpose=PURPOSES, other=PURPOSES)
def test_equal_reductions_are_the_same_object(op, purpose, other):
    meant = op.meant_for(purpose)
    assert (meant.kind, meant.factor, meant.purpose) == (op.kind, op.factor, purpose)
    assert (meant is op) == (purpose == "")
    assert (meant is op.meant_for(other)) == (purpose == other)
    assert pickle.loads(pickle.dumps(meant)) is meant
    assert copy.copy(meant) is meant


def test_factors_with_other_bits_are_other_reductions():
    zero, nan = premul_sum(0.0), premul_sum(float("nan"))
    assert premul_sum(-0.0) is not zero
    assert math.copysign(1, premul_sum(-0.0).factor) == -1
    assert premul_sum(float("nan")) is nan


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
@pytest.mark.parametrize("factor", [math.inf, -math.inf, math.nan, -0.0])
def test_a_factor_may_be_any_float(dtype, factor):
    def scaled(group):
        x = np.ones(2, dtype)
        group.all_reduce(x, premul_sum(factor))
        return x

    kept = premul_sum(0.0)
    for x in run_ranks(scaled, 2):
        expected = np.full(2, factor + factor, dtype)
        assert np.array_equal(x, expected, equal_nan=True)
        assert math.isnan(factor) or np.array_equal(np.signbit(x), np.signbit(expected))
    del kept


def test_the_name_contains_the_purpose():
    assert SUM.name == "SUM"
    assert SUM.meant_for("rent").name == "SUM for rent"


def averaged(group, purposes):
    x = np.array([float(group.rank)])
    group.all_reduce(x, AVG.meant_for(purposes[group.rank]))
    return x[0]


def test_a_purpose_changes_no_element():
    assert run_ranks(averaged, 2, "threads", [["rent"] * 2] * 2) == [0.5, 0.5]


def test_calls_for_different_purposes_are_a_mismatch():
    with pytest.raises(CollectiveMismatch, match="AVG for food") as caught:
        run_ranks(averaged, 2, "threads", [["rent", "food"]] * 2)
    assert "AVG for rent" in str(caught.value)
