"""Passes that repeat: what a pass prepares is valid for the next, and costs few Python frames."""

from functools import partial
from typing import Any

import numpy as np
import pytest
from entered_functions import python_frames

from nc10d.reducer import Reducer
from nc10d.reducer.packing import LARGE
from nc10d.testing import run_ranks

LONG = LARGE // 4
"""The elements of a float32 gradient whose copy to the bucket divides it."""


def frames_of_passes(group: Any, count: int, own: bool) -> int:
    reducer = Reducer([np.zeros(8, np.float32) for _ in range(count)], group)
    gradients = [np.ones(8, np.float32) if own else None for _ in range(count)]

    def one_pass() -> None:
        reducer.begin()
        for param, gradient in enumerate(gradients):
            reducer.grad_ready(param, gradient)
        reducer.finish()

    one_pass()
    reducer.rebuild()
    return min(python_frames(one_pass) for _ in range(10))


@pytest.mark.parametrize("own", [False, True], ids=["in the buckets", "in arrays of their own"])
def test_a_pass_takes_few_python_frames(own: bool) -> None:
    # A rank alone: with peers, a bucket is reduced at once only if they come in time.
    two, six = (
        run_ranks(partial(frames_of_passes, count=count, own=own), 1)[0] for count in (2, 6)
    )
    assert two <= 60 + 3 * own
    assert six - two <= 4 * (4 + own)


def mean_of_a_late_long_gradient(group: Any) -> Any:
    reducer = Reducer([np.zeros(LONG, np.float32), np.zeros(1, np.float32)], group, first_bytes=1)
    has_batch = np.array([1 - group.rank])
    reducer.set_forward_pass_work_handle(group.all_reduce(has_batch, async_op=True))
    if group.rank:
        reducer.shadow_pass()
        return None
    long, short = np.full(LONG, 6, np.float32), np.full(1, 6, np.float32)
    reducer.begin()
    reducer.grad_ready(1, short)  # launches a bucket, so the ranks with a batch are counted
    reducer.grad_ready(0, long)
    reducer.finish()
    return long[0], short[0]


def test_a_long_gradient_after_the_first_bucket_is_divided_by_the_ranks_that_have_a_batch() -> None:
    assert run_ranks(mean_of_a_late_long_gradient, 2)[0] == (6, 6)


@pytest.mark.ranks(2, strict=False)
def test_each_gradient_of_a_pass_is_divided_once_wherever_it_lies(world: Any) -> None:
    reducer = Reducer([np.zeros(LONG, np.float32) for _ in range(3)], world)
    found = []
    # The copy of a long gradient divides it; a gradient in its bucket is divided at the launch.
    for own in ([0, 1, 2], [1], [], [0, 2], [0, 1, 2]):
        given = [np.full(LONG, 2.0 * param + world.rank, np.float32) for param in range(3)]
        reducer.begin()
        for param, gradient in enumerate(given):
            reducer.gradients[param][...] = gradient
            reducer.grad_ready(param, gradient if param in own else None)
        reducer.finish()
        found.append([float(x[-1]) for x in reducer.gradients])
    assert found == [[0.5, 2.5, 4.5]] * 5


@pytest.mark.ranks(2, strict=False)
def test_a_hook_may_resize_the_array_that_it_sets_between_passes(world: Any) -> None:
    owned = [np.zeros(4, np.float32) for _ in range(3)]

    def hook(_: Any, bucket: Any) -> Any:
        x = owned[0]
        x.resize(1 << 20, refcheck=False)  # large, and small again: at another address
        x.resize(4, refcheck=False)
        x[...] = bucket.buffer()
        bucket.set_buffer(x)
        return bucket.average(world)

    reducer = Reducer([np.zeros(4, np.float32)], world, hook=hook)
    found = []
    for value in (2.0, 4.0):
        reducer.begin()
        reducer.gradients[0][...] = value + world.rank
        reducer.grad_ready(0)
        reducer.finish()
        found.append(float(reducer.gradients[0][0]))
    assert found == [2.5, 4.5]
