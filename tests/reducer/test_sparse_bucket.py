"""Sparse gradients become the mean of all ranks' gradients."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nc10d.reducer.buckets.sparse_bucket import sum_rows
from nc10d.reducer.gradients import SparseGradient
from nc10d.reducer.reducer import Reducer
from nc10d.testing import run_local

SHAPE = (4, 3, 2)
DTYPES = st.sampled_from([np.float32, np.float64, np.float16, ml_dtypes.bfloat16])


@st.composite
def rows(draw, depth, dtype=np.float32):
    """Some rows of an array of SHAPE, addressed by `depth` dimensions; whole numbers."""
    places = st.tuples(*(st.integers(0, side - 1) for side in SHAPE[:depth]))
    drawn = draw(st.lists(places, max_size=6))
    each = SHAPE[depth:]
    numbers = st.lists(st.integers(-4, 4), min_size=int(np.prod(each)), max_size=int(np.prod(each)))
    values = [np.reshape(draw(numbers), each) for _ in drawn]
    return SparseGradient(
        np.array(drawn, np.int64).reshape(-1, depth).T, np.array(values, dtype).reshape(-1, *each)
    )


@given(data=st.data(), depth=st.integers(1, 3), dtype=DTYPES)
def test_sum_rows_has_each_place_once_and_the_same_dense_gradient(data, depth, dtype):
    gradient = data.draw(rows(depth, dtype))
    found = sum_rows(gradient.indices, gradient.values, SHAPE)
    places = [tuple(place) for place in found.indices.T]
    assert places == sorted(set(map(tuple, gradient.indices.T)))
    whole = found.dense(SHAPE).astype(np.float64)
    assert np.array_equal(whole, gradient.dense(SHAPE).astype(np.float64))


def embedding(group, gradients, own):
    params = [np.zeros(2, np.float32), np.zeros(SHAPE, np.float32), np.zeros(3, np.float32)]
    reducer = Reducer(params, group, expect_sparse=[False, True, False])
    found = []
    for sparse in gradients[group.rank]:
        reducer.begin()
        given = SparseGradient(sparse.indices, sparse.values)
        reducer.grad_ready(2, np.full(3, group.rank, np.float32))
        if own:
            reducer.grad_ready(1, given)
        else:
            lying = reducer.gradients[1]
            lying.indices, lying.values = sparse.indices, sparse.values
            reducer.grad_ready(1)
        reducer.grad_ready(0, np.full(2, 2 * group.rank, np.float32))
        reducer.finish()
        assert reducer.gradients[0].tolist() == [group.size - 1] * 2
        assert reducer.gradients[2].tolist() == [(group.size - 1) / 2] * 3
        found.append(given if own else reducer.gradients[1])
        found[-1] = SparseGradient(found[-1].indices, found[-1].values)
        reducer.rebuild()
    return found


@settings(deadline=None, max_examples=40)
@given(data=st.data(), size=st.sampled_from([1, 2, 4]), depth=st.integers(1, 3), own=st.booleans())
def test_sparse_gradients_are_the_means(data, size, depth, own):
    passes = data.draw(st.integers(1, 3))
    given = [[data.draw(rows(depth)) for _ in range(passes)] for _ in range(size)]
    for found in run_local(embedding, size, [given] * size, [own] * size):
        for step, gradient in enumerate(found):
            total = sum(given[rank][step].dense(SHAPE) for rank in range(size))
            assert np.array_equal(gradient.dense(SHAPE), total / size)


@pytest.mark.ranks(3)
def test_rows_that_no_rank_has_used_stay_unchanged_and_zero_grad_drops_them(world):
    options = {"expect_sparse": [True], "find_unused_parameters": True}
    reducer = Reducer([np.zeros(SHAPE, np.float32)], world, **options)
    before = SparseGradient(np.array([[1]]), np.full((1, 3, 2), 0.1, np.float32))
    reducer.gradients[0].indices, reducer.gradients[0].values = before.indices, before.values
    reducer.begin(unused=[0])
    reducer.finish()
    kept = reducer.gradients[0].values is before.values
    reducer.zero_grad()
    assert kept
    assert reducer.gradients[0].values.shape == (0, 3, 2)


GOOD = SparseGradient(np.array([[0]]), np.zeros((1, 3, 2), np.float32))


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("gradient", "error", "words"),
    [
        (np.zeros(SHAPE, np.float32), TypeError, "must be a SparseGradient, got ndarray"),
        (SparseGradient(np.array([0]), GOOD.values), TypeError, r"int64 of shape \(d, n\)"),
        (SparseGradient(np.array([[0.0]]), GOOD.values), TypeError, r"int64 of shape \(d, n\)"),
        (SparseGradient(np.array([[0, 1]]), GOOD.values), ValueError, r"must have shape \(2, 3, 2"),
        (SparseGradient(np.array([[4]]), GOOD.values), ValueError, "outside of its shape"),
        (SparseGradient(np.array([[-1]]), GOOD.values), ValueError, "outside of its shape"),
        (SparseGradient(GOOD.indices, np.zeros((1, 3, 2))), TypeError, "its gradient of float64"),
    ],
)
def test_rows_that_do_not_fit_are_refused(world, gradient, error, words):
    reducer = Reducer([np.zeros(SHAPE, np.float32)], world, expect_sparse=[True])
    reducer.begin()
    with pytest.raises(error, match=words):
        reducer.grad_ready(0, gradient)


@pytest.mark.ranks(1)
def test_rows_are_not_for_a_dense_parameter(world):
    reducer = Reducer([np.zeros(SHAPE, np.float32)], world, names=["w"])
    reducer.begin()
    with pytest.raises(TypeError, match="of w must be an array, got SparseGradient"):
        reducer.grad_ready(0, GOOD)


@pytest.mark.ranks(2)
def test_ranks_that_address_rows_differently_all_raise(world):
    reducer = Reducer([np.zeros(SHAPE, np.float32)], world, expect_sparse=[True])
    depth = 1 + world.rank
    reducer.begin()
    values = np.zeros((1, *SHAPE[depth:]), np.float32)
    reducer.grad_ready(0, SparseGradient(np.zeros((depth, 1), np.int64), values))
    with pytest.raises(ValueError, match=r"different numbers of dimensions: \[1, 2\]"):
        reducer.finish()
