"""A fully sharded module trains as with DistributedDataParallel, and holds its part alone."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

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


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("units", UNITS)
def test_parameters_are_those_of_data_parallel_training(units, accumulate):
    def run(group: Any) -> Any:
        model = fully_shard(Net(), UNITS[units])
        optimizer = torch.optim.AdamW(model.parameters(), **OPTIONS)
        train(model, group.rank, range(4), optimizer, accumulate)
        with torch.no_grad():
            model(batch(0, 0))
        state = model.full_state_dict()
        held = sum(flat.full.untyped_storage().nbytes() for flat in model.flats())
        shards = sum(x.numel() for x in model.parameters())
        return state, held, shards, len(model.flats())

    expected = run_local(lambda group: parallel(group, 4, accumulate)[0], 3)[0]
    for state, held, shards, count in run_local(run, 3):
        assert state.keys() == expected.keys()
        assert same(state, expected)
        assert held == 0
        total = sum(x.numel() for x in Net().parameters())
        assert total <= 3 * shards <= total + 3 * count


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("units", UNITS)
def test_checkpoints_change_nothing(units, accumulate, reentrant):
    """Also around layers whose parameters belong to no unit."""

    def run(group: Any) -> Any:
        model = fully_shard(Net(reentrant), UNITS[units])
        optimizer = torch.optim.AdamW(model.parameters(), **OPTIONS)
        train(model, group.rank, range(4), optimizer, accumulate)
        held = sum(flat.full.untyped_storage().nbytes() for flat in model.flats())
        return model.full_state_dict(), held

    expected = run_local(lambda group: parallel(group, 4, accumulate)[0], 2)[0]
    for state, held in run_local(run, 2):
        assert held == 0
        for name, x in state.items():
            torch.testing.assert_close(x, expected[name], msg=name)


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


class Block(nn.Module):
    """A unit whose parameters are read by elements, under a checkpoint, and behind a kept loss."""

    def __init__(self, inner: bool | None) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
        self.first, self.last, self.inner = nn.Linear(4, 6), nn.Linear(6, 4), inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        self.loss = (x * self.shift).square().sum()

        def body(x: torch.Tensor) -> torch.Tensor:
            return self.last(torch.tanh(self.first(x)))

        return x + (
            body(x) if self.inner is None else checkpoint(body, x, use_reentrant=self.inner)
        )


class Blocks(nn.Module):
    """Three blocks, the first two under one checkpoint.

    `deep` selects whether the third gets the second's output or the first's.
    """

    def __init__(self, inner: bool | None, outer: bool | None, deep: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(inner) for _ in range(3))
        self.outer, self.deep = outer, deep
        for x in self.parameters():
            x.data.copy_(torch.linspace(-1, 1, x.numel()).view(x.shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def both(x: torch.Tensor) -> Any:
            x = self.blocks[0](x)
            return x, self.blocks[1](x)

        pair = both(x) if self.outer is None else checkpoint(both, x, use_reentrant=self.outer)
        return self.blocks[2](pair[self.deep])


def losses(module: nn.Module, output: torch.Tensor, x: torch.Tensor, kind: str) -> torch.Tensor:
    loss = output.square().sum()
    if kind == "kept":
        return loss + module.blocks[2].loss + module.blocks[0].loss
    if kind == "penalty":
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + slope.square().sum()
    return loss


def input_of(rank: int) -> torch.Tensor:
    return (torch.linspace(-1, 1, 12).view(3, 4) + rank).requires_grad_()


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("units", [None, Block])
@pytest.mark.parametrize(
    ("inner", "outer", "kind"),
    [(inner, outer, "") for inner in (None, False, True) for outer in (None, False, True)]
    + [(inner, outer, "penalty") for inner in (None, False) for outer in (None, False)]
    + [(None, None, "kept"), (False, None, "kept"), (True, None, "kept")],
)
def test_memory_is_there_on_every_path_of_a_backward_pass(units, inner, outer, kind):
    """Freed weights are gathered for whatever reads them; gradients are a plain module's."""

    def run(group: Any, deep: bool, early_stop: bool) -> Any:
        model = fully_shard(Blocks(inner, outer, deep), units)
        for _ in range(2):
            for x in model.parameters():
                x.grad = None
            x = input_of(group.rank)
            with set_checkpoint_early_stop(early_stop):
                losses(model.module, model(x), x, kind).backward()
        held = sum(flat.full.untyped_storage().nbytes() for flat in model.flats())
        found = {}
        for flat in model.flats():
            own = flat.shard.grad
            found.update(flat.layout.split(flat.whole(flat.shard if own is None else own)))
        return found, held

    for deep in (False, True):
        module = Blocks(None, None, deep)
        for rank in range(2):
            x = input_of(rank)
            (losses(module, module(x), x, kind) / 2).backward()
        for early_stop in (False, True):
            found, held = run_local(run, 2, [deep] * 2, [early_stop] * 2)[0]
            assert held == 0
            for name, x in module.named_parameters():
                if x.grad is not None:
                    torch.testing.assert_close(found[name], x.grad, msg=name)


