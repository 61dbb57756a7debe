"""Mixed precision of DistributedDataParallel: the numbers of a step written by hand."""

import contextlib
import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import nc10d as dist
from nc10d.reducer import hooks
from nc10d.testing import run_local
from nc10d.torch import DistributedDataParallel, MixedPrecision

SIZE = 2
LOW = torch.bfloat16


class Perceptron(nn.Module):
    def __init__(self, again=None):
        super().__init__()
        self.first, self.last, self.again = nn.Linear(4, 8), nn.Linear(8, 4), again

    def forward(self, x):
        if self.again is None:
            return self.last(torch.tanh(self.first(x)))
        inner = checkpoint(lambda x: torch.tanh(self.first(x)), x, use_reentrant=self.again)
        return self.last(inner)


class Tied(nn.Module):
    """A module that uses a layer's weight outside of the layer."""

    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(4))

    def forward(self, x):
        early = nn.functional.linear(x, self.layer.weight)
        return nn.functional.linear(self.layer(x) + early, self.layer.weight) * self.scale


class Reused(nn.Module):
    """A module that calls a layer three times; each call can be checkpointed for itself."""

    def __init__(self, again):
        super().__init__()
        self.layer, self.last, self.again = nn.Linear(4, 4), nn.Linear(4, 4), again

    def forward(self, x):
        for _ in range(3):
            x = checkpoint(self.layer, x, use_reentrant=True) if self.again else self.layer(x)
        return self.last(torch.tanh(x))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.LSTM(4, 3)

    def forward(self, x):
        return self.layer(x)[0]


def filled(module):
    own = torch.Generator().manual_seed(0)
    for x in module.parameters():
        x.data.copy_(torch.randn(x.shape, generator=own) / 2)
    return module


def data_of(rank, step=0):
    own = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(6, 4, generator=own).requires_grad_()  # as a reentrant checkpoint needs


def by_hand(module, reduce_dtype, steps):
    """Train by bfloat16 copies of the parameters, with the mean of ranks' gradients."""
    params = dict(module.named_parameters())
    for step in range(steps):
        gradients = []
        for rank in range(SIZE):
            low = {name: x.detach().to(LOW).requires_grad_() for name, x in params.items()}
            output = torch.func.functional_call(module, low, (data_of(rank, step).to(LOW),))
            found = torch.autograd.grad(output.float().square().mean(), list(low.values()))
            gradients.append([(x.to(reduce_dtype) / SIZE).double() for x in found])
        for x, *parts in zip(params.values(), *gradients, strict=True):
            x.data.sub_(sum(parts).to(reduce_dtype).float(), alpha=0.1)
    return [x.detach() for x in params.values()]


def train(model, rank, steps, optimizer=None):
    for step in range(steps):
        output = model(data_of(rank, step))
        assert output.dtype is LOW
        output.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [x.detach().clone() for x in model.parameters()]


@pytest.mark.parametrize("reduce_dtype", [None, torch.float32], ids=["low", "whole"])
@pytest.mark.parametrize(
    "make",
    [Perceptron, Tied, Recurrent, lambda: Perceptron(False), lambda: Perceptron(True)],
    ids=["perceptron", "tied", "recurrent", "checkpoint", "reentrant"],
)
@pytest.mark.parametrize(
    "options",
    [{}, {"find_unused_parameters": True}, {"static_graph": True, "gradient_as_bucket_view": True}],
    ids=["plain", "unused", "static"],
)
def test_training_is_that_of_a_step_written_by_hand(make, reduce_dtype, options):
    def run(group):
        module = filled(make())
        mixed = MixedPrecision(LOW, reduce_dtype, cast_root_forward_inputs=True)
        model = DistributedDataParallel(module, mixed_precision=mixed, **options)
        return train(model, group.rank, 3, torch.optim.SGD(model.parameters(), 0.1))

    if getattr(make(), "again", None) and options.get("find_unused_parameters"):
        pytest.skip("a reentrant checkpoint hides its parameters from the search, as in torch")
    states = run_local(run, SIZE)
    plain = Perceptron() if isinstance(make(), Perceptron) else make()
    expected = by_hand(filled(plain), reduce_dtype or LOW, 3)
    assert all(map(torch.equal, states[0], states[1]))
    for found, x in zip(states[0], expected, strict=True):
        torch.testing.assert_close(found, x)


