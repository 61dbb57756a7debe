"""Gradients in a dtype of their own, and buckets that are handed over while a pass goes on."""

import numpy as np
import pytest

from nc10d.reducer.reducer import Reducer

COUNT = 4


def params():
    return [np.zeros(3) for _ in range(COUNT)]


@pytest.mark.ranks(2)
def test_gradients_have_the_given_dtypes(world):
    reducer = Reducer(params(), world, gradient_dtypes=["float32", "float64"] * 2)
    reducer.begin()
    for index in range(COUNT):
        reducer.grad_ready(index, np.full(3, world.rank, reducer.gradients[index].dtype))
    reducer.finish()
    expected = [(kind, [0.5] * 3) for kind in ("float32", "float64")] * 2
    assert [(str(x.dtype), x.tolist()) for x in reducer.gradients] == expected


@pytest.mark.ranks(2)
def test_as_many_dtypes_as_parameters_are_asked_for(world):
    with pytest.raises(ValueError, match="1 gradient_dtypes for 4 parameters"):
        Reducer(params(), world, gradient_dtypes=["float32"])


@pytest.mark.ranks(2)
def test_each_bucket_is_handed_over_once_in_plan_order_with_its_means(world):
    handed = []

    def on_reduced(indices):
        handed.append([(i, reducer.gradients[i].tolist()) for i in indices])

    reducer = Reducer(params(), world, cap_bytes=24, first_bytes=24, on_reduced=on_reduced)
    early = []
    for _ in range(2):
        handed.clear()
        reducer.begin()
        for index in reversed(range(COUNT)):
            reducer.grad_ready(index, np.full(3, float(index + world.rank)))
            world.barrier()  # behind the bucket, on every rank: the next launch finds its means
            early.append(len(handed))
        reducer.finish()
        found = [*handed]
    handed.clear()
    reducer.shadow_pass()  # of a rank without a batch: nothing to hand over
    plan = [[(i, [i + 0.5] * 3)] for i in reversed(range(COUNT))]
    assert found == plan
    # A launch hands over all buckets before its own, and its own if it is reduced by then.
    assert all(index % COUNT <= count for index, count in enumerate(early))
    assert handed == []


@pytest.mark.ranks(2)
def test_an_error_of_the_receiver_ends_the_pass_on_its_rank(world):
    def on_reduced(_):
        raise KeyError("receiver")

    reducer = Reducer(params(), world, on_reduced=on_reduced, delay_all_reduce=True)
    reducer.begin()
    for index in range(COUNT):
        reducer.grad_ready(index, np.ones(3))
    with pytest.raises(KeyError, match="receiver"):
        reducer.finish()
