"""Hooks that compute by torch on a device agree with NumPy's: here the device is the CPU."""

import numpy as np
import pytest
import torch

from nc10d.reducer.hooks import GradBucket, array_math, reduced_array
from nc10d.reducer.hooks.array_math import HOST
from nc10d.reducer.hooks.powersgd import (
    PowerSGDState,
    batched_powerSGD_hook,
    orthonormal,
    powerSGD_hook,
)
from nc10d.reducer.hooks.quantization import (
    quantization_perchannel_hook,
    quantization_pertensor_hook,
)
from nc10d.reducer.plan import Slot
from nc10d.testing import run_local
from nc10d.torch.training.tensor_math import TensorMath

SHAPES = [(20, 30), (7,), (30, 4, 5), (2, 2), ()]
COUNTS = [int(np.prod(shape)) for shape in SHAPES]
ENDS = [0, *np.cumsum(COUNTS)]


@pytest.fixture
def on_tensors(monkeypatch):
    """Let buckets of tensors on the CPU be computed as those of a device."""
    monkeypatch.setattr(array_math, "HOSTS", set())
    monkeypatch.setitem(array_math.MATHS, np.ndarray, lambda _: HOST)


def bucket_of(flat):
    rows = zip(ENDS, COUNTS, SHAPES, strict=False)
    slots = [Slot(index, int(at), n, shape) for index, (at, n, shape) in enumerate(rows)]
    return GradBucket(0, flat, slots, SHAPES, True)


def passes(group, hook, state, make):
    """Return the means of six passes, of which one has no gradient."""
    found, random = [], np.random.default_rng(group.rank)
    for number in range(6):
        values = random.normal(size=ENDS[-1]) * (number != 3)
        bucket = bucket_of(make(values.astype(np.float32)))
        found.append(reduced_array(hook(state, bucket), bucket).tolist())
    return np.array(found)


def power(group):
    return PowerSGDState(group, 2, start_powerSGD_iter=2)


def cold(group):
    return PowerSGDState(
        group, 2, start_powerSGD_iter=0, warm_start=False, use_error_feedback=False
    )


@pytest.mark.parametrize(
    ("hook", "state"),
    [
        (powerSGD_hook, power),
        (powerSGD_hook, cold),
        (batched_powerSGD_hook, power),
        (quantization_pertensor_hook, lambda group: group),
        (quantization_perchannel_hook, lambda group: group),
    ],
)
def test_means_are_those_of_numpy(on_tensors, hook, state):
    def run(group):
        kinds = np.array, torch.from_numpy
        return [passes(group, hook, state(group), make) for make in kinds]

    (by_numpy, by_torch), other = run_local(run, 2)
    assert np.allclose(by_numpy, by_torch, atol=2e-4)
    assert np.isfinite(by_torch).all()
    assert (other[1] == by_torch).all()


def test_columns_of_zeros_are_filled_and_orthonormal_columns_may_be_zero():
    math = TensorMath(torch.zeros(1))
    columns = torch.tensor([[0.0, 3.0], [0.0, 4.0]])
    assert orthonormal(columns, 0, math).flatten().tolist() == pytest.approx([0, 0.6, 0, 0.8])
    math.fill(columns, np.array([[1.0, 9.0], [2.0, 9.0]]))
    assert columns.tolist() == [[1, 3], [2, 4]]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_dtype_of_a_bucket_stays(world, on_tensors, dtype):
    state, found = power(world), []
    for _ in range(3):
        flat = torch.full((ENDS[-1],), float(world.rank), dtype=dtype)
        bucket = bucket_of(flat)
        reduced_array(powerSGD_hook(state, bucket), bucket)
        found.append((flat.dtype, flat.mean().item()))
    assert found == [(dtype, pytest.approx(0.5, rel=1e-2))] * 3