@pytest.mark.parametrize("reduce_dtype", [None, torch.float32], ids=["low", "whole"])
@pytest.mark.parametrize("accumulates", [False, True])
def test_a_static_graph_adds_up_a_layers_gradients(reduce_dtype, accumulates):
    """A layer under several reentrant checkpoints has a gradient from each of them."""

    def run(group):
        mixed = MixedPrecision(LOW, reduce_dtype)
        module = filled(Reused(True))
        model = DistributedDataParallel(module, mixed_precision=mixed, static_graph=True)
        optimizer = torch.optim.SGD(model.parameters(), 0.05 if accumulates else 0.1)
        for step in range(3):
            for last in (False, True) if accumulates else (True,):
                with contextlib.nullcontext() if last else model.no_sync():
                    model(data_of(group.rank, step)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [x.detach() for x in module.parameters()]

    for x, y in zip(
        run_local(run, SIZE)[0], by_hand(filled(Reused(False)), reduce_dtype or LOW, 3), strict=True
    ):
        torch.testing.assert_close(x, y, atol=1e-2, rtol=1e-2)


@pytest.mark.ranks(SIZE)
def test_parameters_outside_of_a_forward_pass_are_whole_and_in_place():
    module = filled(Perceptron())
    before = {name: id(x) for name, x in module.named_parameters()}
    model = DistributedDataParallel(module, mixed_precision=MixedPrecision(LOW))
    inside = []
    module.first.register_forward_hook(lambda m, *_: inside.append(m.weight.dtype))
    model(data_of(0)).sum().backward()
    after = {name: id(x) for name, x in module.named_parameters()}
    kinds = {
        x.dtype for x in (*module.state_dict().values(), *[p.grad for p in model.parameters()])
    }
    with pytest.raises(RuntimeError):
        model(torch.ones(2, 2))
    whole = module(data_of(0)).dtype
    assert before == after
    assert inside[0] == LOW
    assert kinds == {torch.float32}
    assert whole == torch.float32


@pytest.mark.ranks(SIZE)
def test_buffers_kept_layers_frozen_and_ignored_parameters(world):
    layers = (nn.Linear(4, 4), nn.BatchNorm1d(4), nn.LayerNorm(4), nn.Linear(4, 4))
    module = nn.Sequential(*layers)
    module.register_buffer("table", torch.ones(3))
    module.register_parameter("own", nn.Parameter(torch.ones(3)))
    module[3].weight.requires_grad_(False)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["own"])
    seen = []
    for layer in layers:
        layer.register_forward_hook(
            lambda m, args, y: seen.append((args[0].dtype, m.weight.dtype, m.bias.dtype))
        )
    module.register_forward_hook(lambda m, *_: seen.append(m.own.dtype))
    mixed = MixedPrecision(LOW, buffer_dtype=LOW)
    model = DistributedDataParallel(module, mixed_precision=mixed)
    model(data_of(world.rank)).float().sum().backward()
    low, whole = (LOW,) * 3, (torch.float32,) * 3
    expected = [low, whole, low, low, torch.float32], LOW, torch.float32
    assert (seen, module.table.dtype, module[1].running_mean.dtype) == expected


@pytest.mark.ranks(SIZE)
def test_a_recurrent_layer_may_be_kept(world):
    module = filled(Recurrent())
    mixed = MixedPrecision(LOW, modules_to_keep=(nn.LSTM,))
    model = DistributedDataParallel(module, mixed_precision=mixed)
    model._set_static_graph()
    output = model(data_of(world.rank))
    output.float().sum().backward()
    assert (output.dtype, module.layer.weight_ih_l0.grad.dtype) == (LOW, torch.float32)


