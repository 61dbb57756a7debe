"""DistributedDataParallel in passes that are left, announced twice, nested or read unusually.

Ranks are threads. The reference is a formula, or the module in a single process.
"""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from nc10d import Join
from nc10d.testing import run_local
from nc10d.torch import (
    DistributedDataParallel,
    MixedPrecision,
    SyncBatchNorm,
    ZeroRedundancyOptimizer,
    apply_optimizer_in_backward,
)

SIZE = 2


class Scaled(nn.Module):
    """x * a, or x * a + b; the gradients are sums of what is given."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(()))

    def forward(self, x: Any, use: str = "ab") -> torch.Tensor:
        return sum(getattr(self, name) * x for name in use)


def gradients(model: Any) -> list[Any]:
    return [None if x.grad is None else x.grad.item() for x in model.parameters()]


@pytest.mark.ranks(SIZE)
@pytest.mark.parametrize("options", [{}, {"static_graph": True}, {"gradient_as_bucket_view": True}])
@pytest.mark.parametrize("both", [False, True])
def test_a_pass_that_was_announced_is_reduced_after_a_pass_that_is_not(world: Any, options, both):
    """As in torch: a forward pass in no_sync does not take the announcement back."""
    model = DistributedDataParallel(Scaled(), **options)
    first = model(1.0 + world.rank)
    with model.no_sync():
        second = model(10.0 + world.rank)
    (first + second if both else first).backward()
    mean = 1.5 + (10.5 if both else 0)
    assert gradients(model) == [mean] * 2


@pytest.mark.ranks(SIZE)
def test_the_backward_pass_of_another_pass_may_be_the_announced_one(world: Any):
    """Also with nested backward passes, which end before it."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(1, 1) for _ in range(3))

        def forward(self, x: torch.Tensor) -> Any:
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=True)
            return x

    model = DistributedDataParallel(Two())
    for x in model.parameters():
        x.data.fill_(1.0)
    model(torch.ones(1, 1, requires_grad=True))
    with model.no_sync():
        output = model(torch.full((1, 1), 1.0 + world.rank, requires_grad=True))
    output.sum().backward()
    assert gradients(model) == [1.5, 1.0, 2.5, 1.0, 3.5, 1.0]


@pytest.mark.ranks(SIZE)
@pytest.mark.parametrize("first", ["a", "b"])
@pytest.mark.parametrize("together", [False, True])
def test_two_announced_passes_may_use_different_parameters(world: Any, first, together):
    model = DistributedDataParallel(Scaled(), find_unused_parameters=True)
    outputs = {use: model(1.0 + world.rank, use) for use in "ab"}
    if together:
        sum(outputs.values()).backward()
    else:
        for use in (first, "b" if first == "a" else "a"):
            outputs[use].backward()
    assert gradients(model) == [1.5, 1.5]


@pytest.mark.ranks(SIZE)
@pytest.mark.parametrize("options", [{"static_graph": True}, {"find_unused_parameters": True}])
def test_an_optimizer_in_the_backward_pass_leaves_parameters_that_no_rank_uses(options):
    module = Scaled()
    apply_optimizer_in_backward(
        torch.optim.AdamW, module.parameters(), {"lr": 0.1, "weight_decay": 0.5}
    )
    model = DistributedDataParallel(module, **options)
    for _ in range(3):
        model(1.0, "a").backward()
    assert module.a.item() < 1
    assert module.b.item() == 1.0


@pytest.mark.ranks(SIZE)
def test_the_error_of_an_unseen_use_says_what_to_return():
    model = DistributedDataParallel(Scaled(), find_unused_parameters=True)
    with pytest.raises(RuntimeError, match="declared unused") as caught:
        (model(1.0, "a") + model.module.b).backward()
    (note,) = caught.value.__notes__
    assert "forward() must return all tensors that the loss depends on" in note


@pytest.mark.ranks(SIZE)
def test_the_error_of_a_hook_is_not_taken_for_an_unseen_use():
    model = DistributedDataParallel(Scaled())
    model.register_comm_hook(None, refused)
    with pytest.raises(RuntimeError, match="of the hook") as caught:
        model(1.0).backward()
    assert getattr(caught.value, "__notes__", []) == []


def refused(_state: Any, _bucket: Any) -> Any:
    raise RuntimeError("of the hook")


def conv(channels_last: bool) -> nn.Module:
    module = nn.Sequential(nn.Conv2d(3, 4, 2), nn.Flatten(), nn.Linear(36, 2))
    for x in module.parameters():
        x.data.copy_(torch.linspace(-1, 1, x.numel()).view(x.shape))
    return module.to(memory_format=torch.channels_last) if channels_last else module


def image(rank: int, step: int) -> torch.Tensor:
    return torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(10 * rank + step))


