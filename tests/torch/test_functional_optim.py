"""A functional step is the optimizer's own step, on any tensors and gradients."""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from nc10d.torch import as_functional_optim
from nc10d.torch.optim.functional_steps import FunctionalOptimizer

KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    "Adam": (torch.optim.Adam, {"lr": 0.1, "amsgrad": True}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.1, "fused": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.5}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 0.1}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.1, "momentum": 0.5, "foreach": True}),
    "Rprop": (torch.optim.Rprop, {"lr": 0.1}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.1, "maximize": True}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.1}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.1}),
}


def values(seed: int, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def params() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(values(i, (i + 2, 3))) for i in range(3)]


@pytest.mark.parametrize("how", ["together", "each", "constructor"])
@pytest.mark.parametrize("name", KINDS)
def test_steps_equal_the_optimizers_own_and_leave_gradients_alone(name, how):
    kind, options = KINDS[name]
    ours, theirs = params(), params()
    plain = kind(theirs, **options)
    if how == "constructor":
        functional = FunctionalOptimizer(kind, ours, **options)
    else:
        functional = as_functional_optim(kind, **options)
    marks = [torch.ones_like(x) for x in ours]
    for x, mark in zip(ours, marks, strict=True):
        x.grad = mark
    for step in range(4):
        gradients = [values(10 * step + i, x.shape) for i, x in enumerate(ours)]
        if step == 1:
            gradients[1] = None
        if step == 2:
            functional.param_groups[0]["lr"] = plain.param_groups[0]["lr"] = 0.05
        if how == "together":
            functional.step_params(ours, gradients)
        elif how == "each":
            for x, gradient in zip(ours, gradients, strict=True):
                functional.step_param(x, gradient)
        else:
            functional.step(gradients)
        for x, gradient in zip(theirs, gradients, strict=True):
            x.grad = gradient
        plain.step()
    assert all(map(torch.equal, ours, theirs))
    assert all(x.grad is mark and (mark == 1).all() for x, mark in zip(ours, marks, strict=True))
    for x, y in zip(ours, theirs, strict=True):
        found, expected = functional.state[x], plain.state[y]
        assert found.keys() == expected.keys()
        tensors = [key for key, value in expected.items() if isinstance(value, torch.Tensor)]
        assert all(torch.equal(found[key], expected[key]) for key in tensors)


def test_a_parameter_may_move_to_other_memory_between_steps():
    (x, *_), (y, *_) = params(), params()
    functional, plain = as_functional_optim(torch.optim.Adam, 0.1), torch.optim.Adam([y], 0.1)
    for step in range(3):
        y.grad = values(step, y.shape)
        functional.step_param(x, y.grad)
        plain.step()
        x.data = x.detach().clone()
    assert torch.equal(x, y)


def test_a_state_goes_on_in_another_functional_optimizer():
    ours, theirs = params(), params()
    first = FunctionalOptimizer(torch.optim.Adam, ours, lr=0.1)
    first.step([values(i, x.shape) for i, x in enumerate(ours)])
    for x, y in zip(ours, theirs, strict=True):
        y.data.copy_(x.detach())
    second = FunctionalOptimizer(torch.optim.Adam, theirs, lr=7.0)
    second.load_state_dict(first.state_dict())
    for optimizer in (first, second):
        optimizer.step([values(9 + i, x.shape) for i, x in enumerate(ours)])
    assert all(map(torch.equal, ours, theirs))


def test_mistakes_raise_before_any_parameter_changes():
    ours = params()
    with pytest.raises(ValueError, match="couples all parameters"):
        as_functional_optim(torch.optim.LBFGS)
    functional = FunctionalOptimizer(torch.optim.SGD, ours, lr=0.1)
    with pytest.raises(ValueError, match="got 1 gradients for 3 parameters"):
        functional.step([torch.ones(2, 3)])
    with pytest.raises(RuntimeError, match="size"):
        functional.step_param(ours[0], torch.ones(7))
    assert all(map(torch.equal, ours, params()))


def test_autograd_notices_a_step_before_a_backward_pass_that_needs_the_parameter():
    x = torch.nn.Parameter(torch.ones(2))
    loss = (x * x).sum()
    as_functional_optim(torch.optim.SGD, 0.1).step_param(x, torch.ones(2))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


CAPTURABLE = {
    "Adam": {"foreach": True, "amsgrad": True},
    "AdamW": {},
    "NAdam": {},
    "RAdam": {},
    "Adamax": {},
    "RMSprop": {},
    "Adadelta": {},
}


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("name", [*CAPTURABLE, "SGD"])
def test_a_capturable_step_on_a_gpu_reads_nothing_back(name, foreach):
    """A FakeTensor has no values: a host that reads one gets an error."""
    options = {"momentum": 0.9} if name == "SGD" else {"capturable": True, **CAPTURABLE[name]}
    with FakeTensorMode():
        x = torch.ones(3, device="cuda")
        options = {"lr": 0.1, "foreach": foreach} | options
        functional = as_functional_optim(getattr(torch.optim, name), **options)
        for _ in range(3):
            functional.step_param(x, torch.ones(3, device="cuda"))
        tensors = [v for v in functional.state[x].values() if isinstance(v, torch.Tensor)]
        assert {v.device.type for v in tensors} == {"cuda"}


def test_a_step_that_is_not_capturable_counts_on_the_host():
    x = torch.ones(3)
    functional = as_functional_optim(torch.optim.Adam, 0.1)
    functional.step_param(x, torch.ones(3))
    assert functional.state[x]["step"].device.type == "cpu"


def test_the_count_of_host_reads_can_fail():
    with FakeTensorMode(), pytest.raises(DataDependentOutputException):
        torch.ones(1, device="cuda").item()
