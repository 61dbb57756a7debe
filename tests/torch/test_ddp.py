"""All models train as by torch's DistributedDataParallel, in each mode; 200 steps keep ranks alike.

Dense gradients are equal to the bit; for sparse gradients the order of additions differs. torch has
no mixed precision and no optimizer in the backward pass on the CPU. There the reference is a mean
of gradients by hand, and torch's DDP with an optimizer after the backward pass.
"""

import contextlib
import copy
import hashlib
from itertools import product

import pytest
import torch
import torch.distributed
import zoo
from beside_torch import VARYING, both, join_gloo, same

from nc10d.testing import Ranks
from nc10d.torch import DistributedDataParallel, MixedPrecision, apply_optimizer_in_backward, slots

LOW = {"mixed_precision": MixedPrecision(torch.bfloat16)}
STEPS, LONG = 4, 200
RATE = 0.1
# Names of modes, with the options of DDP.
OPTIONS = {
    "plain": {},
    "mixed": LOW,
    "in backward": {},
    "mixed in backward": LOW,
    "static": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
    "join": {},
}


KINDS = {"plain": {}, "find": {"find_unused_parameters": True}, "static": {"static_graph": True}}
CASES = [
    (name, views, kind)
    for name, views in product(zoo.ZOO, [False, True])
    for kind in (["find"] if name in VARYING else ["plain", "static"])
]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    with Ranks(2, "processes", timeout=60) as two:
        two.run(join_gloo, [str(tmp_path_factory.mktemp("gloo") / "meet")] * 2)
        yield two


@pytest.mark.parametrize(("name", "views", "kind"), CASES)
def test_gradients_and_buffers_are_torchs(ranks, name, views, kind):
    options = {"gradient_as_bucket_view": views, "bucket_cap_mb": 0.001, **KINDS[kind]}
    answers = ranks.run(both, [name] * 2, [[True] * STEPS] * 2, [options] * 2)
    assert answers == [None, None]


def both_as_on_a_device(*arguments):
    """As `both`, with buckets that are tensors, into which the Reducer copies, as on GPUs."""
    before, slots.MOVED = slots.MOVED, {"cpu"}
    try:
        return both(*arguments)
    finally:
        slots.MOVED = before


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("name", ["perceptron", "convolution", "branches", "repeats"])
def test_gradients_are_torchs_where_the_reducer_moves_them(ranks, name, views):
    options = {"gradient_as_bucket_view": views, "find_unused_parameters": name in VARYING}
    passes = [[True, False, True, True]] * 2
    assert ranks.run(both_as_on_a_device, [name] * 2, passes, [options] * 2) == [None, None]


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("name", ["perceptron", "convolution", "rows", "branches"])
def test_sums_of_passes_without_reduction_are_torchs(ranks, name, views):
    options = {"gradient_as_bucket_view": views, "find_unused_parameters": name in VARYING}
    passes = [[False, True, False, False, True, True]] * 2
    assert ranks.run(both, [name] * 2, passes, [options] * 2) == [None, None]


def wrapped(kind, module, mode, options):
    """Return the module in a class of DDP, and the optimizers that step after a pass."""
    params = list(module.parameters())
    if "in backward" in mode and kind is DistributedDataParallel:
        apply_optimizer_in_backward(torch.optim.SGD, params, {"lr": RATE})
        return kind(module, **options), []
    return kind(module, **options), [torch.optim.SGD(params, RATE)]


def steps(model, optimizers, name, rank, numbers):
    for step in numbers:
        zoo.loss(model(*zoo.inputs(name, rank, step))).backward()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()


def states(module):
    return [x.detach().clone() for x in (*module.parameters(), *module.buffers())]


def beside_torch(group, name, mode):
    """Train by torch's DDP and by nc10d's; return whether parameters and buffers are the same."""
    torch.manual_seed(group.rank)
    module = zoo.make(name)
    options = {"find_unused_parameters": name in VARYING, "bucket_cap_mb": 0.001}
    found = []
    for kind in (torch.nn.parallel.DistributedDataParallel, DistributedDataParallel):
        model, optimizers = wrapped(kind, copy.deepcopy(module), mode, options)
        uneven = model.join() if mode == "join" else contextlib.nullcontext()
        with uneven:
            count = STEPS + (2 * group.rank if mode == "join" else 0)
            steps(model, optimizers, name, group.rank, range(count))
        found.append(states(model.module))
    return all(map(same, *found))


@pytest.mark.parametrize("mode", ["in backward", "join"])
@pytest.mark.parametrize("name", zoo.ZOO)
def test_a_trained_model_is_torchs(ranks, name, mode):
    assert ranks.run(beside_torch, [name] * 2, [mode] * 2) == [True, True]


def low_by_hand(module, name, rank, group):
    """Train in bfloat16 with means of gradients by hand."""
    for step in range(STEPS):
        low = copy.deepcopy(module).to(torch.bfloat16)
        arguments = [
            x.bfloat16() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
            for x in zoo.inputs(name, rank, step)
        ]
        zoo.loss(low(*arguments)).backward()
        with torch.no_grad():
            for x, own in zip(module.parameters(), low.parameters(), strict=True):
                mean = torch.zeros_like(own) if own.grad is None else own.grad / 2
                group.all_reduce(mean)
                x.sub_(mean.to(x.dtype), alpha=RATE)
    return states(module)


def mixed(group, name, mode):
    torch.manual_seed(0)
    module = zoo.make(name)
    found = DistributedDataParallel, copy.deepcopy(module), mode
    options = {"find_unused_parameters": name in VARYING, **LOW}
    model, optimizers = wrapped(*found, options)
    steps(model, optimizers, name, group.rank, range(STEPS))
    by_hand = low_by_hand(module, name, group.rank, group)
    return all(map(torch.equal, states(model.module), by_hand))


@pytest.mark.parametrize("mode", ["mixed", "mixed in backward"])
@pytest.mark.parametrize("name", sorted(zoo.ZOO.keys() - {"rows", "convolution"}))
def test_low_precision_is_that_of_means_by_hand(ranks, name, mode):
    # `rows` has sparse gradients, which mixed precision refuses; BatchNorm stays whole.
    assert ranks.run(mixed, [name] * 2, [mode] * 2) == [True, True]


def digest_of_many_steps(group, mode):
    torch.manual_seed(group.rank)
    made = DistributedDataParallel, zoo.make("transformer"), mode, OPTIONS[mode]
    model, optimizers = wrapped(*made)
    uneven = model.join() if mode == "join" else contextlib.nullcontext()
    count = LONG - (50 * group.rank if mode == "join" else 0)
    with uneven:
        steps(model, optimizers, "transformer", group.rank, range(count))
    data = b"".join(x.numpy().tobytes() for x in states(model.module))
    return hashlib.sha256(data).hexdigest(), all(map(torch.isfinite, map(torch.sum, states(model))))


@pytest.mark.parametrize("mode", OPTIONS)
def test_ranks_are_alike_to_the_bit_after_200_steps(ranks, mode):
    (first, finite), (second, _) = ranks.run(digest_of_many_steps, [mode] * 2)
    assert first == second
    assert finite
