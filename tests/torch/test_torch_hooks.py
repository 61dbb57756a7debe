"""torch's own comm hooks run on nc10d's DistributedDataParallel, with a group of nc10d."""

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, quantization_hooks
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from nc10d.ops import PRODUCT
from nc10d.testing import run_ranks
from nc10d.torch import DistributedDataParallel


class Getter(int):
    """A number that is its own getter, as c10d's groups have them."""

    def __call__(self):
        return int(self)


def as_itself(group):
    return group


def power(group):
    return PowerSGDState(group, start_powerSGD_iter=2)


def local(group):
    return PostLocalSGDState(group, group, 2)


HOOKS = {
    "allreduce": (default_hooks.allreduce_hook, as_itself),
    "float16": (default_hooks.fp16_compress_hook, as_itself),
    "bfloat16": (default_hooks.bf16_compress_hook, as_itself),
    "wrapped": (default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook), as_itself),
    "quantized": (quantization_hooks.quantization_pertensor_hook, as_itself),
    "PowerSGD": (powerSGD_hook, power),
    "local SGD": (post_localSGD_hook, local),
}


def train(group, hook, state):
    if not callable(group.size):
        group.size, group.rank = Getter(group.size), Getter(group.rank)
    torch.manual_seed(0)
    layer = torch.nn.Linear(64, 64)
    options = {"process_group": group, "bucket_cap_mb": 0.005}  # several buckets
    model = DistributedDataParallel(torch.nn.Sequential(layer, torch.nn.Linear(64, 64)), **options)
    model.register_comm_hook(state(group), hook)
    for _ in range(4):
        model.zero_grad()
        (model(torch.ones(1, 64)) * (int(group.rank) + 1)).sum().backward()
    return model.module[1].bias.grad.tolist()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_of_torchs_averages(name):
    for found in run_ranks(train, 2, "threads", *([x] * 2 for x in HOOKS[name])):
        assert found == pytest.approx([1.5] * 64, rel=1e-2)


def reduced(group, opts):
    x = torch.full((2,), group.rank() + 1.0)
    group.allreduce(x if group.rank() else [x], *opts).wait()
    return x.tolist()


def with_options():
    options = torch.distributed.AllreduceOptions()
    options.reduceOp = torch.distributed._make_nccl_premul_sum(2.0)
    return options


FORMS = {
    "none": ((), 3.0),
    "torch's options": ((with_options(),), 6.0),
    "torch's reduction": ((torch.distributed.ReduceOp.MAX,), 2.0),
    "nc10d's reduction": ((PRODUCT,), 2.0),
    "a timeout": ((PRODUCT, 20), 2.0),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_group_takes_the_options_of_torchs_groups(name):
    opts, total = FORMS[name]
    assert run_ranks(reduced, 2, "threads", [opts] * 2) == [[total] * 2] * 2


@pytest.mark.ranks(2, strict=False)
def test_a_group_gathers_into_a_list_and_into_a_list_of_one(world):
    mine, theirs = torch.ones(1) * world.rank(), [torch.ones(1) for _ in range(2)]
    world.allgather(theirs if world.rank() else [theirs], [mine]).wait()
    assert [x.item() for x in theirs] == [0.0, 1.0]


@pytest.mark.ranks(1, strict=False)
def test_two_tensors_and_functions_are_refused(world):
    x = torch.ones(2)
    with pytest.raises(ValueError, match="a single tensor in a call, not 2"):
        world.allreduce([x, x])
    with pytest.raises(TypeError, match="use ReduceOp"):
        world.allreduce([x], max)
