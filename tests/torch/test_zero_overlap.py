"""Steps inside the backward pass equal the plain optimizer's after it."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torch_hooks

from nc10d.reducer import hooks
from nc10d.testing import run_local, run_ranks
from nc10d.torch import (
    DistributedDataParallel,
    ZeroRedundancyOptimizer,
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
)

WAYS = {"after": hook_with_zero_step, "between": hook_with_zero_step_interleaved}
OPTIONS = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}


def values(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def model_of(**options: Any) -> Any:
    layers = [nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)]
    model = nn.Sequential(*layers)
    for i, x in enumerate(model.parameters()):
        x.data = values(tuple(x.shape), i) / 2
    return DistributedDataParallel(model, bucket_cap_mb=2e-4, **options)


def groups_of(model: Any, count: int) -> list[dict[str, Any]]:
    params = list(model.parameters())
    return [{"params": params[i::count], "lr": 0.05 / (i + 1)} for i in range(count)]


def backward(model: Any, rank: int, steps: range, optimizer: Any = None) -> None:
    for step in steps:
        model.zero_grad()
        model(values((5, 4), 10 * step + rank)).square().mean().backward()
        if optimizer is not None:
            optimizer.step()


def plain(group: Any, vacuous: int, count: int, kind: Any = torch.optim.SGD) -> Any:
    model = model_of()
    optimizer = kind(groups_of(model, count), **OPTIONS)
    backward(model, group.rank, range(vacuous))
    backward(model, group.rank, range(vacuous, vacuous + 4), optimizer)
    state = optimizer.state_dict()
    return [x.detach().clone() for x in model.parameters()], state


def equal(found: Any, expected: Any) -> bool:
    return all(map(torch.equal, found, expected))


@pytest.mark.parametrize("hook", [hooks.allreduce_hook, torch_hooks.allreduce_hook])
@pytest.mark.parametrize("shard_buckets", [False, True])
@pytest.mark.parametrize("options", [{}, {"static_graph": True}, {"gradient_as_bucket_view": True}])
@pytest.mark.parametrize("way", WAYS)
def test_parameters_are_those_of_the_plain_optimizer(way, options, shard_buckets, hook):
    vacuous = 3 if "static_graph" in options else 2
    count = 1 + shard_buckets

    def run(group: Any) -> Any:
        model = model_of(**options)
        start = [x.detach().clone() for x in model.parameters()]
        zero = ZeroRedundancyOptimizer(
            groups_of(model, count), torch.optim.SGD, overlap_with_ddp=True, **OPTIONS
        )
        model.register_comm_hook(None, WAYS[way](hook, model, zero, shard_buckets=shard_buckets))
        backward(model, group.rank, range(vacuous))
        unchanged = equal(list(model.parameters()), start)
        backward(model, group.rank, range(vacuous, vacuous + 4))
        zero.consolidate_state_dict(to=1)
        state = zero.state_dict()["state"] if group.rank == 1 else None
        return (
            unchanged,
            [x.detach().clone() for x in model.parameters()],
            state,
            len(zero.optim.state),
        )

    expected, whole = run_local(lambda group: plain(group, vacuous, count), 3)[0]
    found = run_local(run, 3)
    for unchanged, params, _, _ in found:
        assert unchanged
        assert equal(params, expected)
    assert sum(held for *_, held in found) == len(expected)
    state = found[1][2]
    assert all(
        torch.equal(state[i]["momentum_buffer"], whole["state"][i]["momentum_buffer"])
        for i in whole["state"]
    )


@pytest.mark.parametrize("way", WAYS)
def test_ranks_of_the_engine_agree_and_equal_the_plain_optimizer(way):
    def run(group: Any) -> Any:
        model = model_of(find_unused_parameters=True)
        zero = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, overlap_with_ddp=True, lr=0.05
        )
        hook = hooks.fp16_compress_hook if way == "after" else hooks.allreduce_hook
        model.register_comm_hook(None, WAYS[way](hook, model, zero))
        backward(model, group.rank, range(6))
        return [x.detach().clone() for x in model.parameters()]

    def simple(group: Any) -> Any:
        model = model_of(find_unused_parameters=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        if way == "after":
            model.register_comm_hook(None, hooks.fp16_compress_hook)
        backward(model, group.rank, range(2))
        backward(model, group.rank, range(2, 6), optimizer)
        return [x.detach().clone() for x in model.parameters()]

    expected = run_ranks(simple, 2)[0]
    assert all(equal(params, expected) for params in run_ranks(run, 2))


def test_a_loaded_state_is_used_from_the_first_step_on():
    def run(group: Any, saved: Any) -> Any:
        model = model_of()
        zero = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.SGD, overlap_with_ddp=True, **OPTIONS
        )
        model.register_comm_hook(None, hook_with_zero_step(hooks.allreduce_hook, model, zero))
        with pytest.raises(RuntimeError, match="before the third backward pass"):
            zero.consolidate_state_dict()
        zero.load_state_dict(saved)
        rate = zero.param_groups[0]["lr"]
        backward(model, group.rank, range(3))
        return rate, [x.detach().clone() for x in model.parameters()]

    def simple(group: Any, saved: Any) -> Any:
        model = model_of()
        optimizer = torch.optim.SGD(model.parameters(), **OPTIONS)
        optimizer.load_state_dict(copy.deepcopy(saved))  # torch does not copy
        backward(model, group.rank, range(2))
        backward(model, group.rank, range(2, 3), optimizer)
        return [x.detach().clone() for x in model.parameters()]

    saved = run_local(lambda group: plain(group, 2, 1), 1)[0][1]
    saved["param_groups"][0]["lr"] = 0.2
    expected = run_local(simple, 2, [saved] * 2)[0]
    for rate, params in run_local(run, 2, [saved] * 2):
        assert rate == 0.2
        assert equal(params, expected)


@pytest.mark.ranks(2)
def test_a_schedule_of_rates_reaches_the_steps_and_step_does_nothing(world: Any):
    model = model_of()
    zero = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1
    )
    schedule = torch.optim.lr_scheduler.StepLR(zero, 1, gamma=0.0)
    model.register_comm_hook(None, hook_with_zero_step(hooks.allreduce_hook, model, zero))
    backward(model, world.rank, range(3))
    before = [x.detach().clone() for x in model.parameters()]
    assert zero.step() is None
    schedule.step()
    backward(model, world.rank, range(3, 4))
    assert equal(list(model.parameters()), before)


@pytest.mark.ranks(1)
def test_mistakes_are_refused():
    model = model_of()
    eager = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match="made with overlap_with_ddp=True"):
        hook_with_zero_step(hooks.allreduce_hook, model, eager)
    params = list(model.parameters())[1:]
    zero = ZeroRedundancyOptimizer(params, torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
    with pytest.raises(RuntimeError, match="the groups are fixed"):
        zero.add_param_group({"params": [torch.ones(1)]})
    model.register_comm_hook(None, hook_with_zero_step(hooks.allreduce_hook, model, zero))
    backward(model, 0, range(2))
    with pytest.raises(ValueError, match="is not in the optimizer"):
        backward(model, 0, range(2, 3))
