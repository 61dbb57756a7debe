"""Programs of tensors and calls that torch.compile takes as one graph."""

import torch

from nc10d.torch import functional as F


def weights(rank, *shapes):
    generator = torch.Generator().manual_seed(rank)
    # Small integers have exact sums: inductor adds in another order than eager mode.
    values = [torch.randint(-4, 5, shape, generator=generator).float() for shape in shapes]
    return [x.requires_grad_() for x in values]


def tensor_parallel(group, params, x):
    """An MLP whose layers are split by columns and by rows."""
    first, second = params
    return F.all_reduce(torch.relu(x @ first) @ second, "sum", group).square().mean()


def data_parallel(group, params, x):
    """A step whose gradients are reduced in the graph, as one bucket."""
    (weight, bias) = params
    loss = (x @ weight + bias).square().mean()
    error = 2 * (x @ weight + bias) / (x.shape[0] * bias.shape[0])
    gradients = F.all_reduce_coalesced([x.mT @ error, error.sum(0)], "avg", group)
    return loss, *(p - 0.1 * g for p, g in zip(params, gradients, strict=True))


def pipeline(group, params, x):
    """Two stages: rank 0's activations go to rank 1."""
    if group.rank == 0:
        F.send(torch.relu(x @ params[0]), 1, group)
        return x.sum()
    return (F.recv(x, 0, group) @ params[0]).sum()


PROGRAMS = {
    "tensor parallel": (tensor_parallel, [(4, 6), (6, 4)]),
    "data parallel": (data_parallel, [(4, 3), (3,)]),
    "pipeline": (pipeline, [(4, 4)]),
}


def outcome(program, group, shapes):
    params = weights(int(group.rank), *shapes)
    x = torch.arange(8.0).view(2, 4) / 8 + group.rank
    out = program(group, params, x)
    outs = out if isinstance(out, tuple) else (out,)
    if outs[0].requires_grad:
        outs[0].backward()
    return [t.detach().clone() for t in outs], [p.grad for p in params]


def same(a, b):
    return all(
        x is y is None or torch.equal(x, y)
        for xs, ys in zip(a, b, strict=True)
        for x, y in zip(xs, ys, strict=True)
    )
