"""A mean is over all ranks, or over the ranks that still have a batch."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nc10d.reducer.gradients import SparseGradient
from nc10d.reducer.hooks import noop_hook
from nc10d.reducer.reducer import Reducer
from nc10d.testing import run_local

SIZE = 4


def train(group, batches, static, options):
    """Run `batches[rank]` passes, then shadow passes until no rank has a batch."""
    params = [np.zeros(3), np.zeros(2), np.zeros((4, 1))]
    reducer = Reducer(params, group, expect_sparse=[False, False, True], cap_bytes=8, **options)
    found = []
    for step in range(max(batches)):
        active = np.array([int(step < batches[group.rank])], np.int64)
        counting = group.all_reduce(active, async_op=True)
        reducer.set_forward_pass_work_handle(counting, static)
        if step < batches[group.rank]:
            one_pass(reducer, group.rank)
            found.append([gradient_of(g) for g in reducer.gradients])
        else:
            reducer.shadow_pass()
        reducer.rebuild()
    return found


def one_pass(reducer, rank):
    reducer.begin()
    reducer.grad_ready(1, np.full(2, 4.0 * (rank + 1)))
    reducer.grad_ready(2, SparseGradient(np.array([[rank]]), np.array([[12.0]])))
    reducer.grad_ready(0, np.full(3, 12.0 * (rank + 1)))
    reducer.finish()


def gradient_of(gradient):
    dense = gradient.dense((4, 1)) if isinstance(gradient, SparseGradient) else gradient
    return dense.ravel().tolist()


def expected(batches, step, static):
    active = [rank for rank in range(SIZE) if step < batches[rank]]
    count = SIZE if static else len(active)
    total = sum(rank + 1 for rank in active)
    rows = [12 / count if rank in active else 0 for rank in range(4)]
    return [[12 * total / count] * 3, [4 * total / count] * 2, rows]


@settings(deadline=None, max_examples=25)
@given(
    batches=st.lists(st.integers(0, 3), min_size=SIZE, max_size=SIZE),
    static=st.booleans(),
    options=st.sampled_from([{}, {"static_graph": True}, {"find_unused_parameters": True}]),
)
def test_uneven_batches_are_divided_by_initial_or_remaining_ranks(batches, static, options):
    each = [[value] * SIZE for value in (batches, static, options)]
    for rank, found in enumerate(run_local(train, SIZE, *each)):
        assert len(found) == batches[rank]
        for step, gradients in enumerate(found):
            for mine, theirs in zip(gradients, expected(batches, step, static), strict=True):
                assert mine == pytest.approx(theirs)


@pytest.mark.ranks(2)
def test_a_shadow_pass_leaves_the_ranks_own_gradients_alone(world):
    reducer = Reducer([np.zeros(2)], world)
    reducer.gradients[0][...] = 7
    reducer.shadow_pass()
    assert reducer.gradients[0].tolist() == [7, 7]


@pytest.mark.ranks(1)
def test_a_count_of_no_ranks_is_refused_and_a_count_holds_for_one_pass(world):
    reducer = Reducer([np.zeros(2)], world)
    reducer.set_forward_pass_work_handle(world.all_reduce(np.zeros(1), async_op=True))
    reducer.begin()
    with pytest.raises(ValueError, match="0 of 1 ranks have a batch"):
        reducer.grad_ready(0, np.ones(2))
    with pytest.raises(ValueError, match="0 of 1 ranks have a batch"):
        reducer.finish()
    reducer.begin()
    reducer.grad_ready(0, np.ones(2))
    reducer.finish()
    assert reducer.gradients[0].tolist() == [1, 1]


@pytest.mark.ranks(1, strict=False)
def test_a_hook_divides_for_itself(world):
    reducer = Reducer([np.zeros(2)], world, hook=noop_hook)
    reducer.set_forward_pass_work_handle(world.all_reduce(np.ones(1), async_op=True))
    reducer.begin()
    reducer.grad_ready(0, np.ones(2))
    reducer.finish()
    assert reducer.gradients[0].tolist() == [1, 1]
