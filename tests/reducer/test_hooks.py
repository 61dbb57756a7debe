"""Hooks end with the mean of all ranks' buckets, in as many bits as they promise."""

import ml_dtypes
import numpy as np
import pytest

from nc10d.errors import Aborted
from nc10d.reducer import hooks
from nc10d.reducer.hooks import GradBucket, reduced_array
from nc10d.reducer.plan import Slot
from nc10d.testing import run_local
from nc10d.work import Future, Work

SLOTS = [Slot(4, 0, 2, (2,)), Slot(1, 2, 4, (2, 2))]


def bucket_of(values, dtype=np.float32):
    buffer = np.array(values, dtype)
    return GradBucket(3, buffer, SLOTS, ["four", "one"], True)


def test_a_bucket_shows_its_parts():
    bucket = bucket_of(range(6))
    assert bucket.index() == 3
    assert bucket.is_last()
    assert bucket.parameters() == ["four", "one"]
    assert [g.tolist() for g in bucket.gradients()] == [[0, 1], [[2, 3], [4, 5]]]
    bucket.gradients()[1][1, 1] = 9
    assert bucket.buffer()[5] == 9


def test_a_new_buffer_takes_the_place_of_the_old_one():
    bucket = bucket_of(range(6))
    other = np.zeros(6, np.float16)
    bucket.set_buffer(other)
    assert bucket.buffer() is other
    assert bucket.gradients()[0].dtype == np.float16
    with pytest.raises(ValueError, match=r"shape \(6,\), the new one has \(5,\)"):
        bucket.set_buffer(np.zeros(5))


def reduced(group, hook, values):
    bucket = bucket_of(np.array(values) * (group.rank + 1))
    buffer = bucket.buffer()
    found = reduced_array(hook(group, bucket), bucket)
    return found, found is buffer, bucket.buffer() is buffer


NUMBERS = [1 / 3, -2.7, 1e-3, 20000.0, 0.0, 7.0]
FP16, BF16 = np.float16, ml_dtypes.bfloat16


def means(dtype):
    """The expected mean of 1, 2 and 3 times NUMBERS on three ranks: the sum of rounded thirds."""
    thirds = [(np.float32(np.array(NUMBERS) * k) * np.float32(1 / 3)) for k in (1, 2, 3)]
    first, second, third = (x.astype(dtype).astype(np.float32) for x in thirds)
    return ((first + second).astype(dtype).astype(np.float32) + third).astype(dtype)


@pytest.mark.parametrize(
    ("hook", "dtype"), [(hooks.fp16_compress_hook, FP16), (hooks.bf16_compress_hook, BF16)]
)
def test_a_compressing_hook_averages_rounded_gradients(hook, dtype):
    for found, same, kept in run_local(lambda g: reduced(g, hook, NUMBERS), 3):
        assert found.tolist() == means(dtype).astype(np.float32).tolist()
        assert same
        assert kept


def test_allreduce_averages_in_place():
    expected = (np.float32(NUMBERS) * 2).tolist()
    for found, same, _ in run_local(lambda g: reduced(g, hooks.allreduce_hook, NUMBERS), 3):
        assert np.allclose(found, expected, rtol=1e-6)
        assert same


def test_noop_leaves_the_bucket_unchanged():
    found = run_local(lambda g: reduced(g, hooks.noop_hook, [1.0] * 6)[0].tolist(), 2)
    assert found == [[1.0] * 6, [2.0] * 6]


WRAPPERS = [(hooks.fp16_compress_wrapper, FP16), (hooks.bf16_compress_wrapper, BF16)]


@pytest.mark.parametrize(("wrap", "dtype"), WRAPPERS)
@pytest.mark.parametrize("inner", [hooks.allreduce_hook, hooks.noop_hook])
def test_a_wrapper_shows_the_hook_a_small_bucket_and_widens_its_result(wrap, dtype, inner):
    seen = []

    def spy(state, bucket):
        seen.append(bucket.buffer().dtype)
        return inner(state, bucket)

    for found, same, kept in run_local(lambda g: reduced(g, wrap(spy), NUMBERS), 2):
        assert found.astype(dtype).astype(np.float32).tolist() == found.tolist()
        assert same
        assert kept
    assert seen == [dtype, dtype]


def test_wrappers_of_a_hook_that_fails_fail_and_give_the_buffer_back():
    bucket = bucket_of(range(6))
    buffer, failed = bucket.buffer(), Future()
    failed.set_exception(Aborted("no more"))
    outcome = hooks.fp16_compress_wrapper(lambda _state, _bucket: failed)(None, bucket)
    with pytest.raises(Aborted, match="no more"):
        reduced_array(outcome, bucket)
    assert bucket.buffer() is buffer


def ended_with(value):
    future = Future()
    future.set_result(value)
    return future


def test_a_hook_may_end_with_an_array_a_list_of_it_or_nothing():
    bucket, other = bucket_of(range(6)), np.ones(6)
    assert reduced_array(ended_with(other), bucket) is other
    assert reduced_array(ended_with([other]), bucket) is other
    assert reduced_array(ended_with(None), bucket) is bucket.buffer()
    assert reduced_array(Work.from_future(ended_with(None)), bucket) is bucket.buffer()
    assert reduced_array(Work.from_future(ended_with([other])), bucket) is other


def test_another_result_of_a_hook_is_a_type_error():
    bucket = bucket_of(range(6))
    with pytest.raises(TypeError, match="must end with an array"):
        reduced_array(ended_with("done"), bucket)
    with pytest.raises(TypeError, match="list of one"):
        reduced_array(ended_with([np.ones(6)] * 2), bucket)
    with pytest.raises(ValueError, match=r"must keep the shape \(6,\)"):
        reduced_array(ended_with(np.ones(5)), bucket)
