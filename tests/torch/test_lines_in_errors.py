"""Errors name the line of the program, where torch's own code calls nc10d for it."""

from typing import Any

import pytest
import torch
from torch import nn

import nc10d as dist
from nc10d.errors import CollectiveMismatch
from nc10d.torch import DistributedDataParallel, functional


def forward() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    DistributedDataParallel(module)(torch.ones(3, 2))  # torch's Module calls nc10d


def backward() -> None:
    x = torch.ones(3, requires_grad=True)
    functional.all_reduce(x, "sum").sum().backward()  # torch's engine calls nc10d


CALLS = {forward: 2, backward: 2}
"""The calls, and the line of each that is at fault."""


def differ(call: Any, rank: int) -> None:
    """Make the call on rank 0, and barriers in place of its last collectives on rank 1."""
    if rank == 0:
        call()
    elif call is backward:
        functional.all_reduce(torch.ones(3), "sum").wait()
    else:
        DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    for _ in range(3):
        dist.barrier()


@pytest.mark.ranks(2, strict=False)
@pytest.mark.parametrize("call", CALLS)
def test_an_error_names_the_programs_line(world: Any, call: Any) -> None:
    with pytest.raises(CollectiveMismatch) as caught:
        differ(call, world.rank)
    line = call.__code__.co_firstlineno + CALLS[call]
    text = str(caught.value)
    assert f"test_lines_in_errors.py:{line}" in text
    assert "site-packages" not in text
