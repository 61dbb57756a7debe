"""The user's own choice of buckets: limits, lists of parameters, delayed and skipped buckets."""

import numpy as np
import pytest

from nc10d.reducer import Reducer
from nc10d.reducer.plan import plan_buckets
from nc10d.testing import run_local

COUNT, BYTES = 6, 8


def passes(group, **options):
    """Return the buckets and the means of two passes, of which the second has new buckets."""
    reducer = Reducer([np.zeros(1)] * COUNT, group, **options)
    for _ in range(2):
        reducer.rebuild()
        reducer.begin()
        for param in (1, 0, 3, 2, 5, 4):
            reducer.gradients[param][...] = param * (group.rank + 1)
            reducer.grad_ready(param)
        reducer.finish()
    means = [float(x[0]) / 1.5 for x in reducer.gradients]
    return [bucket.params for bucket in reducer.plan.buckets], means


@pytest.mark.parametrize(
    ("options", "buckets"),
    [
        ({"size_limits": [BYTES, 3 * BYTES, 2 * BYTES]}, [[1], [0, 3, 2], [5, 4]]),
        ({"size_limits": [2 * BYTES]}, [[1, 0], [3, 2], [5, 4]]),
        ({"bucket_indices": [[5, 0], [1], [4, 3, 2]]}, [[5, 0], [1], [4, 3, 2]]),
        (
            {"size_limits": [2 * BYTES], "delayed": [4, 1], "delayed_until": 0},
            [[0, 3], [4, 1], [2, 5]],
        ),
        ({"size_limits": [BYTES], "delayed": range(COUNT)}, [[0, 1, 2, 3, 4, 5]]),
        ({"size_limits": [3 * BYTES], "delayed": [1, 0, 3]}, [[2, 5, 4], [1, 0, 3]]),
    ],
)
def test_buckets_are_those_of_the_options(options, buckets):
    for found, means in run_local(lambda group: passes(group, **options), 2):
        assert found == buckets
        assert means == pytest.approx(range(COUNT))


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"bucket_indices": [[0, 1]]}, "each of the 6 parameters once"),
        ({"delayed": [0, 0]}, r"each once: \[0, 0\]"),
        ({"delayed": [6]}, "indices of 6 parameters"),
        ({"size_limits": [-1]}, "size limits must be"),
        (
            {"bucket_indices": [range(COUNT)], "expect_sparse": [True] + [False] * 5},
            "a sparse gradient needs a bucket of its own",
        ),
    ],
)
def test_impossible_buckets_are_refused(world, options, words):
    with pytest.raises(ValueError, match=words):
        Reducer([np.zeros(1)] * COUNT, world, **options)


@pytest.mark.parametrize(
    "options",
    [
        [{"size_limits": [8, 16, 8]}, {"size_limits": [8, 24, 8]}],
        [{"bucket_indices": [range(COUNT)]}, {"bucket_indices": [[0], range(1, COUNT)]}],
        [{"delayed": [0]}, {"delayed": [1]}],
        [{"skip_unused_buckets": True}, {}],
    ],
)
def test_ranks_with_other_buckets_are_told_so_at_the_start(options):
    def run(group, given):
        with pytest.raises(ValueError, match="rank 0 has"):
            Reducer([np.zeros(1)] * COUNT, group, **given)

    run_local(run, 2, options)


def test_a_bucket_is_skipped_only_if_all_of_its_gradients_are_unused():
    def run(group):
        options = {"find_unused_parameters": True, "skip_unused_buckets": True}
        reducer = Reducer([np.zeros(1)] * 4, group, bucket_indices=[[0, 1], [2, 3]], **options)
        skipped = []
        for unused in ({0, 1, 2}, {2}, {2, 3}):
            for param in range(4):
                reducer.gradients[param][...] = group.rank + 1
            reducer.begin(unused)
            for param in set(range(4)) - unused:
                reducer.grad_ready(param)
            reducer.finish()
            skipped.append(reducer.skipped_buckets)
        return skipped, [float(x[0]) for x in reducer.gradients]

    own = [1.0, 2.0]
    found = run_local(run, 2)
    assert found == [([1, 0, 1], [1.5, 1.5, rank, rank]) for rank in own]


def test_a_plan_without_arrivals_ends_with_the_first_parameters():
    plan = plan_buckets([(1, "float64")] * 4, size_limits=[BYTES, 2 * BYTES])
    assert [bucket.params for bucket in plan.buckets] == [[3], [1, 2], [0]]
