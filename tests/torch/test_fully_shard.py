"""A fully sharded module trains as with DistributedDataParallel, and holds its part alone."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp
from torch.utils.checkpoint import checkpoint

from nc10d.testing import run_local, run_ranks
from nc10d.torch import (
    DistributedDataParallel,
    full_optim_state_dict,
    fully_shard,
    rekey_optim_state_dict,
    scatter_full_optim_state_dict,
    shard_full_optim_state_dict,
)

OPTIONS = {"lr": 0.05}


class Net(nn.Module):
    """Blocks, a table that two layers share, a frozen layer, a layer that is used twice.

    With `reentrant`, each layer behind the table runs under a checkpoint of that kind.
    """

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.table = nn.Embedding(11, 5)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.LayerNorm(7), nn.Linear(7, 5))
            for _ in range(3)
        )
        self.frozen = nn.Linear(5, 5)
        self.out = nn.Linear(5, 11, bias=False)
        self.out.weight = self.table.weight
        self.register_buffer("offset", torch.ones(5))
        generator = torch.Generator().manual_seed(0)
        for x in self.parameters():
            nn.init.normal_(x.data, std=0.5, generator=generator)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.table(x) + self.offset.to(self.table.weight.dtype)
        for block in (*self.blocks, self.blocks[0]):
            x = x + self.call(block, x)
        return self.call(self.out, self.frozen(x))

    def call(self, layer: nn.Module, x: torch.Tensor) -> Any:
        if self.reentrant is None:
            return layer(x)
        return checkpoint(layer, x, use_reentrant=self.reentrant)


UNITS: dict[str, Any] = {
    "none": None,
    "type": nn.Sequential,
    "several": (nn.Sequential, nn.LayerNorm),
    "function": lambda module: isinstance(module, nn.Linear),
}


def batch(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(11, (4, 3), generator=generator)


def loss_of(model: Any, rank: int, step: int) -> torch.Tensor:
    x = batch(rank, step)
    return nn.functional.cross_entropy(model(x).float().flatten(0, 1), x.flatten())


def train(model: Any, rank: int, steps: range, optimizer: Any, accumulate: bool = False) -> None:
    for step in steps:
        if accumulate and step % 2 == 0:
            with model.no_sync():
                loss_of(model, rank, step).backward()
            continue
        loss_of(model, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def parallel(group: Any, steps: int, accumulate: bool = False) -> Any:
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIONS)
    train(model, group.rank, range(steps), optimizer, accumulate)
    return {k: x.detach().clone() for k, x in model.module.state_dict().items()}, optimizer


def same(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    return all(torch.equal(x, expected[name]) for name, x in found.items())


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("units", UNITS)
def test_parameters_are_those_of_data_parallel_training(units, accumulate, reentrant):
    """Also under checkpoints, around layers whose parameters belong to no unit, too."""

    def run(group: Any) -> Any:
        model = fully_shard(Net(reentrant), UNITS[units])
        optimizer = torch.optim.AdamW(model.parameters(), **OPTIONS)
        train(model, group.rank, range(4), optimizer, accumulate)
        with torch.no_grad():
            model(batch(0, 0))
        state = model.full_state_dict()
        held = sum(flat.full.untyped_storage().nbytes() for flat in model.flats())
        shards = sum(x.numel() for x in model.parameters())
        return state, held, shards, len(model.flats())

    expected = run_ranks(lambda group: parallel(group, 4, accumulate)[0], 3)[0]
    for state, held, shards, count in run_ranks(run, 3):
        assert state.keys() == expected.keys()
        if reentrant is None:
            assert same(state, expected)
        for name, x in state.items():
            torch.testing.assert_close(x, expected[name], msg=name)
        assert held == 0
        total = sum(x.numel() for x in Net().parameters())
        assert total <= 3 * shards <= total + 3 * count


@pytest.mark.parametrize("units", UNITS)
def test_a_graph_that_is_kept_gives_the_same_gradients_again(units):
    def run(group: Any) -> Any:
        model = fully_shard(Net(), UNITS[units])
        loss = loss_of(model, group.rank, 0)
        loss.backward(retain_graph=True)
        trained = [x for x in model.parameters() if x.requires_grad]
        once = [x.grad.clone() for x in trained]
        loss.backward()
        return once, [x.grad for x in trained]

    once, twice = run_local(run, 2)[0]
    torch.testing.assert_close(twice, [2 * x for x in once])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.ASGD, torch.optim.AdamW])
@pytest.mark.parametrize("count", [1, 3])
def test_numbers_in_an_optimizers_state_stay_numbers(kind, count):
    """Beside a parameter that is a number itself."""

    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.scale = nn.Parameter(torch.ones(count)), nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.weight * x).sum() * self.scale

    model = fully_shard(Product())
    optimizer = kind(model.parameters(), lr=0.1)
    model(torch.ones(count)).backward()
    optimizer.step()
    whole = full_optim_state_dict(model, optimizer, rank0_only=False)
    (again,) = shard_full_optim_state_dict(whole, model)["state"].values()
    (state,) = optimizer.state.values()
    torch.testing.assert_close(again, dict(state))


def test_a_whole_state_has_the_names_of_the_plain_modules_state():
    """A shared parameter has all its names; a buffer that is not persistent has none."""

    class Stateful(nn.Module):
        def get_extra_state(self) -> torch.Tensor:
            return torch.zeros(1)

    def made() -> nn.Module:
        net = Net()
        net.register_buffer("scratch", torch.ones(3), persistent=False)
        net.register_buffer("alias", net.offset)
        net.more = Stateful()
        return net

    def run(group: Any) -> Any:
        model = fully_shard(made(), nn.Sequential)
        state = model.full_state_dict()
        model.load_full_state_dict({name: 2 * x for name, x in state.items()})
        return state, model.full_state_dict()

    expected = made().state_dict()
    del expected["more._extra_state"]
    for state, doubled in run_local(run, 2):
        torch.testing.assert_close(state, dict(expected))
        torch.testing.assert_close(doubled, {name: 2 * x for name, x in expected.items()})


@pytest.mark.ranks(2, strict=False)
def test_whole_parameters_and_gradients_may_have_a_lower_precision(world: Any):
    model = fully_shard(
        Net(), nn.Sequential, param_dtype=torch.bfloat16, reduce_dtype=torch.float32
    )
    kinds = {flat.full.dtype for flat in model.flats()}
    first = loss_of(model, world.rank, 0).item()
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIONS)
    train(model, 0, range(12), optimizer)
    assert (kinds, ({x.dtype for x in model.parameters()})) == ({torch.bfloat16}, {torch.float32})
    assert loss_of(model, 0, 3).item() < first


def test_a_whole_state_loads_into_other_units_on_another_number_of_ranks():
    def save(group: Any) -> Any:
        model = fully_shard(Net(), nn.Sequential)
        optimizer = torch.optim.AdamW(model.parameters(), **OPTIONS)
        train(model, group.rank * 0, range(2), optimizer)
        whole = full_optim_state_dict(model, optimizer)
        everywhere = full_optim_state_dict(model, optimizer, rank0_only=False)
        return model.full_state_dict(), whole, everywhere

    def resume(group: Any, state: Any, whole: Any, scatter: bool) -> Any:
        model = fully_shard(Net(), UNITS["several"])
        model.load_full_state_dict(state)
        optimizer = torch.optim.AdamW(model.parameters(), lr=9.0)
        if scatter:
            own = scatter_full_optim_state_dict(whole if group.rank == 0 else None, model)
        else:
            own = shard_full_optim_state_dict(whole, model)
        optimizer.load_state_dict(own)
        train(model, 0, range(2, 4), optimizer)
        return model.full_state_dict()

    (state, whole, everywhere), (_, nothing, other) = run_local(save, 2)
    assert nothing == {}
    assert whole["state"].keys() == everywhere["state"].keys() == other["state"].keys()
    expected, _ = run_local(lambda group: parallel(group, 4), 1)[0]
    for scatter in (False, True):
        columns = [state] * 3, [copy.deepcopy(whole) for _ in range(3)], [scatter] * 3
        for found in run_local(resume, 3, *columns):
            for name, x in found.items():
                torch.testing.assert_close(x, expected[name])
    numbered = rekey_optim_state_dict(whole, "id", Net())
    net = Net()
    net.load_state_dict(state)
    plain = torch.optim.AdamW(net.parameters(), lr=9.0)
    plain.load_state_dict(numbered)
    for step in range(2, 4):
        loss_of(net, 0, step).backward()
        plain.step()
        plain.zero_grad()
    for name, x in net.state_dict().items():
        torch.testing.assert_close(x, expected[name])


def test_the_state_of_a_plain_optimizer_goes_on_in_shards_and_back():
    def run(group: Any, saved: Any, state: Any) -> Any:
        model = fully_shard(Net(), nn.Sequential)
        model.load_full_state_dict(state)
        optimizer = torch.optim.AdamW(model.parameters(), lr=9.0)
        named = rekey_optim_state_dict(saved, "name", model)
        optimizer.load_state_dict(shard_full_optim_state_dict(named, model))
        back = full_optim_state_dict(model, optimizer, rank0_only=False)
        train(model, 0, range(2, 4), optimizer)
        return back["state"], model.full_state_dict()

    state, plain = run_local(lambda group: parallel(group, 2), 1)[0]
    expected, _ = run_local(lambda group: parallel(group, 4), 1)[0]
    saved = plain.state_dict()
    named = rekey_optim_state_dict(saved, "name", Net())["state"]
    for back, found in run_local(run, 2, [saved] * 2, [state] * 2):
        for name, row in named.items():
            assert all(torch.equal(row[key], back[name][key]) for key in row)
        for name, x in found.items():
            torch.testing.assert_close(x, expected[name])


@pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed")
def test_torchs_checkpoint_files_hold_whole_states_and_give_them_back(tmp_path):
    def run(group: Any) -> Any:
        model = fully_shard(Net(), nn.Sequential)
        optimizer = torch.optim.AdamW(model.parameters(), **OPTIONS)
        train(model, group.rank, range(1), optimizer)
        return {"model": model.full_state_dict(), **full_optim_state_dict(model, optimizer)}

    saved = run_local(run, 2)[0]
    torch.save(saved, tmp_path / "a.pt")
    torch_save_to_dcp(tmp_path / "a.pt", tmp_path / "files")
    dcp_to_torch_save(tmp_path / "files", tmp_path / "b.pt")
    back = torch.load(tmp_path / "b.pt")
    assert same(back["model"], saved["model"])
    assert back["param_groups"][0]["params"] == saved["param_groups"][0]["params"]
    assert all(same(row, saved["state"][name]) for name, row in back["state"].items())


@pytest.mark.ranks(2)
def test_mistakes_are_refused_before_anything_changes(world: Any):
    with pytest.raises(ValueError, match="nothing to divide"):
        fully_shard(nn.ReLU())
    model = fully_shard(Net(), nn.Sequential)
    state = model.full_state_dict()
    with pytest.raises(ValueError, match="offset: the module has the shape"):
        model.load_full_state_dict({k: x for k, x in state.items() if k != "offset"})
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIONS)
    train(model, 0, range(1), optimizer)
    whole = full_optim_state_dict(model, optimizer, rank0_only=False)
    other = copy.deepcopy(whole)
    other["state"]["blocks.0.0.weight"]["exp_avg"] = torch.ones(2)
    other["state"]["blocks.0.0.weight"]["exp_avg_sq"] = torch.ones(2)
    with pytest.raises(ValueError, match=r"blocks.0.0.weight: .* the state the shape \(2,\)"):
        shard_full_optim_state_dict(other, model)
    with pytest.raises(ValueError, match=r"shape \(2,\)"):
        scatter_full_optim_state_dict(other if world.rank == 0 else None, model)
    other = copy.deepcopy(whole)
    other["state"]["blocks.0.0.weight"]["step"] += 1
    with pytest.raises(ValueError, match="differ in 'step'"):
        shard_full_optim_state_dict(other, model)
    with pytest.raises(ValueError, match="'name' or 'id'"):
        rekey_optim_state_dict(whole, "index", model)
