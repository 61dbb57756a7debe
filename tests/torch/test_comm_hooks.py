"""Comm hooks by torch's names, and optimizers that step inside of them."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms import ddp_comm_hooks as theirs

from nc10d.testing import run_local
from nc10d.torch import DistributedDataParallel
from nc10d.torch.training import comm_hooks
from nc10d.torch.training.comm_hooks import (
    DDPCommHookType,
    OptimizerHookState,
    allreduce_hook,
    bf16_compress_hook,
    hook_then_optimizer,
    register_ddp_comm_hook,
)


def net():
    module = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2))
    own = torch.Generator().manual_seed(0)  # ranks are threads
    for x in module.parameters():
        x.data.copy_(torch.randn(x.shape, generator=own) / 4)
    return module.to(memory_format=torch.channels_last)


def data_of(rank, step):
    return torch.randn(3, 2, 4, 4, generator=torch.Generator().manual_seed(10 * rank + step))


def gradients(model, rank):
    for step in range(3):
        model.zero_grad()
        model(data_of(rank, step)).square().sum().backward()
    return [x.grad.clone() for x in model.parameters()]


def test_every_public_name_of_torchs_hooks_is_there():
    assert list(DDPCommHookType.__members__) == list(theirs.DDPCommHookType.__members__)
    modules = (theirs.default, theirs.powerSGD, theirs.quantization, theirs.debugging)
    names = {name for x in modules for name in vars(x) if name.endswith(("_hook", "_wrapper"))}
    assert {x for x in names if not x.startswith("_")} <= set(vars(comm_hooks))


@pytest.mark.parametrize("kind", [x for x in DDPCommHookType if x is not DDPCommHookType.NOOP])
def test_a_hook_that_is_registered_by_its_name_averages(kind):
    def run(group):
        plain, hooked = DistributedDataParallel(net()), DistributedDataParallel(net())
        register_ddp_comm_hook(kind, hooked, group if "SGD" in kind.name else None)
        pairs = zip(gradients(plain, group.rank), gradients(hooked, group.rank), strict=True)
        return max(((a - b).norm() / a.norm()).item() for a, b in pairs)

    assert max(run_local(run, 2)) < 0.03


STATES = {
    "power": lambda: (comm_hooks.PowerSGDState(None, 1, 2), comm_hooks.powerSGD_hook),
    "local": lambda: (
        comm_hooks.PostLocalSGDState(None, None, 1, False),
        comm_hooks.post_localSGD_hook,
    ),
}


@pytest.mark.parametrize("kind", STATES)
def test_a_state_without_a_group_takes_the_reducers(kind):
    def run(group):
        state, hook = STATES[kind]()
        model = DistributedDataParallel(net())
        model.register_comm_hook(state, hook)
        return gradients(model, group.rank)

    assert len(run_local(run, 2)) == 2


class Descent:
    """A functional optimizer: plain gradient descent."""

    def step_param(self, param, grad):
        assert not torch.is_grad_enabled()
        assert grad.stride() == param.stride()
        param.sub_(grad, alpha=0.1)


def compressed_by_torch(group, bucket):
    future = torch._C.Future([])  # as of torch.distributed's Works
    group.all_reduce(bucket.buffer().div_(int(group.size)))
    future.set_result(bucket.buffer())
    return future


HOOKS = [allreduce_hook, bf16_compress_hook, theirs.default.allreduce_hook, compressed_by_torch]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("hook", HOOKS)
def test_an_optimizer_in_a_hook_steps_by_the_mean(world, hook, views):
    options = {"bucket_cap_mb": 1e-4, "gradient_as_bucket_view": views}
    after, inside = (DistributedDataParallel(net(), **options) for _ in range(2))
    after.register_comm_hook(world, hook)
    inside.register_comm_hook(world, hook_then_optimizer(hook, OptimizerHookState(Descent())))
    optimizer = torch.optim.SGD(after.parameters(), 0.1)
    for step in range(3):
        for model in (after, inside):
            model.zero_grad()
            model(data_of(world.rank, step)).square().sum().backward()
        optimizer.step()
    pairs = zip(after.parameters(), inside.parameters(), strict=True)
    assert all(torch.equal(a, b) and torch.equal(a.grad, b.grad) for a, b in pairs)


@pytest.mark.ranks(2)
def test_an_optimizer_in_a_hook_steps_the_parameters_it_was_given(world):
    module = net()
    before = [x.detach().clone() for x in module.parameters()]
    state = OptimizerHookState(Descent(), [module[3].bias])
    model = DistributedDataParallel(module)
    model.register_comm_hook(world, hook_then_optimizer(allreduce_hook, state))
    model(data_of(world.rank, 0)).sum().backward()
    same = [torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True)]
    assert same == [True, True, True, False]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the import
def test_torchs_functional_optimizers_are_taken_and_others_are_not():
    from torch.distributed.optim.utils import as_functional_optim

    with pytest.raises(ValueError, match="SGD is no functional optimizer"):
        OptimizerHookState(torch.optim.SGD(net().parameters()))

    def run(group):
        functional = as_functional_optim(torch.optim.SGD, lr=0.5)
        model = DistributedDataParallel(nn.Linear(1, 1))
        model.module.weight.data.fill_(1.0)
        model.register_comm_hook(
            None, hook_then_optimizer(allreduce_hook, OptimizerHookState(functional))
        )
        model(torch.full((1, 1), float(group.rank))).sum().backward()
        return model.module.weight.item()

    assert run_local(run, 2) == [0.75, 0.75]
