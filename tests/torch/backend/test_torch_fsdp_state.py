"""The optimizer state of torch's FSDP (the first) on nc10d: whole, scattered, renamed, continued.

Every rank trains on the same batch, so a plain optimizer on one process is the reference.
"""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import OptimStateKeyType, StateDictType

import nc10d.torch

LAYERS = "first", "last", "unused"
TRAINED = {"first.weight", "first.bias", "last.weight", "last.bias"}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # torch warns of its own names
]


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(8, 16), torch.nn.Linear(16, 2)
        self.unused = torch.nn.Linear(3, 3)

    def forward(self, x):
        return self.last(torch.relu(self.first(x)))


class Noting(torch.optim.Adam):
    """Adam with a state that is no tensor."""

    def step(self, closure=None):
        super().step(closure)
        for row in self.state.values():
            row["note"] = "seen"


def net():
    torch.manual_seed(0)
    return Net()


def wrapped(group=None, units=LAYERS):
    module, options = net(), {"process_group": group, "device_id": torch.device("cpu")}
    for name in units:
        setattr(module, name, FSDP(getattr(module, name), **options))
    return FSDP(module, **options)


def train(model, optimizer, steps):
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def adam(model, kind=torch.optim.Adam):
    return kind(model.parameters(), lr=0.01)


def trained(make=net, kind=torch.optim.Adam, steps=2):
    model = make()
    optimizer = adam(model, kind)
    train(model, optimizer, steps)
    return model, optimizer


def continued(model, state, own, group=None):
    """Return whether training from parameters and a state goes on as on a single process."""
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        model.load_state_dict(state)
    optimizer = adam(model)
    optimizer.load_state_dict(own(model, optimizer))
    train(model, optimizer, 2)
    expected, _ = trained(steps=4)
    with FSDP.summon_full_params(model):
        pairs = zip(model.parameters(), expected.parameters(), strict=True)
        return all(torch.allclose(a, b, atol=1e-6) for a, b in pairs)


def scattered(group):
    model, optimizer = trained(wrapped)
    whole, state = FSDP.full_optim_state_dict(model, optimizer), model.state_dict()
    pair = dist.new_group([0, 1])

    def own(again, _, members=None):
        given = whole if group.rank == 0 else None
        return FSDP.scatter_full_optim_state_dict(given, again, group=members)

    same = continued(wrapped(), state, own)
    if group.rank < 2:
        same &= continued(wrapped(pair), state, lambda *given: own(*given, pair))
    return sorted(whole.get("state", ())), same


def sharded(group):
    model, optimizer = trained(wrapped, Noting)
    whole = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    again = wrapped()
    notes = {row["note"] for row in whole["state"].values()}
    own = FSDP.shard_full_optim_state_dict(whole, again)
    notes |= {row["note"] for row in own["state"].values()}
    same = continued(
        again, model.state_dict(), lambda *_: FSDP.shard_full_optim_state_dict(whole, again)
    )
    return sorted(whole["state"]), notes == {"seen"} and same


def several_groups(group):
    model = wrapped()
    first, *others = model.parameters()
    groups = [{"params": others, "lr": 0.1}, {"params": [first]}]
    optimizer = torch.optim.Adam(groups, lr=0.01)
    train(model, optimizer, 1)
    whole = FSDP.full_optim_state_dict(model, optimizer, optim_input=groups, rank0_only=False)
    rates = [(row["lr"], len(row["params"])) for row in whole["param_groups"]]
    single = adam(model)
    train(model, single, 1)
    given = model.parameters()  # a generator
    whole = FSDP.full_optim_state_dict(model, single, optim_input=given, rank0_only=False)
    return sorted(whole["state"]), rates == [(0.1, 4), (0.01, 2)]


def renamed(group):
    model, optimizer = trained(wrapped)
    plain, alone = trained()
    whole = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    numbered = FSDP.rekey_optim_state_dict(whole, OptimStateKeyType.PARAM_ID, plain)
    rows = alone.state_dict()["state"]
    same = numbered["state"].keys() == rows.keys() and all(
        torch.allclose(row[key], rows[i][key])
        for i, row in numbered["state"].items()
        for key in row
    )
    named = FSDP.rekey_optim_state_dict(alone.state_dict(), OptimStateKeyType.PARAM_NAME, plain)
    return sorted(named["state"]), same


def in_shards(group):
    model, optimizer = trained(wrapped)
    state = model.state_dict()
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        saved = FSDP.sharded_optim_state_dict(model, optimizer)

    def own(again, fresh):
        with FSDP.state_dict_type(again, StateDictType.SHARDED_STATE_DICT):
            return FSDP.flatten_sharded_optim_state_dict(saved, again, fresh)

    return sorted(saved["state"]), continued(wrapped(), state, own)


def other_units(group):
    model, optimizer = trained(wrapped)
    whole, state = FSDP.full_optim_state_dict(model, optimizer), model.state_dict()
    given = whole if group.rank == 0 else None

    def own(again, _):
        return FSDP.scatter_full_optim_state_dict(given, again)

    return sorted(TRAINED), continued(wrapped(units=("unused",)), state, own)


RANKS = {"world_size": 3, "kind": "processes", "timeout": 60}


def start(group):
    torch.set_num_threads(1)
    nc10d.torch.as_torch_group()


@pytest.mark.parametrize(
    "program", [scattered, sharded, several_groups, renamed, in_shards, other_units]
)
def test_the_state_of_torchs_sharded_optimizer_is_that_of_the_plain_one(ranks, program):
    for rank, (names, holds) in enumerate(ranks.run(program)):
        assert holds
        assert set(names) == TRAINED or (rank and program is scattered and names == [])
