"""Bucket plans: exactly c10d's assignment, and contiguous slots."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nc10d import DType
from nc10d.reducer.plan import (
    Spec,
    arrival_order,
    compute_bucket_assignment_by_size,
    lay_out,
    plan_buckets,
    spec_of,
)
from nc10d.reducer.settings import checked_sparse

torch = pytest.importorskip("torch")
DTYPES = ["float32", "float64", "float16", "int64", "uint8"]
KEYS = st.tuples(st.sampled_from(DTYPES), st.sampled_from(["cpu", "meta"]))
COUNTS = st.integers(0, 3) | st.integers(0, 1000)
LIMITS = st.lists(st.integers(0, 50) | st.integers(0, 5000), min_size=1, max_size=4)


def specs(keys=KEYS):
    parameter = st.tuples(COUNTS, keys).map(lambda drawn: (drawn[0], *drawn[1]))
    return st.lists(parameter, min_size=1, max_size=30)


def torchs(specs, limits, sparse, indices):
    """The result of torch's own function, on parameters that need almost no memory."""
    tensors = [torch.empty(n, dtype=getattr(torch, t), device=d) for n, t, d in specs]
    buckets, sizes = torch.distributed._compute_bucket_assignment_by_size(
        tensors, limits, sparse or [], indices or []
    )
    return buckets, sizes


@settings(deadline=None, max_examples=150)
@given(data=st.data(), specs=specs(), limits=LIMITS)
def test_buckets_are_torchs(data, specs, limits):
    flags = st.lists(st.booleans(), min_size=len(specs), max_size=len(specs))
    sparse = data.draw(st.none() | flags)
    assert compute_bucket_assignment_by_size(specs, limits, sparse) == torchs(
        specs, limits, sparse, None
    )


TWO_KEYS = st.sampled_from([("float32", "cpu"), ("float64", "cpu")])


@settings(deadline=None, max_examples=150)
@given(data=st.data(), specs=specs(TWO_KEYS), limits=LIMITS)
def test_with_indices_buckets_are_torchs(data, specs, limits):
    indices = data.draw(st.permutations(range(len(specs))))
    flags = st.lists(st.booleans(), min_size=len(specs), max_size=len(specs))
    sparse = data.draw(st.none() | flags)
    assert compute_bucket_assignment_by_size(specs, limits, sparse, indices) == torchs(
        specs, limits, sparse, indices
    )


@settings(deadline=None, max_examples=150)
@given(data=st.data(), specs=specs(), limits=LIMITS)
def test_with_indices_and_many_keys_only_the_order_of_partial_buckets_differs(data, specs, limits):
    indices = data.draw(st.permutations(range(len(specs))))
    ours = list(zip(*compute_bucket_assignment_by_size(specs, limits, None, indices), strict=True))
    theirs = list(zip(*torchs(specs, limits, None, indices), strict=True))
    nbytes = {i: n * np.dtype(t).itemsize for i, (n, t, _) in zip(indices, specs, strict=True)}
    full = sum(sum(map(nbytes.get, bucket)) >= limit for bucket, limit in ours)
    assert ours[:full] == theirs[:full]
    assert sorted(ours[full:]) == sorted(theirs[full:])


def random_input(rng):
    """A larger input than hypothesis draws, cheap enough for thousands of them."""
    count = rng.randint(1, 40)
    keys = rng.sample(
        [("float32", "cpu"), ("int64", "cpu"), ("float16", "meta")], rng.randint(1, 2)
    )
    specs = [(rng.choice([0, 1, rng.randint(1, 3000)]), *rng.choice(keys)) for _ in range(count)]
    limits = [rng.randint(0, 20000) for _ in range(rng.randint(1, 4))]
    sparse = rng.choice([None, [rng.random() < 0.2 for _ in range(count)]])
    indices = rng.choice([None, rng.sample(range(count), count)])
    return specs, limits, sparse, indices


