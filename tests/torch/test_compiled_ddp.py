"""DistributedDataParallel and torch.compile, either outside: gradients are those of eager mode."""

import copy
import functools

import pytest
import torch
import zoo

from nc10d.torch import DistributedDataParallel

pytestmark = pytest.mark.filterwarnings("ignore")  # the compiler's


# Processes: torch's compiler keeps the state of a trace in global variables.
RANKS = {"world_size": 2, "kind": "processes", "timeout": 120.0}


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


def alike(group, name, way):
    """Return which gradients are those of the uncompiled model."""
    torch._dynamo.reset()
    options = {"find_unused_parameters": name in ("branches", "repeats")}
    model, outs = zoo.make(name), []
    for wrap in (model_of, functools.partial(wrapped_in, way)):
        own = copy.deepcopy(model)
        outs.append(gradients(own, wrap(own, options), name, int(group.rank)))
    pairs = zip(*outs, strict=True)
    return [a is b is None or torch.allclose(a, b, rtol=1e-12, atol=0) for a, b in pairs]


@pytest.mark.parametrize(("name", "way"), CASES)
def test_gradients_are_those_of_the_uncompiled_model(name, way, ranks):
    for same in ranks.run(alike, [name] * 2, [way] * 2):
        assert all(same)
