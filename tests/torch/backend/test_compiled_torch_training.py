"""torch's DDP and FSDP2 on nc10d and torch.compile: gradients are those of eager mode."""

import copy
import functools
import warnings

import pytest
import torch
import torch.distributed as dist
import zoo
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import nc10d.torch

STEPS = 4  # torch rebuilds its buckets before the second
RANKS = {"world_size": 2, "kind": "processes", "timeout": 120.0}


def start(group):
    warnings.simplefilter("ignore")  # the compiler's
    torch.set_num_threads(1)
    nc10d.torch.as_torch_group()


def ddp(model, name):
    searching = name in ("branches", "repeats")
    return DistributedDataParallel(model, find_unused_parameters=searching)


def fsdp(model, name):
    mesh = dist.init_device_mesh("cpu", (2,))
    for part in model.children():
        if any(True for _ in part.parameters()):
            fully_shard(part, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def gradients(model, wrapped, name, rank):
    """Return the gradients of every step, complete and dense."""
    found = []
    for step in range(STEPS):
        for x in model.parameters():
            x.grad = None
        zoo.loss(wrapped(*zoo.inputs(name, rank, step))).backward()
        for x in model.parameters():
            whole = getattr(x.grad, "full_tensor", lambda x=x: x.grad)()
            found.append(None if whole is None else whole.to_dense())
    return found


def alike(group, wrap, name, inside, backend):
    """Return which gradients are those of the uncompiled model."""
    torch._dynamo.reset()
    own, other = (model := zoo.make(name)), copy.deepcopy(model)
    expected = gradients(own, wrap(own, name), name, group.rank())
    compiled = functools.partial(torch.compile, backend=backend)
    program = wrap(compiled(other), name) if inside else compiled(wrap(other, name))
    pairs = zip(expected, gradients(other, program, name, group.rank()), strict=True)
    return [a is b is None or torch.allclose(a, b, rtol=1e-12, atol=0) for a, b in pairs]


def agree(ranks, *arguments):
    return all(map(all, ranks.run(alike, *([each] * 2 for each in arguments))))


@pytest.mark.parametrize("wrap", [ddp, fsdp])
def test_a_compiled_module_trains_as_the_uncompiled(wrap, ranks):
    assert agree(ranks, wrap, "perceptron", False, "eager")


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("wrap", [ddp, fsdp])
def test_a_module_is_compiled_outside_or_inside(wrap, inside, backend, ranks):
    assert agree(ranks, wrap, "perceptron", inside, backend)


@pytest.mark.slow
@pytest.mark.parametrize("name", zoo.ZOO)
def test_every_model_trains_as_the_uncompiled(name, ranks):
    assert agree(ranks, ddp, name, False, "eager")


@pytest.mark.long
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("name", zoo.ZOO)
def test_every_model_trains_with_inductor(name, inside, ranks):
    assert agree(ranks, ddp, name, inside, "inductor")