class Called(nn.Module):
    """Calls a block twice, its output being its next input, also under a checkpoint."""

    def __init__(self, inner: bool | None, outer: bool | None) -> None:
        super().__init__()
        self.block, self.outer = Block(inner), outer
        for x in self.parameters():
            x.data.copy_(torch.linspace(-1, 1, x.numel()).view(x.shape))

    def forward(self, x: torch.Tensor) -> Any:
        def both(x: torch.Tensor) -> Any:
            return self.block(self.block(x))

        return both(x) if self.outer is None else checkpoint(both, x, use_reentrant=self.outer)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("inner", [None, False, True])
@pytest.mark.parametrize("outer", [None, False, True])
def test_a_unit_may_take_its_own_output(inner, outer):
    def run(group: Any) -> Any:
        model = fully_shard(Called(inner, outer), Block)
        model(input_of(group.rank)).square().sum().backward()
        found = {}
        for flat in model.flats():
            found.update(flat.layout.split(flat.whole(flat.shard.grad)))
        return found

    module = Called(None, None)
    for rank in range(2):
        (module(input_of(rank)).square().sum() / 2).backward()
    found = run_local(run, 2)[0]
    for name, x in module.named_parameters():
        if x.grad is not None:  # a loss that is not used has no gradient
            torch.testing.assert_close(found[name], x.grad, msg=name)


