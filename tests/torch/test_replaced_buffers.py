"""A forward pass sends the buffers that the module has then, whatever it has had before."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from nc10d.torch import DistributedDataParallel

Change = Callable[[nn.Module, torch.Tensor], None]


def replace(layer: nn.Module, x: torch.Tensor) -> None:
    layer.count = x


def add(layer: nn.Module, x: torch.Tensor) -> None:
    layer.register_buffer("more", x)


def add_a_layer(layer: nn.Module, x: torch.Tensor) -> None:
    layer.inner = nn.Linear(1, 1).requires_grad_(False)
    layer.inner.register_buffer("inside", x)


def replace_in_a_layer(layer: nn.Module, x: torch.Tensor) -> None:
    layer.norm.running_mean = x


def replace_a_layer(layer: nn.Module, x: torch.Tensor) -> None:
    layer.norm = nn.BatchNorm1d(1, affine=False)
    layer.norm.running_mean = x


@pytest.mark.ranks(2)
@pytest.mark.parametrize("gradients", [True, False], ids=["in training", "without gradients"])
@pytest.mark.parametrize("change", [replace, add, add_a_layer, replace_in_a_layer, replace_a_layer])
def test_a_forward_pass_sends_the_buffers_of_the_moment(
    world: Any, change: Change, gradients: bool
) -> None:
    layer = nn.Linear(1, 1)
    layer.register_buffer("count", torch.zeros(1))
    layer.norm = nn.BatchNorm1d(1, affine=False)
    model = DistributedDataParallel(layer, process_group=world)
    x = torch.ones(1, 1)
    for _ in range(2):
        model(x).sum().backward()
    new = torch.full((1,), 3.0 + world.rank)
    change(layer, new)
    with torch.set_grad_enabled(gradients):
        model(x)
    assert float(new) == 3.0
