"""An exception leaves a forward pass, a backward pass or a step, on some ranks or on all.

A rank alone: every rank raises an error that names the pass, and no rank gets numbers of another
pass. All ranks: training goes on.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from nc10d import CollectiveMismatch, DistError
from nc10d.testing import run_ranks
from nc10d.torch import (
    DistributedDataParallel,
    MixedPrecision,
    SyncBatchNorm,
    ZeroRedundancyOptimizer,
    fully_shard,
)

SIZE, STEPS = 2, 4


class Raises(torch.autograd.Function):
    """The identity, whose backward pass may raise."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, raises: bool) -> torch.Tensor:
        ctx.raises = raises
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if ctx.raises:
            raise MemoryError("on purpose")
        return gradient, None


class Layers(nn.Module):
    """Layers of equal shapes; an exception comes in front of layer `place` or behind the last."""

    def __init__(self, norms: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(2))
        for layer in self.layers:
            layer.weight.data.fill_(1.0)
        self.norms = nn.ModuleList(SyncBatchNorm(1) for _ in range(2)) if norms else ()

    def forward(self, x: torch.Tensor, place: int = -1, forward: bool = False) -> torch.Tensor:
        for index, layer in enumerate((*self.layers, nn.Identity())):
            if forward and index == place:
                raise MemoryError("on purpose")
            x = layer(Raises.apply(x, index == place))
            x = self.norms[index](x) if index < len(self.norms) else x
        return x.float().sum()


def train(model: nn.Module, raises: Callable[[int], bool], **where: Any) -> list[Any]:
    """Return the exception of each step, or a parameter's gradient."""
    found: list[Any] = []
    for step in range(STEPS):
        model.zero_grad()
        x = torch.full((2, 1), 10.0**step, requires_grad=True)
        try:
            model(x, **(where if raises(step) else {})).backward()
            found.append(next(model.parameters()).grad.item() / 2)
        except (DistError, RuntimeError, MemoryError) as error:
            found.append(error)
    return found


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
    "buckets": {"bucket_cap_mb_list": [1e-6]},
    "mixed": {"mixed_precision": MixedPrecision(torch.bfloat16)},
}


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_backward_pass_that_one_rank_has_left_is_an_error_on_every_rank(name, first, place):
    def run(group: Any) -> list[Any]:
        model = DistributedDataParallel(Layers(), **OPTIONS[name])
        return train(model, lambda step: step == first and group.rank == 0, place=place)

    results = run_ranks(run, SIZE)
    assert isinstance(results[0].pop(first), MemoryError)
    for rank, found in enumerate(results):
        means = [x for x in found if isinstance(x, float)]
        # The other rank's pass ends if the exception comes behind all gradients.
        assert len(means) <= first + (rank == 1 and place == 0)
        assert means == [10.0**step for step in range(len(means))]
        errors = found[len(means) :]
        assert all(isinstance(error, CollectiveMismatch) for error in errors)
        assert f"exception in pass {first + 1} of reducer 1" in str(errors[0])


@pytest.mark.ranks(SIZE, strict=False)
@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_backward_pass_that_all_ranks_have_left_raises_at_most_once_more(name, first, place):
    model = DistributedDataParallel(Layers(), **OPTIONS[name])
    found = train(model, lambda step: step == first, place=place)
    assert isinstance(found[first], MemoryError)
    begun = place < 2  # the gradient of a layer was ready
    if begun:
        assert "exception has ended the last backward pass on every rank" in str(found[first + 1])
    free = first + 1 + begun
    assert found[free:] == [10.0**step for step in range(free, STEPS)]


class Outputs(Layers):
    """Each layer's output is an output, so autograd is told the pass's end twice."""

    def forward(self, x: torch.Tensor, place: int = -1, forward: bool = False) -> Any:
        return [layer(Raises.apply(x, i == place)).sum() for i, layer in enumerate(self.layers)]


@pytest.mark.ranks(2)
def test_a_pass_from_several_outputs_that_all_ranks_have_left_raises_once_more(world: Any) -> None:
    model = DistributedDataParallel(Outputs())
    x = torch.ones(1, 1, requires_grad=True)
    with pytest.raises(MemoryError):
        sum(model(x, place=0)).backward()
    with pytest.raises(RuntimeError, match="an exception has ended the last backward pass"):
        model(x)
    sum(model(x)).backward()


@pytest.mark.ranks(SIZE, strict=False)
def test_a_forward_pass_that_one_rank_has_left_may_be_repeated(world: Any):
    model = DistributedDataParallel(Layers())
    try:
        model(torch.ones(2, 1), place=1, forward=world.rank == 0)
    except MemoryError:
        model(torch.ones(2, 1))
    assert train(model, lambda _: False) == [10.0**step for step in range(STEPS)]


@pytest.mark.parametrize("place", range(1, 3))
def test_a_forward_pass_that_communicates_is_left_by_all_ranks_or_is_an_error(place):
    def run(group: Any, ranks: list[int]) -> list[Any]:
        model = DistributedDataParallel(Layers(norms=True))
        raises = group.rank in ranks
        return train(model, lambda step: step == 1 and raises, place=place, forward=True)

    for found in run_ranks(run, SIZE, "threads", [[0]] * SIZE):
        assert isinstance(found[2], CollectiveMismatch)
        assert "exception in pass 2 of reducer 1" in str(found[2])
    for found in run_ranks(run, SIZE, "threads", [[0, 1]] * SIZE):
        assert [type(x) for x in found] == [float, MemoryError, float, float]


@pytest.mark.parametrize("forward", [False, True])
@pytest.mark.parametrize("place", range(3))
def test_a_sharded_pass_is_left_by_all_ranks_or_is_an_error(place, forward):
    def run(group: Any, ranks: list[int]) -> list[Any]:
        model = fully_shard(Layers(), nn.Linear)
        raises = group.rank in ranks
        return train(model, lambda step: step == 1 and raises, place=place, forward=forward)

    for found in run_ranks(run, SIZE, "threads", [[0]] * SIZE):
        assert isinstance(found[2], CollectiveMismatch)
        assert "exception in pass 2 of fully_shard(Layers)" in str(found[2])
    whole = run_ranks(run, SIZE, "threads", [[0, 1]] * SIZE)[0]
    assert [type(x) for x in whole] == [float, MemoryError, float, float]
    assert whole[2:] == [100.0, 1000.0]


@pytest.mark.ranks(SIZE, strict=False)
@pytest.mark.parametrize("ranks", [[0], [0, 1]])
def test_a_step_of_zero_is_left_by_all_ranks_or_is_an_error(world: Any, ranks):
    class Optimizer(torch.optim.SGD):
        broken = False

        def step(self, closure: Any = None) -> Any:
            if self.broken:
                raise MemoryError("on purpose")
            return super().step(closure)

    model = Layers()
    zero = ZeroRedundancyOptimizer(model.parameters(), Optimizer, lr=0.5)
    found: list[Any] = []
    for step in range(3):
        for x in model.parameters():
            x.grad = torch.ones_like(x)
        zero.optim.broken = step == 1 and world.rank in ranks
        try:
            zero.step()
            found.append([x.item() for x in model.parameters()])
        except (MemoryError, CollectiveMismatch) as error:
            found.append(error)
    assert found[0] == [0.5, 0.5]
    if ranks == [0]:
        assert "exception in a step of ZeroRedundancyOptimizer" in str(found[2])
    else:
        assert found[2] == [0.0, 0.0]
