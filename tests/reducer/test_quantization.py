"""Eight bits a gradient: within a step of 255 per channel of the mean, the same on all ranks."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from nc10d.reducer.hooks import GradBucket, bf16_compress_wrapper, reduced_array
from nc10d.reducer.hooks.array_math import HOST
from nc10d.reducer.hooks.quantization import (
    quantization_perchannel_hook,
    quantization_pertensor_hook,
)
from nc10d.reducer.plan import Slot
from nc10d.testing import run_local, run_ranks

FLOATS = st.floats(-1e6, 1e6, width=32)
VALUES = hnp.arrays(np.float32, st.integers(1, 40), elements=FLOATS)


def step_of(values, width):
    """The step of each element's channel: its range, which includes 0, in 255 parts."""
    steps = np.empty(values.size)
    for at in range(0, values.size, width):
        part = values[at : at + width].astype(np.float64)
        steps[at : at + width] = (max(part.max(), 0) - min(part.min(), 0)) / 255
    return steps


@given(values=VALUES, width=st.integers(1, 40))
def test_an_element_comes_back_to_within_a_step_of_its_channel(values, width):
    message = HOST.encode(values, width)
    assert message.size == values.size + 8 * -(-values.size // width)
    found = HOST.decode(message, values.size, width)
    assert (np.abs(found - values) <= step_of(values, width) * 1.01 + 1e-37).all()


@given(values=VALUES, width=st.integers(1, 40))
def test_zero_stays_zero(values, width):
    values[::2] = 0
    assert not HOST.decode(HOST.encode(values, width), values.size, width)[::2].any()


def bucket_of(values):
    return GradBucket(0, values, [Slot(0, 0, values.size, values.shape)], ["w"], True)


def averaged(group, hook, arrays):
    bucket = bucket_of(arrays[group.rank].copy())
    buffer = bucket.buffer()
    assert reduced_array(hook(group, bucket), bucket) is buffer
    return buffer


HOOKS = {
    quantization_pertensor_hook: lambda count: count,
    quantization_perchannel_hook: lambda _count: 512,
    lambda g, b: quantization_perchannel_hook(g, b, 3): lambda _count: 3,
}


@settings(deadline=None, max_examples=25)
@given(data=st.data(), size=st.integers(1, 3), hook=st.sampled_from(list(HOOKS)))
def test_a_hook_ends_near_the_mean_with_the_same_bits_on_all_ranks(data, size, hook):
    count = data.draw(st.integers(1, 1100))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    arrays = [rng.normal(size=count).astype(np.float32) for _ in range(size)]
    found = run_local(averaged, size, [hook] * size, [arrays] * size)
    width = HOOKS[hook](count)
    bound = sum(step_of(x, width) for x in arrays) / size
    mean = np.mean(arrays, axis=0, dtype=np.float64)
    assert (np.abs(found[0] - mean) <= 1.01 * bound + 1e-6).all()
    assert all(x.tobytes() == found[0].tobytes() for x in found)


@pytest.mark.parametrize("hook", [quantization_pertensor_hook, quantization_perchannel_hook])
def test_over_the_engine_in_narrow_floats_and_inside_a_wrapper(hook):
    arrays = [np.linspace(-1, k, 700).astype(ml_dtypes.bfloat16) for k in (1, 3)]
    for chosen in (hook, bf16_compress_wrapper(hook)):
        for found in run_ranks(averaged, 2, "threads", [chosen] * 2, [arrays] * 2):
            mean = np.linspace(-1, 2, 700)
            assert np.abs(found.astype(np.float64) - mean).max() < 0.03
