"""DistributedDataParallel is torch's class for isinstance, and takes nothing else from it."""

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from nc10d.group.collectives import Collectives
from nc10d.group.process_group import Members
from nc10d.testing import run_local
from nc10d.torch import DistributedDataParallel
from nc10d.torch.training.ddp_methods import PrivateMethods


@pytest.mark.ranks(2)
def test_isinstance_finds_it_and_unwrapping_leaves_no_prefix():
    model = DistributedDataParallel(nn.Linear(2, 1))
    copies = [model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    assert all(isinstance(x, TorchDDP) for x in copies)
    bare = [x.module if isinstance(x, TorchDDP) else x for x in copies]
    assert not torch.distributed.is_initialized()
    assert list(model.state_dict()) == ["module.weight", "module.bias"]
    assert all(list(x.state_dict()) == ["weight", "bias"] for x in bare)


def test_it_has_no_attribute_of_torchs_that_it_does_not_define_itself():
    own = vars(DistributedDataParallel) | vars(PrivateMethods)
    for name in vars(TorchDDP):
        if name in vars(nn.Module):
            assert getattr(DistributedDataParallel, name) is not getattr(TorchDDP, name)
        assert name in own or name in vars(type) or name in vars(object), name
    assert not hasattr(DistributedDataParallel, "_pre_forward")
    assert DistributedDataParallel.train is nn.Module.train


def frozen(group):
    layer = nn.Linear(2, 1)
    layer.bias.requires_grad_(False)
    return layer, DistributedDataParallel(layer)


def thaw(layer):
    layer.bias.requires_grad_(True)


def add(layer):
    layer.more = nn.Parameter(torch.ones(1))


def add_a_layer(layer):
    layer.inner = nn.Linear(1, 1)


def replace(layer):
    layer.weight = nn.Parameter(torch.ones(1, 2))


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("change", "name"), [(thaw, "bias"), (add, "more"), (add_a_layer, "inner"), (replace, "weight")]
)
def test_a_parameter_that_nobody_reduces_is_an_error_of_the_next_forward_pass(world, change, name):
    layer, model = frozen(world)
    x = torch.ones(1, 2)
    model(x).sum().backward()
    change(layer)
    with torch.no_grad():
        model(x)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=rf"^{name}.*frozen or not there.*wrap the modu"):
            model(x)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("how", ["freeze again", "a frozen layer", "ignored", "torch.func"])
def test_other_changes_of_the_module_are_none_of_its_business(how):
    layer, x = nn.Linear(2, 1), torch.ones(1, 2)
    layer.bias.requires_grad_(how == "freeze again")
    layer._ddp_params_and_buffers_to_ignore = ["bias"] if how == "ignored" else []
    model = DistributedDataParallel(layer, find_unused_parameters=True)
    if how == "freeze again":
        layer.bias.requires_grad_(False)
        model(x).sum().backward()
        layer.bias.requires_grad_(True)
    elif how == "a frozen layer":
        layer.inner = nn.Linear(1, 1).requires_grad_(False)
    elif how == "ignored":
        layer.bias = nn.Parameter(torch.ones(1))
    else:
        doubled = {name: 2 * value for name, value in model.named_parameters()}
        torch.func.functional_call(model, doubled, (x,))
    for _ in range(2):
        model(x).sum().backward()
    assert layer.weight.grad is not None


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the import
def test_torchs_own_optimizers_in_the_backward_pass_step_by_the_means():
    from torch.distributed.optim import _apply_optimizer_in_backward

    def run(group):
        layer = nn.Linear(2, 1, bias=False)
        layer.weight.data.zero_()
        _apply_optimizer_in_backward(torch.optim.SGD, layer.parameters(), {"lr": 1.0})
        model = DistributedDataParallel(layer)
        model(torch.full((1, 2), float(group.rank))).sum().backward()
        return layer.weight.tolist(), layer.weight.grad

    assert run_local(run, 2) == [([[-0.5, -0.5]], None)] * 2


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("module", "words"),
    [
        (nn.ReLU(), "ReLU has no parameters: there is nothing to reduce"),
        (nn.Linear(1, 1).requires_grad_(False), "Linear has no parameter that requires a gradient"),
    ],
)
def test_a_module_without_anything_to_train_is_told_so(module, words):
    with pytest.raises(RuntimeError, match=words):
        DistributedDataParallel(module)


class OwnGroup(Collectives, Members):
    """A group as a user writes it, on another group."""

    def __init__(self, group):
        Members.__init__(self, str(group.name), group.ranks, int(group.rank))
        self._inner = group

    def _run(self, op, array, async_op, timeout):
        return self._inner._run(op, array, async_op, timeout)


def test_a_group_in_python_trains_a_model():
    def run(group):
        torch.manual_seed(group.rank)
        layer = nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1))
        model = DistributedDataParallel(layer, process_group=OwnGroup(group))
        for _ in range(2):
            model.zero_grad()
            (model(torch.ones(2, 2)).sum() + layer[0].bias.sum() * group.rank).backward()
        assert model._get_ddp_logging_data()["backend_name"] == "OwnGroup"
        return layer[0].weight.tolist(), np.round(layer[0].bias.grad.tolist(), 6).tolist()

    first, second = run_local(run, 2)
    assert first == second
    assert first[1] == [0.5]


class Weight(nn.Module):
    """A single weight, whose gradient is the input."""

    def __init__(self, count, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(count, dtype=dtype))

    def forward(self, x):
        return (self.weight * x).sum()


TOPS = [(torch.float16, 60_000), (torch.bfloat16, 3e38), (torch.float32, 3e38)]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}])
@pytest.mark.parametrize(("dtype", "top"), TOPS, ids=str)
@pytest.mark.parametrize("count", [2, 40_000])
def test_a_mean_of_large_gradients_has_no_overflow(count, dtype, top, options):
    model, found = DistributedDataParallel(Weight(count, dtype), **options), []
    for _ in range(3):
        model.zero_grad()
        model(torch.full((count,), top, dtype=dtype)).backward()
        found.append(bool((model.module.weight.grad == torch.tensor(top, dtype=dtype)).all()))
    assert found == [True] * 3
