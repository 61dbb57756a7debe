"""torch.distributed.nn.functional on nc10d: values and gradients of a model in one process."""

import inspect

import pytest
import torch
from torch import distributed as torch_dist

import nc10d as dist
import nc10d.torch
from nc10d.torch.nn import functional as NN

MEMBERS = [1, 2]
"""A group whose numbers are not the global ranks."""


def each(function):
    """Give every rank its part of the results of all lists of tensors."""
    return lambda rows: [function(rows, r) for r in range(len(rows))]


def only(dst, function):
    """Give rank `dst` the result, and the others zeros."""
    return each(lambda rows, r: function(rows) * (r == dst))


def total(rows, i=0):
    return sum(row[i] for row in rows)


def empty(xs):
    return [torch.empty_like(x) for x in xs]


# A call gets a list of two tensors of (4, 3), my group, and its first and last global rank. A model
# gets the lists of all ranks of the group and returns a tensor for each.
CALLS = {
    "all_reduce": (lambda xs, g, *_: NN.all_reduce(xs[0], group=g), each(lambda a, r: total(a))),
    "mean": (
        lambda xs, g, *_: NN.all_reduce(xs[0], dist.AVG, g),
        each(lambda a, r: total(a) / len(a)),
    ),
    "broadcast": (lambda xs, g, _, last: NN.broadcast(xs[0], last, g), each(lambda a, r: a[-1][0])),
    "reduce": (lambda xs, g, _, last: NN.reduce(xs[0], last, group=g), only(1, total)),
    "gather": (
        lambda xs, g, _, last: torch.stack(NN.gather(xs[0], last, g)),
        only(1, lambda a: torch.stack([row[0] for row in a])),
    ),
    "scatter": (lambda xs, g, first, _: NN.scatter(xs, first, g), each(lambda a, r: a[0][r])),
    "all_gather": (
        lambda xs, g, *_: torch.stack(NN.all_gather(xs[1], g)),
        each(lambda a, r: torch.stack([row[1] for row in a])),
    ),
    "all_gather_base": (
        lambda xs, g, *_: written(NN._all_gather_base, torch.empty(8, 3), xs[0], g),
        each(lambda a, r: torch.cat([row[0] for row in a])),
    ),
    "reduce_scatter": (
        lambda xs, g, *_: written(NN.reduce_scatter, torch.empty(4, 3), xs, dist.SUM, g),
        each(lambda a, r: total(a, r)),
    ),
    "all_to_all": (
        lambda xs, g, *_: torch.stack(NN.all_to_all(empty(xs), xs, g)),
        each(lambda a, r: torch.stack([row[r] for row in a])),
    ),
    "all_to_all_single": (
        lambda xs, g, *_: written(NN.all_to_all_single, torch.empty(4, 3), xs[0], group=g),
        each(lambda a, r: torch.cat([row[0].chunk(2)[r] for row in a])),
    ),
    "rows": (
        lambda xs, g, *_: rows(xs[0], g),
        lambda a: [torch.cat([a[0][0][:3], a[1][0][:1]]), torch.cat([a[0][0][3:], a[1][0][1:]])],
    ),
}


def rows(x, group):
    """Exchange 3 rows with oneself and 1 with the other."""
    sizes = [3, 1] if group.rank == 0 else [1, 3]
    return NN.all_to_all_single(torch.empty(4, 3), x, sizes, sizes, group)


def written(call, out, *args, **kwargs):
    """Return the result, wrong where `out` is not the same."""
    found = call(out, *args, **kwargs)
    return found + 100 * (found.detach() - out)


RANKS = {"world_size": 3, "timeout": 120.0}


def values(rank):
    generator = torch.Generator().manual_seed(rank)
    return [torch.randint(-8, 8, (4, 3), generator=generator).float() for _ in range(2)]


def weights(out):
    return torch.arange(1.0, 1 + out.numel()).reshape(out.shape)


def gradient(x):
    return torch.zeros_like(x) if x.grad is None else x.grad


def modelled(model):
    """Return each member's result and gradients."""
    inputs = [[x.requires_grad_() for x in values(rank)] for rank in MEMBERS]
    outs = model(inputs)
    sum((out * weights(out)).sum() for out in outs).backward()
    pairs = zip(outs, inputs, strict=True)
    return [(out.detach(), *map(gradient, xs)) for out, xs in pairs]


def outcome(function, group, rank):
    xs = [x.requires_grad_() for x in values(rank)]
    out = function(xs, group, *MEMBERS)
    (out * weights(out)).sum().backward()
    return out.detach(), *map(gradient, xs)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CALLS)
def test_a_call_and_its_gradient_are_those_of_the_model_also_in_a_graph(name, ranks):
    torch._dynamo.reset()
    call, model = CALLS[name]

    def run(world):
        group, rank = dist.new_group(MEMBERS), int(world.rank)
        if rank not in MEMBERS:
            return None
        compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
        return [outcome(function, group, rank) for function in (call, compiled)]

    _, *found = ranks.run(run)
    for ways, expected in zip(found, modelled(model), strict=True):
        for way in ways:
            assert all(map(torch.equal, way, expected))


def test_there_is_each_name_of_torchs_with_its_arguments():
    theirs = torch_dist.nn.functional
    for name in [*NN.__all__, "_all_gather_base"]:
        ours = inspect.signature(getattr(NN, name)).parameters
        assert list(ours) == list(inspect.signature(getattr(theirs, name)).parameters)
    functions = inspect.getmembers(theirs, inspect.isfunction)
    public = {name for name, f in functions if f.__module__ == theirs.__name__ and name[0] != "_"}
    assert public == set(NN.__all__)
    assert nc10d.torch.nn.functional is NN


def test_the_package_has_each_name_too():
    for name in NN.__all__:
        assert hasattr(torch_dist.nn, name)
        assert getattr(nc10d.torch.nn, name) is getattr(NN, name)
    assert {*nc10d.torch.nn.__all__} == {"functional", *NN.__all__}


def test_mistakes_raise_before_anything_is_sent(ranks):
    x = torch.ones(2)

    def run(group):
        if group.rank == 0:
            for error, call in (
                ("not in group", lambda: NN.broadcast(x, 3)),
                ("not in my group", lambda: NN.reduce(x, 1, group=[[0], [1], [2]])),
                ("a list of 3 tensors of the same shape", lambda: NN.scatter([x, x])),
                ("can't hold a result", lambda: NN._all_gather_base(x[:1], x, [0])),
                ("no 3 equal parts", lambda: NN.all_to_all_single(x, x)),
                ("lists of 3 tensors", lambda: NN.all_to_all([x], [x])),
            ):
                with pytest.raises(ValueError, match=error):
                    call()
        group.barrier()

    ranks.run(run)