class Prompt(nn.Module):
    """A unit whose output is its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(1.0, 4.0))

    def forward(self, x: torch.Tensor) -> Any:
        return [self.weight, x]


@pytest.mark.parametrize("units", [None, Prompt])
@pytest.mark.parametrize("grows", [False, True])
def test_a_unit_may_return_a_parameter(units, grows):
    def run(group: Any) -> Any:
        model = fully_shard(nn.Sequential(Prompt()), units)
        with torch.set_grad_enabled(grows):
            weight, x = model(torch.full((3,), 2.0))
        if grows:
            (weight * x).sum().backward()
            return weight.tolist(), [flat.whole(flat.shard.grad)[:3] for flat in model.flats()]
        return weight.tolist(), [torch.full((3,), 2.0)]

    for weight, (gradient,) in run_local(run, 2):
        assert weight == [1.0, 2.0, 3.0]
        assert gradient.tolist() == [2.0] * 3


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_hooks_that_compute_with_a_units_parameters_see_them():
    def made() -> nn.Module:
        layer = nn.utils.weight_norm(nn.Linear(4, 3))
        for x in layer.parameters():
            x.data.copy_(torch.linspace(-1, 1, x.numel()).view(x.shape))
        return nn.Sequential(layer)

    def run(group: Any) -> Any:
        return fully_shard(made(), nn.Linear)(torch.ones(1, 4)).tolist()

    assert run_local(run, 2) == [made()(torch.ones(1, 4)).tolist()] * 2


def test_a_graph_that_is_dropped_is_freed():
    """An output that its own node saves does not keep itself alive."""

    def run(group: Any) -> Any:
        model = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear)
        output = model(torch.ones(1, 4))
        alive = weakref.ref(output)
        del output
        gc.collect()
        return alive() is None

    assert run_local(run, 2) == [True] * 2


@pytest.mark.parametrize("again", [None, False, True])
def test_few_units_have_memory_at_a_time(again):
    """Also in the backward pass, and under a checkpoint around each unit or inside of it."""
    depth = 8

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block(again) for _ in range(depth))
            self.most = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                if again is None:
                    x = checkpoint(block, x, use_reentrant=False)
                else:
                    x = block(x)
                x.register_hook(self.look)
            return x

        def look(self, _: Any) -> None:
            sizes = [flat.full.untyped_storage().nbytes() for flat in self.flats]
            self.most = max(self.most, sum(size > 0 for size in sizes))

    def run(group: Any) -> int:
        model = fully_shard(Deep(), Block)
        model.module.flats = model.flats()
        for _ in range(2):  # units are gathered ahead from the second pass on
            model(input_of(group.rank)).sum().backward()
        return model.module.most

    assert max(run_local(run, 2)) <= 4


def test_a_pass_that_was_left_leaves_no_gradient():
    class Refuses(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, refuses: bool) -> torch.Tensor:
            ctx.refuses = refuses
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            if ctx.refuses:
                raise ValueError("on purpose")
            return gradient, None

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2, bias=False)
            self.layer.weight.data.copy_(torch.eye(2))

        def forward(self, x: torch.Tensor, refuses: bool) -> torch.Tensor:
            return self.layer(Refuses.apply(self.layer(x), refuses))

    def run(group: Any) -> Any:
        model = fully_shard(Twice(), nn.Linear)
        x = torch.ones(1, 2)
        with pytest.raises(ValueError, match="on purpose"):
            model(x, True).sum().backward()
        model(x, False).sum().backward()
        return model.flats()[0].shard.grad.tolist()

    assert run_local(run, 2) == [[2.0, 2.0]] * 2


def test_a_pass_that_was_announced_is_reduced_after_a_pass_that_is_not():
    def run(group: Any) -> Any:
        model = fully_shard(nn.Linear(1, 2, bias=False))
        first = model(torch.full((1, 1), 1.0 + group.rank))
        with model.no_sync():
            second = model(torch.full((1, 1), 10.0 + group.rank))
        (first + second).sum().backward()
        return model.flats()[0].shard.grad.item()

    assert run_local(run, 2) == [12.0] * 2


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("accumulates", [False, True])
def test_a_checkpoint_may_be_around_the_whole_model(reentrant, accumulates):
    def run(group: Any) -> Any:
        model = fully_shard(nn.Linear(1, 2, bias=False))
        for last in (False, True) if accumulates else (True,):
            x = torch.zeros(1, 1) + (1.0 + group.rank)
            with contextlib.nullcontext() if last else model.no_sync():
                checkpoint(model, x.requires_grad_(), use_reentrant=reentrant).sum().backward()
        return model.flats()[0].shard.grad.item()

    assert run_local(run, 2) == [3.0 if accumulates else 1.5] * 2


def test_an_evaluation_after_a_pass_that_was_left_announces_nothing():
    def run(group: Any) -> Any:
        model = fully_shard(nn.Linear(1, 2, bias=False))
        x = torch.ones(1, 1, requires_grad=True)
        x.register_hook(refuse)
        with pytest.raises(ValueError, match="on purpose"):
            model(x).sum().backward()
        with torch.no_grad():
            model(torch.ones(1, 1))
        with model.no_sync():
            model(torch.ones(1, 1)).sum().backward()
        return model.flats()[0].shard.grad

    assert run_local(run, 2) == [None] * 2


def refuse(_: Any) -> None:
    raise ValueError("on purpose")


def test_gradients_are_added_and_divided_in_the_precision_of_reductions():
    def run(group: Any) -> Any:
        model = fully_shard(
            nn.Linear(1, 3, bias=False), param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        )
        for value in (256.0, 1.0, 1.0):
            with model.no_sync():
                model(torch.full((1, 1), value)).sum().backward()
        model(torch.ones(1, 1)).sum().backward()
        return model.flats()[0].shard.grad.item()

    assert run_local(run, 3) == [259.0] * 3


def test_a_saved_tensor_that_was_changed_in_place_is_an_error():
    def run(group: Any) -> None:
        model = fully_shard(nn.Linear(3, 3), nn.Linear)
        x = torch.ones(2, 3)
        loss = model(x).sum()
        x.add_(1)
        with pytest.raises(RuntimeError, match=r"shape \(2, 3\) .* changed in place"):
            loss.backward()

    run_local(run, 2)


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

    def run(group: Any) -> Any:
        model = fully_shard(Product())
        optimizer = kind(model.parameters(), lr=0.1)
        model(torch.ones(count)).backward()
        optimizer.step()
        whole = full_optim_state_dict(model, optimizer, rank0_only=False)
        (again,) = shard_full_optim_state_dict(whole, model)["state"].values()
        (state,) = optimizer.state.values()
        return state, again

    for state, again in run_local(run, 2):
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


def test_ranks_of_the_engine_train_alike():
    def run(group: Any) -> Any:
        model = fully_shard(Net(), nn.Sequential)
        train(model, group.rank, range(3), torch.optim.AdamW(model.parameters(), **OPTIONS))
        return model.full_state_dict()

    expected = run_ranks(lambda group: parallel(group, 3)[0], 2)[0]
    assert all(same(state, expected) for state in run_ranks(run, 2))


def test_whole_parameters_and_gradients_may_have_a_lower_precision():
    def run(group: Any) -> Any:
        model = fully_shard(
            Net(), nn.Sequential, param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        )
        kinds = {flat.full.dtype for flat in model.flats()}
        first = loss_of(model, group.rank, 0).item()
        optimizer = torch.optim.AdamW(model.parameters(), **OPTIONS)
        train(model, 0, range(12), optimizer)
        return kinds, {x.dtype for x in model.parameters()}, first, loss_of(model, 0, 3).item()

    for kinds, own, first, last in run_local(run, 2):
        assert (kinds, own) == ({torch.bfloat16}, {torch.float32})
        assert last < first


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


def test_mistakes_are_refused_before_anything_changes():
    def run(group: Any) -> None:
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
            scatter_full_optim_state_dict(other if group.rank == 0 else None, model)
        other = copy.deepcopy(whole)
        other["state"]["blocks.0.0.weight"]["step"] += 1
        with pytest.raises(ValueError, match="differ in 'step'"):
            shard_full_optim_state_dict(other, model)
        with pytest.raises(ValueError, match="'name' or 'id'"):
            rekey_optim_state_dict(whole, "index", model)

    run_local(run, 2)