@pytest.mark.parametrize(
    ("channels_last", "options"),
    [
        (False, {}),
        (True, {}),
        (False, {"find_unused_parameters": True}),
        (True, {"static_graph": True}),
    ],
)
@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_that_has_joined_steps_by_the_others_gradients(channels_last, options, size):
    """Whatever the order of a parameter's elements in memory."""

    def run(group: Any) -> Any:
        model = DistributedDataParallel(conv(channels_last), **options)
        zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.01)
        with Join([model, zero]):
            for step in range(1 + 2 * group.rank):
                zero.zero_grad()
                model(image(group.rank, step)).square().mean().backward()
                zero.step()
        return [x.detach() for x in model.module.parameters()]

    module = conv(False)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    for step in range(2 * size - 1):
        optimizer.zero_grad()
        for rank in range(size):
            if step < 1 + 2 * rank:
                (module(image(rank, step)).square().mean() / size).backward()
        optimizer.step()
    for found in run_local(run, size):
        torch.testing.assert_close(found, [x.detach() for x in module.parameters()])


@pytest.mark.ranks(SIZE)
def test_a_rank_that_has_joined_forgets_a_gradient_that_the_others_do_not_have(world: Any):
    model = DistributedDataParallel(Scaled(), find_unused_parameters=True)
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=1.0)
    with Join([model, zero]):
        for step in range(4 if world.rank else 0):
            zero.zero_grad()
            model(1.0, "ab" if step == 0 else "b").backward()
            zero.step()
    assert [x.item() for x in model.module.parameters()] == [0.5, -1.0]


@pytest.mark.ranks(SIZE)
def test_a_layer_that_is_frozen_after_wrapping_stays_in_mixed_precision():
    model = DistributedDataParallel(
        Scaled(), find_unused_parameters=True, mixed_precision=MixedPrecision(torch.bfloat16)
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    found = []
    for grows in (True, False, True):
        model.module.a.requires_grad_(grows)
        optimizer.zero_grad()
        model(torch.ones(())).backward()
        optimizer.step()
        found.append([x.item() for x in model.module.parameters()])
    assert found == [[0.5, 0.5], [0.5, 0.0], [0.0, -0.5]]


class Lists(nn.Module):
    """Reads the parameters of a list, and of a layer that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.eye(4)) for _ in range(2)])
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = x @ weight
        return self.layer(nn.functional.linear(x, self.layer.weight))


UNCALLED = {
    "list": Lists,
    "attention": lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
    "weight_norm": lambda: nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 4)), nn.Tanh()),
}


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, reentrant: bool | None) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x: torch.Tensor) -> Any:
        if self.reentrant is None:
            return self.inner(x)
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


@pytest.mark.ranks(SIZE)
def test_ctrl_c_in_a_checkpointed_layer_leaves_a_usable_model_in_mixed_precision():
    class Interrupted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.calls = nn.Linear(4, 4), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if self.calls == 2:  # in the backward pass
                raise KeyboardInterrupt
            return self.layer(x)

    module = Checkpointed(Interrupted(), False)
    model = DistributedDataParallel(module, mixed_precision=MixedPrecision(torch.bfloat16))
    with pytest.raises(KeyboardInterrupt):
        model(torch.ones(1, 4)).float().sum().backward()
    model(torch.ones(1, 4)).float().sum().backward()
    assert {x.dtype for x in module.parameters()} == {torch.float32}
    assert module.inner.layer.bias.grad.tolist() == [1.0] * 4


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", UNCALLED)
def test_mixed_precision_checkpoints_layers_that_read_others_parameters(name, reentrant):
    def run(group: Any, again: bool | None) -> Any:
        module = Checkpointed(UNCALLED[name](), again)
        for x in module.parameters():
            x.data.copy_(torch.linspace(-1, 1, x.numel()).view(x.shape))
        model = DistributedDataParallel(module, mixed_precision=MixedPrecision(torch.bfloat16))
        x = torch.linspace(0, 1, 24).view(2, 3, 4).requires_grad_()
        model(x).float().square().sum().backward()
        kinds = {y.dtype for y in module.parameters()}
        return [y.grad for y in module.parameters()], kinds

    expected, _ = run_local(run, SIZE, [None] * SIZE)[0]
    for found, kinds in run_local(run, SIZE, [reentrant] * SIZE):
        torch.testing.assert_close(found, expected)
        assert kinds == {torch.float32}


@pytest.mark.ranks(SIZE)
def test_a_second_derivative_of_a_synchronised_norm_is_refused():
    """autograd would not see the reduction over ranks: the result would be wrong."""
    layer = SyncBatchNorm(2)
    x = torch.randn(3, 2).requires_grad_()
    (grad,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.sum().backward()
