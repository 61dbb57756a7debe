"""What training leaves in memory: buckets once, however often they were rebuilt."""

from __future__ import annotations

import os

import torch
from torch import nn

from nc10d.testing import run_ranks
from nc10d.torch import DistributedDataParallel


def test_rebuilt_buckets_take_the_memory_of_one_set_of_gradients() -> None:
    def body(group):  # type: ignore[no-untyped-def]
        model = DistributedDataParallel(nn.Linear(512, 512), process_group=group)
        arena = group.backend("cpu").group.context.arena
        before = os.fstat(arena.fd).st_blocks
        for _ in range(3):
            model(torch.ones(2, 512)).sum().backward()
        assert model.reducer.rebuilt
        return 512 * (os.fstat(arena.fd).st_blocks - before)

    for more in run_ranks(body, 2):
        assert more < 512 * 512, "bytes; the buckets have four times as many"
