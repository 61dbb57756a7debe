"""fully_shard beside other tools: outputs, clipping, optimizers in the backward pass, compilers."""

import copy
import pickle
from collections import OrderedDict
from dataclasses import dataclass

import pytest
import torch

from nc10d.torch import DistributedDataParallel, apply_optimizer_in_backward, fully_shard


@dataclass
class Output:
    y: torch.Tensor
    weight: torch.Tensor


class InDataclass(torch.nn.Linear):
    def forward(self, x):
        return Output(super().forward(x), self.weight)


class InFrozenset(torch.nn.Linear):
    def forward(self, x):
        return frozenset({super().forward(x), self.weight})


@dataclass
class DictOutput(OrderedDict):
    """As transformers' outputs: a dict whose items are attributes, too."""

    y: torch.Tensor
    weight: torch.Tensor

    def __init__(self, *items, **attributes):
        super().__init__(*items, **attributes)
        for name, value in self.items():
            setattr(self, name, value)


class InDict(torch.nn.Linear):
    def forward(self, x):
        return DictOutput(y=super().forward(x), weight=self.weight)


class SumOfAll(torch.nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.unit = kind(4, 4, bias=False)

    def forward(self, x):
        out = self.unit(x)
        if isinstance(out, DictOutput):
            assert out["weight"] is out.weight
        parts = out if isinstance(out, frozenset) else [out.y, out.weight]
        return sum(part.sum() for part in parts)


@pytest.mark.ranks(2, strict=False)
@pytest.mark.parametrize("kind", [InDataclass, InFrozenset, InDict])
def test_a_unit_returns_a_parameter_in_any_container(kind):
    module = SumOfAll(kind)
    module.unit.weight.data.fill_(2.0)
    loss = fully_shard(module, kind)(torch.ones(1, 4))
    loss.backward()
    assert (loss.item(), [x.grad.tolist() for x in module.parameters()]) == (64.0, [[2.0] * 8])


class Checkpointed(torch.nn.Linear):
    def forward(self, x):
        def run(x):
            return torch.tanh(super(Checkpointed, self).forward(x))

        return torch.utils.checkpoint.checkpoint(run, x, use_reentrant=False)


def check_gradients(model, twin):
    """Compare the means of all shards with a plain module's gradients."""
    for flat in model.flats():
        if flat.shard.grad is not None:
            whole = flat.layout.split(flat.whole(flat.shard.grad))
            for name, gradient in whole.items():
                wanted = twin.get_parameter(name.removeprefix("_orig_mod.")).grad
                torch.testing.assert_close(gradient, wanted, rtol=0.02, atol=1e-3)


@pytest.mark.ranks(2, strict=False)
@pytest.mark.parametrize("passes", [1, 2])
def test_a_frozen_unit_is_used_twice_with_a_checkpoint_inside(passes):
    def module():
        unit = Checkpointed(4, 4).requires_grad_(False)
        return torch.nn.Sequential(torch.nn.Linear(4, 4), unit, unit)

    model, twin = fully_shard(module(), Checkpointed), module()
    twin.load_state_dict(model.full_state_dict())
    for each in (model, twin):
        x = torch.ones(2, 4)
        for _ in range(passes):
            x = each(x)
        x.sum().backward()
    assert [flat.shard.grad is None for flat in model.flats()] == [False, True]
    check_gradients(model, twin)


@pytest.mark.ranks(2, strict=False)
def test_ddp_leaves_a_divided_part_that_it_is_to_ignore(world):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), fully_shard(torch.nn.Linear(2, 2)))
    names = [name for name, _ in model.named_parameters() if name.startswith("1.")]
    model._ddp_params_and_buffers_to_ignore = names
    ddp = DistributedDataParallel(model)
    ddp(torch.full((1, 2), 1.0 + world.rank)).sum().backward()
    assert [x.grad is not None for x in ddp.parameters()] == [True] * 3


WAYS = {
    "fully_shard": fully_shard,
    "in a larger one": lambda x: fully_shard(torch.nn.Sequential(x, torch.nn.Identity())),
    "DDP": DistributedDataParallel,
}