def test_gradients_accumulate_in_whole_precision_and_stay_low_on_request():
    def run(group, keep):
        mixed = MixedPrecision(LOW, keep_low_precision_grads=keep)
        model = DistributedDataParallel(filled(Perceptron()), mixed_precision=mixed)
        with model.no_sync():
            model(data_of(0)).float().sum().backward()
        model(data_of(0, 1)).float().sum().backward()
        once = [x.grad.clone() for x in model.parameters()]
        model.zero_grad()
        for step in range(2):
            model(data_of(0, step)).float().sum().backward()
        return [(a, x.grad) for a, x in zip(once, model.parameters(), strict=True)]

    for keep in (False, True):
        for pairs in run_local(run, SIZE, [keep] * SIZE):
            for both, sums in pairs:
                assert both.dtype is sums.dtype is (LOW if keep else torch.float32)
                torch.testing.assert_close(both, sums, rtol=2e-2, atol=2e-2)


def test_hooks_joins_and_copies_go_with_mixed_precision():
    def run(group):
        model = DistributedDataParallel(filled(Perceptron()), mixed_precision=MixedPrecision(LOW))
        model = pickle.loads(pickle.dumps(copy.deepcopy(model)))
        model.register_comm_hook(dist.get_default_group(), hooks.fp16_compress_hook)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with model.join():
            train(model, group.rank, 2 + group.rank, optimizer)
        return [x.detach() for x in model.parameters()]

    first, second = run_local(run, SIZE)
    assert all(map(torch.equal, first, second))


@pytest.mark.ranks(SIZE)
def test_large_gradients_are_divided_by_their_copy_unless_they_accumulate(world):
    layer = nn.Linear(512, 512, bias=False)
    model = DistributedDataParallel(layer, mixed_precision=MixedPrecision(LOW))
    seen = []
    for _ in range(3):
        model(torch.full((1, 512), float(world.rank + 1))).sum().backward()
        seen.append(layer.weight.grad.unique().tolist())
    layer.weight.grad = None
    model(torch.full((1, 512), float(world.rank + 1))).sum().backward()
    assert [*seen, layer.weight.grad.unique().tolist()] == [[1.5], [3.0], [4.5], [1.5]]


def copies_of(model):
    return [copy for _, copy in model._precision._copies.values()]


def held(model):
    return [x.untyped_storage().nbytes() > 0 for x in copies_of(model)]


@pytest.mark.ranks(SIZE)
@pytest.mark.parametrize("again", [None, False, True])
def test_copies_have_memory_while_a_graph_may_read_them(world, again):
    model = DistributedDataParallel(
        filled(Perceptron(again)), process_group=world, mixed_precision=MixedPrecision(LOW)
    )
    weight, seen = model.module.first.weight, []

    def passed(*losses, retain=False):
        for loss in losses:
            loss.backward(retain_graph=retain)
        gradient, weight.grad = weight.grad, None
        seen.append((any(held(model)), gradient))

    first, second, third = (model(data_of(world.rank)).float().sum() for _ in range(3))
    passed(first)
    passed(second, retain=True)
    passed(second, third)
    del second
    name = copies_of(model)[0]
    passed(model(data_of(world.rank)).float().sum())
    del name
    passed(model(data_of(world.rank)).float().sum())
    kept, gradients = zip(*seen, strict=True)
    # A checkpoint holds no copies: it calls the layer again. The last layer is outside of it.
    assert kept == (True, True, False, True, False)
    once = gradients[0]
    for times, gradient in zip((1, 1, 2, 1, 1), gradients, strict=True):
        assert torch.allclose(gradient, times * once, rtol=0.01)


def test_settings_are_checked_and_torchs_are_taken():
    class Torchs:
        param_dtype, reduce_dtype, buffer_dtype = LOW, None, None
        cast_forward_inputs = True

    taken = MixedPrecision.of(Torchs())
    assert (taken.param_dtype, taken.cast_forward_inputs) == (LOW, True)
    with pytest.raises(TypeError, match="param_dtype must be a floating-point dtype"):
        MixedPrecision(torch.int32)
    with pytest.raises(TypeError, match="must be a MixedPrecision"):
        MixedPrecision.of(LOW)

    def run(group):
        module = nn.Embedding(3, 2, sparse=True)
        with pytest.raises(ValueError, match="no sparse gradients, as weight has"):
            DistributedDataParallel(module, mixed_precision=MixedPrecision(LOW))

    run_local(run, SIZE)
