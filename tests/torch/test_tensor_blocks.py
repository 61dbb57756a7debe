"""A coalescing block of tensors does what its calls do, and looks at each tensor once."""

import gc
from functools import partial

import pytest
import torch
from entered_functions import python_frames

import nc10d
import nc10d.torch
from nc10d.testing import Ranks, run_ranks
from nc10d.torch import tensors

assert nc10d.torch

KINDS = {
    "plain": lambda: torch.arange(6.0),
    "scalar": lambda: torch.tensor(3.0),
    "empty": lambda: torch.zeros(0, 3),
    "strided": lambda: torch.arange(12.0).view(3, 4).t()[1:],
    "bfloat16": lambda: torch.arange(4).to(torch.bfloat16),
    "float8": lambda: torch.ones(4).to(torch.float8_e5m2),
    "parameter": lambda: torch.nn.Parameter(torch.ones(2, 2)),
    "bool": lambda: torch.tensor([True, False]),
}


def calls(group, xs):
    for x in xs:
        group.all_reduce(x.detach(), nc10d.SUM)
    for x in xs:
        group.broadcast(x, 1)
    whole = [torch.cat([x.detach()] * group.size()) for x in xs if x.dim()]
    for output, x in zip(whole, (x for x in xs if x.dim()), strict=True):
        group.all_gather_into_tensor(output, x.detach())
    return whole


RANKS = {"world_size": 2}


@pytest.mark.parametrize("first", KINDS)
def test_a_block_of_tensors_does_what_its_calls_do(ranks, first):
    def run(group):
        found = []
        for block in (False, True):
            xs = [KINDS[first](), *(make() for make in KINDS.values())]
            if block:
                with group.coalescing_manager():
                    whole = calls(group, xs)
            else:
                whole = calls(group, xs)
            found.append([x.detach().float().tolist() for x in (*xs, *whole)])
        return found[0] == found[1]

    assert ranks.run(run) == [True] * 2


def test_a_block_of_tensors_of_two_devices_is_refused_and_nothing_is_sent(ranks):
    def run(group):
        x = torch.ones(2)

        def block():
            with group.coalescing_manager():
                group.all_reduce(x)
                group.all_reduce(torch.ones(2, device="meta"))

        with pytest.raises((TypeError, ValueError)):
            block()
        group.all_reduce(x)
        return x.tolist()

    assert ranks.run(run) == [[2.0] * 2] * 2


def drops_its_tensors(group):
    x = torch.ones(1_000_000)
    group.barrier()
    if group.rank == 0:
        with group.coalescing_manager(async_ops=True) as block:
            group.all_reduce(x)
            group.all_reduce(torch.ones(1_000_000))
        x.data = torch.zeros(1)
        gc.collect()
        torch.ones(1_000_000).fill_(7)  # takes memory that is free
        group.store.set("moved", b"")
        block.wait()
        return x.tolist()
    group.store.wait(["moved"])
    y = torch.ones(1_000_000)
    with group.coalescing_manager():
        group.all_reduce(x)
        group.all_reduce(y)
    return [x.sum().item(), y.sum().item()]


def test_a_block_in_flight_keeps_the_memory_of_its_tensors():
    assert run_ranks(drops_its_tensors, 2) == [[0.0], [2e6, 2e6]]


def test_a_tensor_of_a_block_costs_few_calls_of_python():
    def run(group):
        xs = [torch.zeros(8) for _ in range(100)]
        tensors._views.clear()  # a full cache of views is emptied, maybe between the blocks below

        def block(some):
            with group.coalescing_manager():
                for x in some:
                    group.all_reduce(x)

        counts = []
        for some in (xs[:50], xs):
            block(some)
            counts.append(python_frames(partial(block, some)))
        return (counts[1] - counts[0]) / 50

    with Ranks(1) as alone:
        assert alone.run(run)[0] < 10
