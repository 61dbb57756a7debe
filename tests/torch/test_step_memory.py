"""What training leaves in memory: buckets once, however often they were rebuilt."""

import os

import pytest
import torch
from torch import nn

from nc10d.torch import DistributedDataParallel


@pytest.mark.ranks(2, strict=False)
def test_rebuilt_buckets_take_the_memory_of_one_set_of_gradients(world) -> None:
    model = DistributedDataParallel(nn.Linear(512, 512), process_group=world)
    arena = world.backend("cpu").group.context.arena
    before = os.fstat(arena.fd).st_blocks
    for _ in range(3):
        model(torch.ones(2, 512)).sum().backward()
    assert model.reducer.rebuilt
    more = 512 * (os.fstat(arena.fd).st_blocks - before)
    assert more < 512 * 512, "bytes; the buckets have four times as many"
