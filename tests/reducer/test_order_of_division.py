"""Ranks divide gradients by their number before they add them, so that a mean is no overflow."""

import functools
import itertools

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nc10d.ops import SUM
from nc10d.reducer.gradients import SparseGradient
from nc10d.reducer.hooks import allreduce_hook, bf16_compress_wrapper
from nc10d.reducer.hooks.local_sgd import average_parameters
from nc10d.reducer.hooks.quantization import quantization_pertensor_hook
from nc10d.reducer.reducer import Reducer
from nc10d.testing import reference, run_local

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.complex64]
LARGE = 40_000
"""Elements of an array whose copy to the bucket divides it, in every dtype."""


def expected(gradients):
    """The sum in rank order of each rank's gradient, divided and rounded."""
    parts = [reference.divided(x, len(gradients)) for x in gradients]
    return functools.reduce(lambda x, y: reference.pairwise(x, y, SUM.pairwise), parts)


def numbers(dtype, seed, count):
    """Return numbers of which two seldom have a sum in the dtype's range."""
    kind = ml_dtypes if dtype is ml_dtypes.bfloat16 else np
    top = float(kind.finfo(dtype).max) * 0.9
    random = np.random.default_rng(seed).uniform(0.6, 1, count)
    return (random * top).astype(dtype)


def train(group, gradients, own, hook, options):
    """Return the means of two passes; gradients in `own` are passed as arrays, others in place."""
    mine = gradients[group.rank]
    reducer = Reducer(mine, group, hook=hook, cap_bytes=1 << 30, first_bytes=1 << 30, **options)
    found = []
    for _ in range(2):
        reducer.begin()
        for index, x in enumerate(mine):
            given = x.copy() if own[index] else None
            if given is None:
                reducer.gradients[index][...] = x
            reducer.grad_ready(index, given)
        reducer.finish()
        found.append([x.copy() for x in reducer.gradients])
    return found


@settings(deadline=None, max_examples=40)
@given(
    data=st.data(),
    size=st.integers(1, 4),
    dtype=st.sampled_from(DTYPES),
    hook=st.sampled_from([None, allreduce_hook]),
    options=st.sampled_from([{}, {"static_graph": True}, {"delay_all_reduce": True}]),
)
def test_each_rank_divides_before_the_sum_however_a_gradient_comes(
    data, size, dtype, hook, options
):
    counts = data.draw(st.lists(st.sampled_from([1, 7, LARGE]), min_size=1, max_size=4))
    own = data.draw(st.lists(st.booleans(), min_size=len(counts), max_size=len(counts)))
    gradients = [
        [numbers(dtype, 10 * rank + i, count) for i, count in enumerate(counts)]
        for rank in range(size)
    ]
    want = [expected(arrays) for arrays in zip(*gradients, strict=True)]
    each = [[value] * size for value in (gradients, own, hook, options)]
    for passes in run_local(train, size, *each):
        for means in passes:
            for mean, right in zip(means, want, strict=True):
                assert np.isfinite(mean).all()
                assert mean.tobytes() == right.tobytes()


@pytest.mark.parametrize(
    "hook", [bf16_compress_wrapper(allreduce_hook), quantization_pertensor_hook]
)
def test_hooks_that_compress_divide_first(hook):
    gradients = [[np.full(9, 3e38, np.float32)]] * 2
    for passes in run_local(train, 2, [gradients] * 2, [[False]] * 2, [hook] * 2, [{}] * 2):
        assert np.allclose(passes[0][0], 3e38, rtol=1e-2)


def test_ints_are_divided_after_their_sum():
    gradients = [[np.full(3, 1)], [np.full(3, 3)]]
    found = run_local(train, 2, [gradients] * 2, [[True]] * 2, [None] * 2, [{}] * 2)
    assert [passes[1][0].tolist() for passes in found] == [[2] * 3] * 2


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_a_mean_of_rows_has_no_overflow(dtype):
    top = float(np.finfo(dtype).max)

    def run(group):
        reducer = Reducer([np.zeros((4, 2), dtype)], group, expect_sparse=[True])
        reducer.begin()
        reducer.grad_ready(0, SparseGradient(np.array([[1]]), np.full((1, 2), top, dtype)))
        reducer.finish()
        return reducer.gradients[0].values.tolist()

    assert run_local(run, 2) == [[[top, top]]] * 2


@pytest.mark.ranks(2)
def test_a_mean_of_parameters_has_no_overflow(world):
    whole = np.full((2, 3), 60_000, np.float16)
    average_parameters([whole], world)
    assert whole.tolist() == [[60_000.0] * 3] * 2


def test_a_gradient_that_is_its_bucket_may_be_marked_again():
    """A copy divides; an array that is its own slot is not divided at each of its marks."""

    def run(group, arrays):
        reducer = Reducer([np.zeros(LARGE)], group, static_graph=True)
        for _ in range(2):
            reducer.begin()
            for array in arrays:
                reducer.gradients[0][...] = group.rank
                own = np.full(LARGE, float(group.rank))
                reducer.grad_ready(0, {"own": own, "slot": reducer.gradients[0]}.get(array))
            reducer.finish()
        return reducer.gradients[0][0]

    for arrays in itertools.product(["own", "slot", "none"], repeat=2):
        assert run_local(run, 2, [arrays] * 2) == [0.5] * 2
