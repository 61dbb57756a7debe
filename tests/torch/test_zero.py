"""ZeroRedundancyOptimizer trains as the optimizer on a single process, with divided state."""

import copy
import pickle
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as distributed
from hypothesis import given, settings

import nc10d as dist
from nc10d.testing import run_local
from nc10d.torch import ZeroRedundancyOptimizer

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "adam": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01}),
    "fused": (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    "foreach": (torch.optim.AdamW, {"lr": 0.01, "foreach": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
    "adadelta": (torch.optim.Adadelta, {}),
    "rmsprop": (torch.optim.RMSprop, {"centered": True}),
    "rprop": (torch.optim.Rprop, {}),
    "adamax": (torch.optim.Adamax, {}),
    "nadam": (torch.optim.NAdam, {}),
    "radam": (torch.optim.RAdam, {}),
    "asgd": (torch.optim.ASGD, {}),
    "maximize": (torch.optim.SGD, {"lr": 0.1, "maximize": True}),
}


def values(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Return the same random tensor on every rank; ranks are threads with a common generator."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def params_of(shapes: list[tuple[int, ...]]) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(values(shape, i)) for i, shape in enumerate(shapes)]


def groups_of(params: list[Any], count: int) -> list[dict[str, Any]]:
    """Return the parameters in `count` groups with different options."""
    return [{"params": params[i::count], "lr": 0.02 * (i + 1)} for i in range(count)]


def set_gradients(params: list[Any], step: int) -> None:
    for i, x in enumerate(params):
        x.grad = values(tuple(x.shape), 1000 * step + i) if x.requires_grad else None


def train(optimizer: Any, params: list[Any], steps: range) -> None:
    for step in steps:
        set_gradients(params, step)
        optimizer.step()


def equal(found: list[Any], expected: list[Any]) -> bool:
    return all(map(torch.equal, found, expected))


def same(a: Any, b: Any) -> bool:
    """Return whether nested states are equal, bit by bit."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


shapes = st.lists(
    st.sampled_from([(), (1,), (7,), (3, 4), (2, 0), (4, 2, 3), (30,)]), min_size=1, max_size=9
)


@given(
    name=st.sampled_from(sorted(OPTIMIZERS)),
    shapes=shapes,
    world=st.integers(1, 4),
    groups=st.integers(1, 3),
    added=st.integers(0, 2),
    view=st.booleans(),
    frozen=st.sets(st.integers(0, 8), max_size=2),
)
@settings(max_examples=25, deadline=None)
def test_parameters_and_state_are_those_of_the_optimizer_on_one_process(
    name, shapes, world, groups, added, view, frozen
):
    kind, options = OPTIMIZERS[name]

    def build(make: Any) -> tuple[Any, list[Any]]:
        params = params_of(shapes)
        for i in frozen & {*range(len(params))}:
            params[i].requires_grad = False
        rows = groups_of(params, min(groups, len(params)))
        late = rows[len(rows) - min(added, len(rows) - 1) :]
        optimizer = make(rows[: len(rows) - len(late)])
        for row in late:
            optimizer.add_param_group(row)
        return optimizer, params

    def sharded(group: Any) -> Any:
        optimizer, params = build(
            lambda rows: ZeroRedundancyOptimizer(
                rows, kind, group, parameters_as_bucket_view=view, **options
            )
        )
        train(optimizer, params, range(2))
        for i in frozen & {*range(len(params))}:
            params[i].requires_grad = True
        train(optimizer, params, range(2, 4))
        optimizer.consolidate_state_dict(to=world - 1)
        state = optimizer.state_dict() if group.rank == world - 1 else None
        return [x.detach().clone() for x in params], state

    plain, expected = build(lambda rows: kind(rows, **options))
    train(plain, expected, range(2))
    for i in frozen & {*range(len(expected))}:
        expected[i].requires_grad = True
    train(plain, expected, range(2, 4))
    found = run_local(sharded, world)
    assert all(equal(params, expected) for params, _ in found)
    assert same(found[-1][1], plain.state_dict())


@pytest.mark.parametrize(("before", "after"), [(4, 3), (1, 4), (3, 1), (2, 2)])
@pytest.mark.parametrize("view", [False, True])
def test_a_state_continues_under_another_number_of_ranks(before, after, view):
    sizes = [(9,), (7, 2), (5,), (3,), (30,)]

    def make(group: Any, params: list[Any]) -> Any:
        return ZeroRedundancyOptimizer(
            groups_of(params, 2), torch.optim.AdamW, parameters_as_bucket_view=view, lr=0.01
        )

    def first(group: Any) -> Any:
        params = params_of(sizes)
        optimizer = make(group, params)
        train(optimizer, params, range(3))
        optimizer.consolidate_state_dict()
        places = [optimizer.state_dict() if group.rank == 0 else None]
        dist.broadcast_object_list(places, src=0)
        return [x.detach().clone() for x in params], places[0]

    def second(group: Any) -> Any:
        params = [torch.nn.Parameter(x.clone()) for x in saved[0]]
        optimizer = make(group, params)
        kept = copy.deepcopy(saved[1])
        optimizer.load_state_dict(saved[1])
        train(optimizer, params, range(3, 6))
        return [x.detach().clone() for x in params], same(kept, saved[1])

    saved = run_local(first, before)[0]
    expected = params_of(sizes)
    plain = torch.optim.AdamW(groups_of(expected, 2), lr=0.01)
    train(plain, expected, range(3))
    assert same(saved[1], plain.state_dict())
    train(plain, expected, range(3, 6))
    for params, unchanged in run_local(second, after):
        assert equal(params, expected)
        assert unchanged


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_a_rank_keeps_its_part_of_the_state_and_five_percent_more_at_most(world):
    layers = [torch.nn.TransformerEncoderLayer(32, 4, 64) for _ in range(6)]

    def run(group: Any) -> int:
        model = copy.deepcopy(torch.nn.Sequential(*layers))
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, group, lr=0.1)
        train(optimizer, list(model.parameters()), range(1))
        rows = optimizer.optim.state.values()
        return sum(x.nbytes for row in rows for x in row.values())

    held = run_local(run, world)
    assert max(held) <= (1 / world + 0.05) * sum(held)


def test_a_learning_rate_schedule_and_new_options_reach_every_share():
    def run(group: Any) -> Any:
        params = params_of([(3,), (4,), (5,)])
        optimizer = ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        for step in range(4):
            set_gradients(params, step)
            optimizer.step()
            schedule.step()
        optimizer.param_groups[0]["lr"] = 1.0
        train(optimizer, params, range(4, 5))
        return [x.detach().clone() for x in params], optimizer.param_groups[0]["initial_lr"]

    expected = params_of([(3,), (4,), (5,)])
    plain = torch.optim.SGD(expected, lr=0.1)
    for step, rate in enumerate([0.1, 0.05, 0.025, 0.0125, 1.0]):
        plain.param_groups[0]["lr"] = rate
        train(plain, expected, range(step, step + 1))
    for params, initial in run_local(run, 2):
        assert equal(params, expected)
        assert initial == 0.1


@pytest.mark.parametrize("view", [False, True])
def test_a_closure_is_called_and_its_loss_returned(view):
    def run(group: Any) -> Any:
        params = params_of([(3,), (4,)])
        optimizer = ZeroRedundancyOptimizer(
            params, torch.optim.SGD, parameters_as_bucket_view=view, lr=0.1
        )

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = sum((x * x).sum() for x in params)
            loss.backward()
            return loss

        losses = [optimizer.step(closure).item() for _ in range(3)]
        return losses, [x.detach().clone() for x in params]

    (first, params), (second, others) = run_local(run, 2)
    assert first == second
    assert first[0] > first[1] > first[2]
    assert equal(params, others)


def test_an_option_that_the_optimizer_adds_and_hooks_of_steps_and_states_are_seen():
    class Counting(torch.optim.SGD):
        def step(self, closure=None, note=None):
            super().step(closure)
            self.param_groups[0]["steps"] = self.param_groups[0].get("steps", 0) + 1
            note.append(closure)

    def run(group: Any) -> Any:
        params, notes, seen = params_of([(3,), (4,)]), [], []
        optimizer = ZeroRedundancyOptimizer(params, Counting, lr=0.1)
        optimizer.register_step_post_hook(lambda *_: seen.append("step"))
        optimizer.register_state_dict_post_hook(
            lambda _, state: seen.append(len(state["state"])) or {**state, "mark": 7}
        )
        optimizer.register_load_state_dict_pre_hook(
            lambda _, state: {k: v for k, v in state.items() if k != "mark"}
        )
        optimizer.register_load_state_dict_post_hook(lambda _: seen.append("loaded"))
        for _ in range(2):
            optimizer.step(note=notes)
        optimizer.consolidate_state_dict(to=group.rank * 0)
        if group.rank == 0:
            optimizer.load_state_dict(optimizer.state_dict())
        return optimizer.param_groups[0]["steps"], notes, seen

    first, second = run_local(run, 2)
    assert first == (2, [None, None], ["step", "step", 0, "loaded"])
    assert second == (2, [None, None], ["step", "step"])


def test_names_of_parameters_are_kept_in_the_whole_state():
    def run(group: Any) -> Any:
        model = torch.nn.Linear(3, 2)
        optimizer = ZeroRedundancyOptimizer(model.named_parameters(), torch.optim.SGD, lr=0.1)
        optimizer.consolidate_state_dict(to=1)
        return optimizer.state_dict()["param_groups"][0]["param_names"] if group.rank else None

    assert run_local(run, 2)[1] == ["weight", "bias"]


@pytest.mark.parametrize("view", [False, True])
def test_sparse_gradients_are_stepped_by_the_owner(view):
    def gradient(x: Any, step: int) -> Any:
        rows = torch.tensor([[step, step + 2]])
        return torch.sparse_coo_tensor(rows, values((2, 3), step), x.shape, check_invariants=True)

    def run(group: Any, kind: Any) -> Any:
        params = params_of([(6, 3), (5, 3), (4, 3)])
        optimizer = (
            ZeroRedundancyOptimizer(
                params, torch.optim.SparseAdam, parameters_as_bucket_view=view, lr=0.1
            )
            if kind == "zero"
            else torch.optim.SparseAdam(params, lr=0.1)
        )
        for step in range(2):
            for x in params:
                x.grad = gradient(x, step)
            optimizer.step()
        return [x.detach().clone() for x in params]

    (expected,) = run_local(run, 1, ["plain"])
    assert all(equal(params, expected) for params in run_local(run, 3, ["zero"] * 3))


@pytest.mark.parametrize("view", [False, True])
def test_parameters_in_other_dimension_orders_keep_their_strides(view):
    def run(group: Any) -> Any:
        params = [
            torch.nn.Parameter(values((2, 3, 4, 4), 0).to(memory_format=torch.channels_last)),
            torch.nn.Parameter(values((4, 5), 1).t()),
        ]
        strides = [x.stride() for x in params]
        optimizer = ZeroRedundancyOptimizer(
            params, torch.optim.SGD, parameters_as_bucket_view=view, lr=0.1
        )
        train(optimizer, params, range(2))
        return [x.detach().clone() for x in params], strides == [x.stride() for x in params]

    (expected, kept), *others = run_local(run, 3)
    assert kept
    assert all(equal(params, expected) and kept for params, kept in others)


@pytest.mark.ranks(2)
def test_bucket_views_share_memory_until_a_parameter_is_frozen():
    params = params_of([(4,), (4,), (4,), (4,)])
    optimizer = ZeroRedundancyOptimizer(
        params, torch.optim.SGD, parameters_as_bucket_view=True, lr=0.1
    )
    storages = {x.untyped_storage().data_ptr() for x in params}
    params[0].requires_grad = False
    train(optimizer, params, range(1))
    own = params[0].untyped_storage().nbytes()
    assert (len(storages), own) == (2, 16)


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("params", "kind"),
    [
        ([], ValueError),
        (torch.ones(1), TypeError),
        (1.5, TypeError),
        ([torch.ones(1), 42], TypeError),
        ([torch.sparse_coo_tensor(size=(2, 3), check_invariants=False)], ValueError),
        ([torch.ones(1), torch.ones(1, dtype=torch.float64)], ValueError),
    ],
    ids=["nothing", "a tensor", "a number", "no tensor in it", "sparse", "two types"],
)
def test_other_parameters_are_refused_before_anything_is_sent(params, kind):
    with pytest.raises(kind):
        ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=0.1)


@pytest.mark.ranks(1)
def test_mistakes_are_refused_and_change_nothing():
    params = params_of([(3,), (4,)])
    with pytest.raises(ValueError, match="couples all parameters"):
        ZeroRedundancyOptimizer(params, torch.optim.LBFGS)
    optimizer = ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match="single dense type"):
        optimizer.add_param_group({"params": [torch.ones(1, dtype=torch.float64)]})
    with pytest.raises(RuntimeError, match=r"consolidate_state_dict\(to=0\)"):
        optimizer.state_dict()
    with pytest.raises(ValueError, match=r"groups of \[1\] parameters, .* of \[2\]"):
        optimizer.load_state_dict({"state": {}, "param_groups": [{"params": [0], "lr": 1.0}]})
    assert len(optimizer.param_groups) == 1
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_a_pickle_goes_on_where_it_was_made_and_nowhere_else():
    def run(group: Any, *pickles: bytes) -> Any:
        if pickles:
            with pytest.raises(RuntimeError, match="the share of rank 0 of 2"):
                pickle.loads(pickles[0])
            return None
        params = params_of([(3,), (4,), (5,)])
        optimizer = ZeroRedundancyOptimizer(params, torch.optim.Adam, lr=0.1)
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
        train(optimizer, params, range(2))
        data = pickle.dumps((params, optimizer))
        copies = [pickle.loads(data), copy.deepcopy((params, optimizer))]
        for again in (*copies, (params, optimizer)):
            train(again[1], again[0], range(2, 4))
        return data, all(equal(again[0], params) for again in copies)

    (data, went_on), _ = run_local(run, 2)
    assert went_on
    run_local(run, 1, [data])


def test_it_takes_groups_of_torch_distributed_and_subgroups():
    store = distributed.HashStore()
    distributed.init_process_group("nc10d", store=store, rank=0, world_size=1)
    try:
        optimizer = ZeroRedundancyOptimizer(params_of([(2,)]), torch.optim.SGD, lr=0.1)
        assert optimizer.join_process_group is distributed.group.WORLD
        given = distributed.group.WORLD
        optimizer = ZeroRedundancyOptimizer(params_of([(2,)]), torch.optim.SGD, given, lr=0.1)
        assert optimizer.process_group is given
        with pytest.raises(TypeError, match="with the backend 'nc10d'"):
            ZeroRedundancyOptimizer(params_of([(2,)]), torch.optim.SGD, object(), lr=0.1)
    finally:
        distributed.destroy_process_group()

    def run(group: Any) -> Any:
        half = group.split_group([[0, 2], [1]])
        params = params_of([(3,), (4,)])
        optimizer = ZeroRedundancyOptimizer(params, torch.optim.SGD, half, lr=0.1)
        train(optimizer, params, range(2))
        place = (optimizer.rank, optimizer.global_rank, optimizer.world_size)
        return place, [x.detach().clone() for x in params]

    found = run_local(run, 3)
    assert [place for place, _ in found] == [(0, 0, 2), (0, 1, 1), (1, 2, 2)]
    assert all(equal(params, found[0][1]) for _, params in found)
