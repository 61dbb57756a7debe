"""torch's own comm hooks run on nc10d's DistributedDataParallel, with a group of nc10d."""

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, quantization_hooks
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from nc10d.group.collectives import Collectives
from nc10d.testing import run_ranks
from nc10d.torch import DistributedDataParallel
from nc10d.torch.torch_calls import allreduce


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


def test_a_factor_that_torch_hides_is_refused():
    options = torch.distributed.AllreduceOptions()
    options.reduceOp = torch.distributed._make_nccl_premul_sum(2.0)
    with pytest.raises(TypeError, match="hides its factor"):
        allreduce(Collectives(), [torch.ones(1)], options)