@pytest.mark.ranks(2, strict=False)
@pytest.mark.parametrize("way", WAYS)
def test_a_divided_module_is_not_divided_again(way):
    with pytest.raises(ValueError, match="has divided this part already"):
        WAYS[way](fully_shard(torch.nn.Linear(2, 2)))


@pytest.mark.ranks(2, strict=False)
def test_an_optimizer_in_the_backward_pass_steps_by_the_mean_of_that_pass(world):
    model = fully_shard(torch.nn.Linear(1, 1, bias=False))
    model.load_full_state_dict({"weight": torch.ones(1, 1)})
    apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 1.0})
    found = []
    for x in (1.0, 10.0, 100.0):
        model(torch.full((1, 1), x + world.rank)).sum().backward()
        found.append(model.full_state_dict()["weight"].item())
    assert found == [-0.5, -11.0, -111.5]


@pytest.mark.ranks(2, strict=False)
def test_an_optimizer_of_whole_parameters_is_refused():
    layer = torch.nn.Linear(1, 1)
    apply_optimizer_in_backward(torch.optim.SGD, layer.parameters(), {"lr": 1.0})
    with pytest.raises(ValueError, match="call apply_optimizer_in_backward on the shards"):
        fully_shard(layer)


@pytest.mark.ranks(2, strict=False)
def test_shards_can_be_neither_converted_nor_copied(capsys):
    model = fully_shard(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    for convert in (model.double, model.bfloat16, lambda: model.to("meta")):
        with pytest.raises(RuntimeError, match="before fully_shard"):
            convert()
    assert model.float() is model.to("cpu") is model
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="use its full_state_dict"):
            copied(model)
    model(torch.ones(1, 2)).sum().backward()
    assert all(x.grad is not None for x in model.parameters())


@pytest.mark.ranks(2, strict=False)
def test_a_replaced_shard_is_an_error():
    model = fully_shard(torch.nn.Linear(2, 2))
    model.load_state_dict(model.state_dict(), assign=True)
    with pytest.raises(RuntimeError, match="load states without assign=True"):
        model(torch.ones(1, 2))


@pytest.mark.ranks(2, strict=False)
@pytest.mark.parametrize("options", [{"sparse": True}, {"max_norm": 1.0}])
def test_embeddings_that_no_flat_tensor_can_train_are_refused(options):
    with pytest.raises(ValueError, match="has sparse=True or max_norm"):
        fully_shard(torch.nn.Sequential(torch.nn.Embedding(3, 2, **options)))


@pytest.mark.ranks(3, strict=False)
@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_gradients_are_clipped_by_the_norm_of_all_shards(norm_type, dtype):
    module, twin = (
        torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2)).to(dtype)
        for _ in range(2)
    )
    model = fully_shard(module, torch.nn.Linear)
    twin.load_state_dict(model.full_state_dict())
    x = torch.ones(4, 3, dtype=dtype)
    model(x).square().sum().backward()
    twin(x).square().sum().backward()
    found = model.clip_grad_norm_(0.1, norm_type)
    wanted = torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.1, norm_type)
    torch.testing.assert_close(found, wanted.float(), rtol=0.02, atol=1e-3)
    check_gradients(model, twin)
    with pytest.raises(ValueError, match="must be positive"):
        model.clip_grad_norm_(1.0, 0.0)


# Processes: torch's compiler keeps the state of a trace in global variables.
# Its compilation takes a minute beside other programs.
@pytest.mark.ranks(2, kind="processes", timeout=150.0, strict=False)
@pytest.mark.parametrize("way", ["inside", "outside"])
def test_a_compiled_module_has_units(way):
    linear = torch.nn.Linear
    module, twin = (torch.nn.Sequential(linear(4, 4), linear(4, 4)) for _ in range(2))
    if way == "inside":
        model = fully_shard(torch.compile(module, backend="aot_eager"), units=linear)
    else:
        model = torch.compile(fully_shard(module, units=linear), backend="aot_eager")
    state = {k.removeprefix("_orig_mod."): v for k, v in model.full_state_dict().items()}
    twin.load_state_dict(state)
    x = torch.full((2, 4), 1.0)
    for _ in range(2):
        model(x).square().sum().backward()
        twin(x).square().sum().backward()
    check_gradients(model, twin)
