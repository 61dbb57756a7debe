"""Functional collectives of tensors: values, gradients and vmap against a model in one process."""

import pytest
import torch

import nc10d as dist
from nc10d.torch import functional as F

SIZE = 4
GROUPS = {"world": [[0, 1, 2, 3]], "halves": [[0, 2], [1, 3]]}


def cut(x, n, rank, dim=0):
    return x.chunk(n, dim)[rank]


def same(function):
    """Give every rank the result of all tensors."""
    return lambda xs: [function(xs) for _ in xs]


def flat(xs):
    return torch.cat([x.flatten() for x in xs])


def mean(xs):
    return sum(xs) / len(xs)


CALLS = {
    "all_reduce": (lambda x, g: F.all_reduce(x, "sum", g), same(sum)),
    "mean": (lambda x, g: F.all_reduce(x, dist.AVG, g), same(mean)),
    "scaled": (lambda x, g: F.all_reduce(x, dist.premul_sum(0.5), g), same(lambda xs: sum(xs) / 2)),
    "broadcast": (lambda x, g: F.broadcast(x, 1, g), same(lambda xs: xs[1])),
    "all_gather": (lambda x, g: F.all_gather_tensor(x, 0, g), same(torch.cat)),
    "all_gather along 1": (
        lambda x, g: F.all_gather_tensor(x, -1, g),
        same(lambda xs: torch.cat(xs, -1)),
    ),
    "reduce_scatter": (
        lambda x, g: F.reduce_scatter_tensor(x, "sum", 0, g),
        lambda xs: [cut(sum(xs), len(xs), r) for r in range(len(xs))],
    ),
    "mean along 1": (
        lambda x, g: F.reduce_scatter_tensor(x, "avg", 1, g),
        lambda xs: [cut(mean(xs), len(xs), r, 1) for r in range(len(xs))],
    ),
    "all_to_all": (
        lambda x, g: F.all_to_all_single(x, None, None, g),
        lambda xs: [torch.cat([cut(x, len(xs), r) for x in xs]) for r in range(len(xs))],
    ),
    "permute": (
        lambda x, g: F.permute_tensor(x, [*range(1, len(g[0])), 0], g),
        lambda xs: [xs[r - 1] for r in range(len(xs))],
    ),
    "several": (
        lambda x, g: torch.cat(F.all_reduce_coalesced([x, x * 2], "sum", g)),
        same(lambda xs: torch.cat([sum(xs), 2 * sum(xs)])),
    ),
    "several gathered": (
        lambda x, g: torch.cat(F.all_gather_into_tensor_coalesced([x, -x], g)),
        same(lambda xs: torch.cat([*xs, *(-x for x in xs)])),
    ),
    "several scattered": (
        lambda x, g: flat(F.reduce_scatter_tensor_coalesced([x, x.mT], "avg", [0, 1], g)),
        lambda xs: [
            flat([cut(mean(xs), len(xs), r), cut(mean(xs).mT, len(xs), r, 1)])
            for r in range(len(xs))
        ],
    ),
}
LAYOUTS = {
    "contiguous": lambda x: x.clone(),
    "transposed": lambda x: x.mT.contiguous().mT,
    "strided": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "expanded": lambda x: x[:1].clone().expand(4, 4),
}


def inputs(layout):
    generator = torch.Generator().manual_seed(5)
    return [
        LAYOUTS[layout](torch.randint(-8, 8, (4, 4), generator=generator).double())
        for _ in range(SIZE)
    ]


def modelled(model, xs, groups):
    outs = [None] * len(xs)
    for members in groups:
        for rank, out in zip(members, model([xs[r] for r in members]), strict=True):
            outs[rank] = out
    return outs


def weights(out):
    return torch.arange(out.numel(), dtype=out.dtype).reshape(out.shape)


RANKS = {"world_size": SIZE}


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CALLS)
def test_a_call_and_its_gradient_are_those_of_the_model(name, layout, groups, ranks):
    call, model = CALLS[name]
    xs = [x.detach().requires_grad_() for x in inputs(layout)]
    outs = modelled(model, xs, groups)
    sum((out * weights(out)).sum() for out in outs).backward()

    def run(group, x):
        eager = call(x, groups)
        assert isinstance(eager, torch.Tensor)
        x = x.detach().requires_grad_()
        out = call(x, groups)
        (out * weights(out)).sum().backward()
        return eager, out.detach(), x.grad

    for (eager, out, grad), x, expected in zip(
        ranks.run(run, inputs(layout)), xs, outs, strict=True
    ):
        assert torch.equal(eager, expected)
        assert torch.equal(out, expected)
        unread = x.grad is None  # as by a broadcast from another rank
        assert torch.equal(grad, torch.zeros_like(x) if unread else x.grad)
