"""nc10d's modules in a program that has torch's default group only: they show torch's groups.

Ranks are processes.
"""

import copy
import io
from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join as TorchJoin

import nc10d
import nc10d.torch
from nc10d.group.world import current_world
from nc10d.torch import DistributedDataParallel, SyncBatchNorm, ZeroRedundancyOptimizer, fully_shard
from nc10d.torch.training import comm_hooks
from nc10d.torch.training.model_averaging import PeriodicModelAverager

SIZE = 2
RANKS = {"world_size": SIZE, "kind": "processes"}


def start(group: Any) -> None:
    torch.set_num_threads(1)
    nc10d.torch.as_torch_group()


def without_nc10ds(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let nc10d have no default group in a rank's function, as in a program of torch's."""

    @wraps(function)
    def call(*args: Any) -> Any:
        world = current_world()
        before, world.default = world.default, None
        try:
            return function(*args)
        finally:
            world.default = before

    return call


def layer() -> nn.Module:
    made = nn.Linear(3, 2, bias=False)
    made.weight.data.copy_(torch.linspace(-1, 1, 6).view(2, 3))
    return made


def gradient(model: nn.Module) -> list[list[float]]:
    model.zero_grad()
    model(torch.full((1, 3), 1.0 + dist.get_rank())).sum().backward()
    return next(model.parameters()).grad.tolist()


MEAN = [[1.5] * 3] * 2


@without_nc10ds
def shown(_: Any) -> None:
    sub = dist.new_group([0, 1])
    params = list(layer().parameters())
    for given, expected in ((None, dist.group.WORLD), (sub, sub)):
        made = [
            DistributedDataParallel(layer(), process_group=given),
            ZeroRedundancyOptimizer(params, torch.optim.SGD, given, lr=0.1),
            fully_shard(layer(), process_group=given),
            PeriodicModelAverager(2, process_group=given),
        ]
        for each in made:
            assert each.process_group is expected
            assert dist.get_backend(each.process_group) == "nc10d"
        assert made[0].join_process_group is made[1].join_process_group is expected


def test_the_group_that_was_given_or_meant_is_shown(ranks):
    ranks.run(shown)


@without_nc10ds
def copies(_: Any) -> list[Any]:
    model = DistributedDataParallel(layer())
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    made = [
        copy.deepcopy(model),
        torch.load(file, weights_only=False),
        torch.optim.swa_utils.AveragedModel(model).module,
    ]
    assert all(each.process_group is dist.group.WORLD for each in made)
    zero = copy.deepcopy(ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1))
    assert zero.process_group is dist.group.WORLD
    return [gradient(each) for each in (model, *made)]


def test_copies_train_on_torchs_default_group(ranks):
    assert ranks.run(copies) == [[MEAN] * 4] * SIZE


def zero_class(torchs: bool) -> Any:
    if not torchs:
        return ZeroRedundancyOptimizer
    from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero  # warns

    return TorchZero


@without_nc10ds
def joined(_: Any, join: Any, torchs: bool) -> list[Any]:
    model = DistributedDataParallel(layer())
    optimizer = zero_class(torchs)(model.parameters(), torch.optim.SGD, lr=0.5)
    with join([model, optimizer]):
        for step in range(1 + 2 * dist.get_rank()):
            optimizer.zero_grad()
            model(torch.full((1, 3), 1.0 + step + dist.get_rank())).sum().backward()
            optimizer.step()
    return model.module.weight.tolist()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("torchs", [False, True])
def test_torchs_join_trains_as_nc10ds(ranks, torchs):
    expected = ranks.run(joined, [nc10d.Join] * SIZE, [False] * SIZE)
    assert expected[0] == expected[1]
    assert ranks.run(joined, [TorchJoin] * SIZE, [torchs] * SIZE) == expected


@without_nc10ds
def hooked(_: Any) -> None:
    model = DistributedDataParallel(layer())
    group = model.process_group
    mine, torchs = comm_hooks, default_hooks
    for state, hook in (
        (group, mine.allreduce_hook),
        (group, mine.fp16_compress_hook),
        (group, mine.fp16_compress_wrapper(mine.allreduce_hook)),
        (group, mine.fp16_compress_wrapper(torchs.allreduce_hook)),
        (group, mine.quantization_pertensor_hook),
        (mine.PowerSGDState(group, start_powerSGD_iter=2), mine.powerSGD_hook),
        (mine.PowerSGDState(None, start_powerSGD_iter=2), mine.powerSGD_hook),
        (mine.PostLocalSGDState(group, group, 1), mine.post_localSGD_hook),
        (group, torchs.allreduce_hook),
        (None, torchs.bf16_compress_hook),
        (powerSGD_hook.PowerSGDState(group, start_powerSGD_iter=2), powerSGD_hook.powerSGD_hook),
    ):
        model = DistributedDataParallel(layer())
        model.register_comm_hook(state, hook)
        for _ in range(4):
            torch.testing.assert_close(gradient(model), MEAN, atol=0.01, rtol=0)
        assert getattr(state, "process_group", group) in (group, model._group)


def test_hooks_take_the_group_that_a_module_shows(ranks):
    ranks.run(hooked)


@without_nc10ds
def stepped_in_the_hook(_: Any, torchs: bool) -> list[Any]:
    if torchs:
        from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step
    else:
        from nc10d.torch import hook_with_zero_step

    model = DistributedDataParallel(layer())
    kind, params = zero_class(torchs), model.parameters()
    optimizer = kind(params, torch.optim.SGD, overlap_with_ddp=True, lr=0.5)
    model.register_comm_hook(
        None, hook_with_zero_step(default_hooks.allreduce_hook, model, optimizer)
    )
    found = []
    for _ in range(5):
        gradient(model)
        found.append(model.module.weight.tolist())
    return found


@pytest.mark.filterwarnings("ignore")
def test_torchs_zero_steps_in_its_hook_as_nc10ds(ranks):
    expected = ranks.run(stepped_in_the_hook, [False] * SIZE)
    assert expected[0] == expected[1]
    assert expected[0][0] != expected[0][-1]
    assert ranks.run(stepped_in_the_hook, [True] * SIZE) == expected


@without_nc10ds
def normalised(_: Any) -> list[Any]:
    found = []
    for group in (None, dist.group.WORLD):
        norm = SyncBatchNorm(2, process_group=group)
        norm(torch.full((2, 2), 1.0 + dist.get_rank()))
        found.append(norm.running_mean.tolist())
    return found


def test_batch_norm_is_synchronised_over_torchs_default_group(ranks):
    for found in ranks.run(normalised):
        assert found == [[pytest.approx(0.15)] * 2] * 2
