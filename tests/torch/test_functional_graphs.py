"""Tracers, transforms and torch.compile record functional collectives, and lose none."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import nc10d as dist
from nc10d.testing import Ranks
from nc10d.torch import functional as F

TWICE = dist.premul_sum(2.0)
"""A reduction that changes its input in a world of one rank, too."""


@pytest.fixture
def alone():
    """A world of one rank, and no compiled code of other tests."""
    dist.init_process_group(rank=0, world_size=1, store=dist.HashStore())
    torch._dynamo.reset()
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def two():
    with Ranks(2) as threads:
        yield threads


def step(x):
    return F.all_reduce(x * 2, TWICE) + 1


class Step(torch.nn.Module):
    def forward(self, x):
        return step(x)


def exported(strict):
    def trace(x):
        return torch.export.export(Step(), (x,), strict=strict).module()

    return trace


TRACERS = {
    "make_fx real": make_fx(step),
    "make_fx fake": make_fx(step, tracing_mode="fake"),
    "make_fx symbolic": make_fx(step, tracing_mode="symbolic"),
    "functionalize": make_fx(torch.func.functionalize(step)),
    "export": exported(False),
    "strict export": exported(True),
    "jit.trace": lambda x: torch.jit.trace(step, x),
    "vmap": lambda x: torch.vmap(step),
    "linearize": lambda x: lambda y: torch.func.linearize(step, y)[0],
    "grad": lambda x: lambda y: torch.func.vjp(step, y)[0],
    "gradient in vmap": lambda x: torch.vmap(lambda y: torch.func.vjp(step, y)[0]),
    "jvp": lambda x: lambda y: torch.func.jvp(step, (y,), (x,))[0],
    "eager": lambda x: step,
    "compiled": lambda x: torch.compile(step, backend="eager", fullgraph=True),
    "compiled by AOT": lambda x: torch.compile(step, backend="aot_eager", fullgraph=True),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tracer", TRACERS)
def test_no_tracer_loses_a_collective(tracer, alone):
    traced = TRACERS[tracer](torch.ones(2, 3))
    assert torch.equal(traced(torch.full((2, 3), 3.0)), torch.full((2, 3), 13.0))
    if isinstance(traced, torch.fx.GraphModule):
        assert "nc10d.all_reduce" in traced.code


DERIVATIVES = {
    "backward": lambda x: torch.autograd.grad(step(x.requires_grad_()).sum(), x)[0],
    "grad": lambda x: torch.func.grad(lambda y: step(y).sum())(x),
    "jvp": lambda x: torch.func.jvp(step, (x,), (torch.ones(2, 3),))[1],
    "linearize": lambda x: torch.func.linearize(step, x)[1](torch.ones(2, 3)),
    "per sample": torch.vmap(torch.func.grad(lambda y: step(y).sum())),
    "forward mode": lambda x: forward(x),
    "of several": lambda x: torch.func.grad(
        lambda y: F.all_reduce_coalesced([y * 2], TWICE)[0].sum()
    )(x),
    "of several, forward": lambda x: torch.func.jvp(
        lambda y: F.all_reduce_coalesced([y * 2], TWICE)[0], (x,), (torch.ones(2, 3),)
    )[1],
    "second": lambda x: torch.func.grad(
        lambda y: torch.func.grad(lambda z: (step(z) ** 2).sum() / 8)(y).sum()
    )(x),
}


def forward(x):
    with forward_ad.dual_level():
        out = step(forward_ad.make_dual(x, torch.ones(2, 3)))
        return forward_ad.unpack_dual(out).tangent


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", DERIVATIVES)
def test_no_way_of_differentiation_loses_a_gradient(way, alone):
    assert torch.equal(DERIVATIVES[way](torch.ones(2, 3)), torch.full((2, 3), 4.0))


def test_a_reduction_without_a_gradient_says_so(alone):
    for way in (torch.func.grad(lambda x: F.all_reduce(x, "max").sum()), backward_of_max):
        with pytest.raises(NotImplementedError, match="'max' has no gradient"):
            way(torch.ones(2))


def backward_of_max(x):
    F.all_reduce(x.requires_grad_(), "max").sum().backward()
