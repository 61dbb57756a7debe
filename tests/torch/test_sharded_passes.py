"""The passes of a fully sharded module find its weights on every path, and leave nothing behind.

The reference is the plain module on all ranks' inputs, or a formula.
"""

import contextlib
import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from nc10d.testing import run_local
from nc10d.torch import fully_shard


class Block(nn.Module):
    """A unit whose parameters are read by elements, under a checkpoint, and behind a kept loss."""

    def __init__(self, inner: bool | None) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
        self.first, self.last, self.inner = nn.Linear(4, 6), nn.Linear(6, 4), inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        self.loss = (x * self.shift).square().sum()

        def body(x: torch.Tensor) -> torch.Tensor:
            return self.last(torch.tanh(self.first(x)))

        return x + (
            body(x) if self.inner is None else checkpoint(body, x, use_reentrant=self.inner)
        )


class Blocks(nn.Module):
    """Three blocks, the first two under one checkpoint.

    `deep` selects whether the third gets the second's output or the first's.
    """

    def __init__(self, inner: bool | None, outer: bool | None, deep: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(inner) for _ in range(3))
        self.outer, self.deep = outer, deep
        for x in self.parameters():
            x.data.copy_(torch.linspace(-1, 1, x.numel()).view(x.shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def both(x: torch.Tensor) -> Any:
            x = self.blocks[0](x)
            return x, self.blocks[1](x)

        pair = both(x) if self.outer is None else checkpoint(both, x, use_reentrant=self.outer)
        return self.blocks[2](pair[self.deep])


def losses(module: nn.Module, output: torch.Tensor, x: torch.Tensor, kind: str) -> torch.Tensor:
    loss = output.square().sum()
    if kind == "kept":
        return loss + module.blocks[2].loss + module.blocks[0].loss
    if kind == "penalty":
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + slope.square().sum()
    return loss


def input_of(rank: int) -> torch.Tensor:
    return (torch.linspace(-1, 1, 12).view(3, 4) + rank).requires_grad_()


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("units", [None, Block])
@pytest.mark.parametrize(
    ("inner", "outer", "kind"),
    [(inner, outer, "") for inner in (None, False, True) for outer in (None, False, True)]
    + [(inner, outer, "penalty") for inner in (None, False) for outer in (None, False)]
    + [(None, None, "kept"), (False, None, "kept"), (True, None, "kept")],
)
def test_memory_is_there_on_every_path_of_a_backward_pass(units, inner, outer, kind):
    """Freed weights are gathered for whatever reads them; gradients are a plain module's."""

    def run(group: Any, deep: bool, early_stop: bool) -> Any:
        model = fully_shard(Blocks(inner, outer, deep), units)
        for _ in range(2):
            for x in model.parameters():
                x.grad = None
            x = input_of(group.rank)
            with set_checkpoint_early_stop(early_stop):
                losses(model.module, model(x), x, kind).backward()
        held = sum(flat.full.untyped_storage().nbytes() for flat in model.flats())
        found = {}
        for flat in model.flats():
            own = flat.shard.grad
            found.update(flat.layout.split(flat.whole(flat.shard if own is None else own)))
        return found, held

    for deep in (False, True):
        module = Blocks(None, None, deep)
        for rank in range(2):
            x = input_of(rank)
            (losses(module, module(x), x, kind) / 2).backward()
        for early_stop in (False, True):
            found, held = run_local(run, 2, [deep] * 2, [early_stop] * 2)[0]
            assert held == 0
            for name, x in module.named_parameters():
                if x.grad is not None:
                    torch.testing.assert_close(found[name], x.grad, msg=name)


class Called(nn.Module):
    """Calls a block twice, its output being its next input, also under a checkpoint."""

    def __init__(self, inner: bool | None, outer: bool | None) -> None:
        super().__init__()
        self.block, self.outer = Block(inner), outer
        for x in self.parameters():
            x.data.copy_(torch.linspace(-1, 1, x.numel()).view(x.shape))

    def forward(self, x: torch.Tensor) -> Any:
        def both(x: torch.Tensor) -> Any:
            return self.block(self.block(x))

        return both(x) if self.outer is None else checkpoint(both, x, use_reentrant=self.outer)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("inner", [None, False, True])
@pytest.mark.parametrize("outer", [None, False, True])
def test_a_unit_may_take_its_own_output(inner, outer):
    def run(group: Any) -> Any:
        model = fully_shard(Called(inner, outer), Block)
        model(input_of(group.rank)).square().sum().backward()
        found = {}
        for flat in model.flats():
            found.update(flat.layout.split(flat.whole(flat.shard.grad)))
        return found

    module = Called(None, None)
    for rank in range(2):
        (module(input_of(rank)).square().sum() / 2).backward()
    found = run_local(run, 2)[0]
    for name, x in module.named_parameters():
        if x.grad is not None:  # a loss that is not used has no gradient
            torch.testing.assert_close(found[name], x.grad, msg=name)


class Prompt(nn.Module):
    """A unit whose output is its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(1.0, 4.0))

    def forward(self, x: torch.Tensor) -> Any:
        return [self.weight, x]


@pytest.mark.parametrize("units", [None, Prompt])
@pytest.mark.parametrize("grows", [False, True])
def test_a_unit_may_return_a_parameter(units, grows):
    def run(group: Any) -> Any:
        model = fully_shard(nn.Sequential(Prompt()), units)
        with torch.set_grad_enabled(grows):
            weight, x = model(torch.full((3,), 2.0))
        if grows:
            (weight * x).sum().backward()
            return weight.tolist(), [flat.whole(flat.shard.grad)[:3] for flat in model.flats()]
        return weight.tolist(), [torch.full((3,), 2.0)]

    for weight, (gradient,) in run_local(run, 2):
        assert weight == [1.0, 2.0, 3.0]
        assert gradient.tolist() == [2.0] * 3


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_hooks_that_compute_with_a_units_parameters_see_them():
    def made() -> nn.Module:
        layer = nn.utils.weight_norm(nn.Linear(4, 3))
        for x in layer.parameters():
            x.data.copy_(torch.linspace(-1, 1, x.numel()).view(x.shape))
        return nn.Sequential(layer)

    x = torch.ones(1, 4)
    assert torch.equal(fully_shard(made(), nn.Linear)(x), made()(x))


@pytest.mark.ranks(2)
def test_a_graph_that_is_dropped_is_freed():
    """An output that its own node saves does not keep itself alive."""
    model = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear)
    output = model(torch.ones(1, 4))
    alive = weakref.ref(output)
    del output
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("again", [None, False, True])
def test_few_units_have_memory_at_a_time(again):
    """Also in the backward pass, and under a checkpoint around each unit or inside of it."""
    depth = 8

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block(again) for _ in range(depth))
            self.most = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                if again is None:
                    x = checkpoint(block, x, use_reentrant=False)
                else:
                    x = block(x)
                x.register_hook(self.look)
            return x

        def look(self, _: Any) -> None:
            sizes = [flat.full.untyped_storage().nbytes() for flat in self.flats]
            self.most = max(self.most, sum(size > 0 for size in sizes))

    def run(group: Any) -> int:
        model = fully_shard(Deep(), Block)
        model.module.flats = model.flats()
        for _ in range(2):  # units are gathered ahead from the second pass on
            model(input_of(group.rank)).sum().backward()
        return model.module.most

    assert max(run_local(run, 2)) <= 4


@pytest.mark.ranks(2)
def test_a_pass_that_was_left_leaves_no_gradient():
    class Refuses(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, refuses: bool) -> torch.Tensor:
            ctx.refuses = refuses
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            if ctx.refuses:
                raise ValueError("on purpose")
            return gradient, None

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2, bias=False)
            self.layer.weight.data.copy_(torch.eye(2))

        def forward(self, x: torch.Tensor, refuses: bool) -> torch.Tensor:
            return self.layer(Refuses.apply(self.layer(x), refuses))

    model = fully_shard(Twice(), nn.Linear)
    x = torch.ones(1, 2)
    with pytest.raises(ValueError, match="on purpose"):
        model(x, True).sum().backward()
    model(x, False).sum().backward()
    assert model.flats()[0].shard.grad.tolist() == [2.0, 2.0]


@pytest.mark.ranks(2)
def test_a_pass_that_was_announced_is_reduced_after_a_pass_that_is_not(world: Any):
    model = fully_shard(nn.Linear(1, 2, bias=False))
    first = model(torch.full((1, 1), 1.0 + world.rank))
    with model.no_sync():
        second = model(torch.full((1, 1), 10.0 + world.rank))
    (first + second).sum().backward()
    assert model.flats()[0].shard.grad.item() == 12.0


# torch leaves the second forward pass by its own exception, which ranks tell; none waits for that.
@pytest.mark.ranks(2, strict=False)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("accumulates", [False, True])
def test_a_checkpoint_may_be_around_the_whole_model(world: Any, reentrant, accumulates):
    model = fully_shard(nn.Linear(1, 2, bias=False))
    for last in (False, True) if accumulates else (True,):
        x = torch.zeros(1, 1) + (1.0 + world.rank)
        with contextlib.nullcontext() if last else model.no_sync():
            checkpoint(model, x.requires_grad_(), use_reentrant=reentrant).sum().backward()
    assert model.flats()[0].shard.grad.item() == 3.0 if accumulates else 1.5


@pytest.mark.ranks(2)
def test_an_evaluation_after_a_pass_that_was_left_announces_nothing():
    model = fully_shard(nn.Linear(1, 2, bias=False))
    x = torch.ones(1, 1, requires_grad=True)
    x.register_hook(refuse)
    with pytest.raises(ValueError, match="on purpose"):
        model(x).sum().backward()
    with torch.no_grad():
        model(torch.ones(1, 1))
    with model.no_sync():
        model(torch.ones(1, 1)).sum().backward()
    assert model.flats()[0].shard.grad is None


def refuse(_: Any) -> None:
    raise ValueError("on purpose")


@pytest.mark.ranks(3)
def test_gradients_are_added_and_divided_in_the_precision_of_reductions():
    model = fully_shard(
        nn.Linear(1, 3, bias=False), param_dtype=torch.bfloat16, reduce_dtype=torch.float32
    )
    for value in (256.0, 1.0, 1.0):
        with model.no_sync():
            model(torch.full((1, 1), value)).sum().backward()
    model(torch.ones(1, 1)).sum().backward()
    assert model.flats()[0].shard.grad.item() == 259.0


@pytest.mark.ranks(2)
def test_a_backward_pass_after_a_step_is_an_error():
    model = fully_shard(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)), nn.Linear)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    first, second = model(torch.ones(2, 3)).sum(), model(torch.ones(2, 3)).sum()
    first.backward(retain_graph=True)
    first.backward()  # of the same weights
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"a shard .* has been changed in place since"):
        second.backward()
    model.zero_grad()
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()


@pytest.mark.ranks(2)
def test_a_call_past_the_module_is_an_error_where_gradients_would_be_lost():
    model = fully_shard(nn.Sequential(nn.Linear(1, 1, bias=False)), nn.Linear)
    x = torch.ones(1, 1)
    with pytest.raises(RuntimeError, match="Linear was called past the module"):
        model.module(x)
    with torch.no_grad():
        before = model.module(x).item()
    assert before == model(x).item()
    output = model(x)
    (output + model.module(x)).sum().backward()  # in a pass that has begun
    assert [flat.shard.grad.sum().item() for flat in model.flats()] in ([2.0], [0.0])


class Forces(nn.Module):
    """A module that differentiates a unit in its forward pass, and uses another one then."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.first(x).square().sum(), x, create_graph=True)
            return self.second(slope)


@pytest.mark.ranks(2)
def test_a_forward_pass_may_differentiate_a_unit():
    torch.manual_seed(0)
    plain = Forces()
    model = fully_shard(copy.deepcopy(plain), nn.Linear)
    plain.load_state_dict(model.full_state_dict())
    x = torch.ones(2, 3)
    for _ in range(2):
        with torch.no_grad():
            assert torch.equal(model(x), plain(x))
        assert torch.equal(model(x), plain(x))


@pytest.mark.ranks(2)
def test_a_frozen_unit_may_be_called_by_itself():
    module = nn.Sequential(nn.Linear(3, 3).requires_grad_(False), nn.Linear(3, 1))
    model = fully_shard(module, nn.Linear)
    model(model.module[0](torch.ones(2, 3))).sum().backward()


@pytest.mark.ranks(2)
def test_a_saved_tensor_that_was_changed_in_place_is_an_error():
    model = fully_shard(nn.Linear(3, 3), nn.Linear)
    x = torch.ones(2, 3)
    loss = model(x).sum()
    x.add_(1)
    with pytest.raises(RuntimeError, match=r"shape \(2, 3\) .* changed in place"):
        loss.backward()
