"""DistributedDataParallel and torch.compile, either outside: gradients are those of eager mode."""

import copy

import pytest
import torch
import zoo

from nc10d.testing import Ranks
from nc10d.torch import DistributedDataParallel

pytestmark = pytest.mark.filterwarnings("ignore")  # the compiler's


@pytest.fixture(scope="module")
def two():
    with Ranks(2, timeout=120.0) as threads:
        yield threads


CASES = [(name, "DDP compiled") for name in zoo.ZOO] + [("perceptron", "DDP of a compiled module")]


def wrapped_in(way, model, options):
    if way == "DDP compiled":
        return torch.compile(model_of(model, options), backend="eager")
    return model_of(torch.compile(model, backend="eager"), options)


def model_of(model, options):
    return DistributedDataParallel(model, **options)


def gradients(model, wrapped, name, rank):
    for step in range(2):  # buckets are rebuilt before the second pass
        for x in model.parameters():
            x.grad = None
        zoo.loss(wrapped(*zoo.inputs(name, rank, step))).backward()
    return [None if x.grad is None else x.grad.to_dense() for x in model.parameters()]


@pytest.mark.parametrize(("name", "way"), CASES)
def test_gradients_are_those_of_the_uncompiled_model(name, way, two):
    torch._dynamo.reset()
    options = {"find_unused_parameters": name in ("branches", "repeats")}
    model = zoo.make(name)

    def run(group):
        outs, rank = [], int(group.rank)
        for wrap in (model_of, lambda x, options: wrapped_in(way, x, options)):
            own = copy.deepcopy(model)
            outs.append(gradients(own, wrap(own, options), name, rank))
        pairs = zip(*outs, strict=True)
        return [a is b is None or torch.allclose(a, b, rtol=1e-12, atol=0) for a, b in pairs]

    for same in two.run(run):
        assert all(same)
