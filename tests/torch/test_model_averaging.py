"""Averagers of parameters average in torch's steps, over torch's groups of ranks."""

import pytest
import torch
from torch import nn

from nc10d.reducer.hooks.local_sgd import PostLocalSGDState, post_localSGD_hook
from nc10d.testing import run_local
from nc10d.torch import DistributedDataParallel
from nc10d.torch.training.model_averaging import (
    HierarchicalModelAverager,
    PeriodicModelAverager,
    PostLocalSGDOptimizer,
    average_parameters,
)


def ranks_parameter(group, **options):
    x = nn.Parameter(torch.full((2,), float(group.rank), **options))
    x.grad = torch.zeros_like(x)
    return x


def averaged(averager, group, steps):
    """Return the parameter after each step, which begins with the rank's number."""
    found = []
    for _ in range(steps):
        x = ranks_parameter(group)
        averager.average_parameters([{"params": [x]}])
        found.append(x[0].item())
    return found


@pytest.mark.ranks(2)
def test_a_period_begins_at_the_end_of_the_warm_up(world):
    r, found = world.rank, averaged(PeriodicModelAverager(3, warmup_steps=2), world, 7)
    assert found == [r, r, 0.5, r, r, 0.5, r]


@pytest.mark.ranks(4)
def test_the_largest_group_of_a_step_averages(world):
    r, of_pair = world.rank, [0.5, 0.5, 2.5, 2.5][world.rank]
    found = averaged(HierarchicalModelAverager({2: 2, 4: 4}, warmup_steps=1), world, 6)
    assert found == [r, r, of_pair, r, 1.5, r]


@pytest.mark.ranks(2)
def test_parameters_without_a_gradient_are_left_alone_and_memory_stays(world):
    used, unused = ranks_parameter(world), ranks_parameter(world)
    unused.grad = None
    address = used.data_ptr()
    PeriodicModelAverager(1).average_parameters([used, unused])
    average_parameters([large := torch.full((2,), 60_000, dtype=torch.float16)])
    assert used.tolist() == [0.5] * 2
    assert unused.tolist() == [world.rank] * 2
    assert used.data_ptr() == address
    assert large.tolist() == [60_000] * 2


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("kind", "arguments", "words"),
    [
        (PeriodicModelAverager, (0,), "period must be a positive number"),
        (PeriodicModelAverager, (1, -1), "warmup_steps must not be negative"),
        (HierarchicalModelAverager, ({},), "must not be empty"),
        (HierarchicalModelAverager, ({0: 1},), "growing periods from 1 on"),
        (HierarchicalModelAverager, ({4: 1, 2: 1},), "growing periods from 1 on"),
        (HierarchicalModelAverager, ({2: 3},), "is 3, the group has 1 ranks"),
    ],
)
def test_wrong_periods_are_refused(kind, arguments, words):
    with pytest.raises(ValueError, match=words):
        kind(*arguments)


def test_post_local_sgd_keeps_ranks_together_and_resumes_without_a_second_warm_up():
    def run(group):
        model = DistributedDataParallel(nn.Linear(2, 1))
        state = PostLocalSGDState(group, None, 2, post_local_gradient_allreduce=False)
        model.register_comm_hook(state, post_localSGD_hook)
        inner = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        optimizer = PostLocalSGDOptimizer(inner, PeriodicModelAverager(2, warmup_steps=2))
        found = []
        for step in range(6):
            optimizer.zero_grad()
            model(torch.full((1, 2), float(group.rank + step))).sum().backward()
            optimizer.step()
            found.append(model.module.weight.tolist())
        again = PostLocalSGDOptimizer(
            torch.optim.SGD(model.parameters(), 0.5), PeriodicModelAverager(2, warmup_steps=2)
        )
        again.load_state_dict(optimizer.state_dict())
        with pytest.raises(ValueError, match="no step of an averager"):
            again.load_state_dict(inner.state_dict())
        return found, again.averager.step, again.param_groups[0]["lr"], len(again.state)

    (first, *rest), (second, *same) = run_local(run, 2)
    assert rest == same == [6, 0.1, 2]
    assert [a == b for a, b in zip(first, second, strict=True)] == [
        *(True, True),  # the warm-up averages gradients
        *(True, False, True, False),
    ]