def test_thousands_of_larger_inputs_are_assigned_as_torch_does():
    rng = random.Random(5)
    for _ in range(3000):
        given = random_input(rng)
        assert compute_bucket_assignment_by_size(*given) == torchs(*given), given


@settings(deadline=None, max_examples=50)
@given(specs=specs(), limits=LIMITS)
def test_an_empty_list_of_flags_or_indices_means_none(specs, limits):
    assert compute_bucket_assignment_by_size(specs, limits, [], []) == torchs(
        specs, limits, None, None
    )
    assert plan_buckets(specs, expect_sparse=[]) == plan_buckets(specs)
    assert checked_sparse([], len(specs)) == checked_sparse(None, len(specs))


def test_the_first_bucket_is_small_and_the_last_limit_repeats():
    specs = [(10, "uint8", "cpu")] * 6
    buckets, limits = compute_bucket_assignment_by_size(specs, [10, 20])
    assert buckets == [[0], [1, 2], [3, 4], [5]]
    assert limits == [10, 20, 20, 20]


def test_a_spec_may_be_an_array():
    arrays = [np.zeros((2, 3), np.float32), np.zeros(4)]
    assert [spec_of(x) for x in arrays] == [
        Spec((2, 3), DType.FLOAT32, "cpu"),
        spec_of((4, "float64")),
    ]
    assert compute_bucket_assignment_by_size(arrays, [100])[0] == [[0], [1]]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([], [1]), "no parameters"),
        (([(1, "uint8")], []), "size limits"),
        (([(1, "uint8")], [-1]), "size limits"),
        (([(1, "uint8")], [1], [True, False]), "expect_sparse has 2 entries for 1"),
        (([(1, "uint8")] * 2, [1], None, [1]), "indices has 1 entries for 2"),
        (([(1, "uint8")] * 2, [1], [True, True], [0, 2]), "from 0 to 1"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        compute_bucket_assignment_by_size(*arguments)


@settings(deadline=None)
@given(data=st.data(), specs=specs(), caps=st.tuples(*[st.integers(1, 5000)] * 2))
def test_a_plan_gives_each_parameter_one_slot_and_leaves_no_gap(data, specs, caps):
    order = data.draw(st.none() | st.permutations(range(len(specs))))
    plan = plan_buckets(specs, caps, order=order)
    assert sorted(p for bucket in plan.buckets for p in bucket.params) == [*range(len(specs))]
    for bucket in plan.buckets:
        ends = np.cumsum([0, *(slot.count for slot in bucket.slots)])
        assert [slot.offset for slot in bucket.slots] == ends[:-1].tolist()
        assert bucket.count == ends[-1]
        assert {(bucket.dtype.label, bucket.device)} == {specs[p][1:] for p in bucket.params}


def test_the_last_parameters_come_first_without_an_order():
    specs = [(10, "uint8")] * 3
    assert [b.params for b in plan_buckets(specs, [10]).buckets] == [[2], [1], [0]]
    order = [1, 2, 0]
    assert [b.params for b in plan_buckets(specs, [10, 20], order=order).buckets] == [[1], [2, 0]]


@given(count=st.integers(1, 20), data=st.data())
def test_an_order_of_arrival_has_each_parameter_once_first_arrivals_first(count, data):
    arrived = data.draw(st.lists(st.integers(0, count - 1)))
    order = arrival_order(arrived, count)
    assert sorted(order) == list(range(count))
    seen = list(dict.fromkeys(arrived))
    assert order[: len(seen)] == seen
    assert order[len(seen) :] == sorted(set(range(count)) - set(seen), reverse=True)


def test_buckets_that_mix_or_miss_parameters_are_refused():
    specs = [spec_of((1, "float32")), spec_of((1, "float64"))]
    with pytest.raises(ValueError, match="differ in dtype"):
        lay_out(specs, [[0, 1]], None)
    with pytest.raises(ValueError, match="each of the 2 parameters once"):
        lay_out(specs, [[0]], None)
    with pytest.raises(ValueError, match="each of the 2 parameters once"):
        plan_buckets(specs, order=[0, 0])
