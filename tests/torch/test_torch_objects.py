"""Object calls carry whatever a training program has: state dicts, sizes, dtypes, devices."""

import argparse
from typing import Any

import numpy as np
import pytest
import torch

import nc10d as dist
import nc10d.torch
from nc10d.codec import encode
from nc10d.errors import CodecError
from nc10d.testing import run_local

CONSTANTS = [
    torch.Size([2, 3]),
    torch.float32,
    torch.bfloat16,
    torch.device("cpu"),
    torch.device("cuda:1"),
    torch.strided,
    torch.channels_last,
]


def through(value: Any) -> Any:
    message = encode(value)
    return message.envelope().open(message.flat())


@pytest.mark.parametrize("value", CONSTANTS, ids=str)
def test_constants_of_torch_come_back_the_same(value: Any) -> None:
    back = through(value)
    assert back == value
    assert type(back) is type(value)


@pytest.mark.parametrize(
    ("value", "advice"),
    [
        (torch.nn.Linear(1, 1), r"send its state_dict\(\)"),
        (torch.optim.SGD([torch.zeros(1)], lr=1.0), r"send its state_dict\(\)"),
        (torch.Generator(), "register the type .*"),
    ],
    ids=["module", "optimizer", "generator"],
)
def test_another_object_of_torch_is_refused_with_advice(value: Any, advice: str) -> None:
    with pytest.raises(CodecError, match=f"can't be carried: {advice}, or call with allow_pickle"):
        encode(value)


def trained() -> tuple[Any, Any, Any]:
    """Return a module, its optimizer and its scheduler after a step."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 5])
    module(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    scheduler.step()
    return module, optimizer, scheduler


def test_state_dicts_of_a_training_load_on_the_other_rank() -> None:
    parts = trained()
    sent = {
        "args": argparse.Namespace(lr=0.1, shape=torch.Size([3])),
        "states": [part.state_dict() for part in parts],
        "rng": torch.get_rng_state(),
    }

    def body(group: dist.ProcessGroup) -> Any:
        places = [sent if group.rank == 0 else None]
        dist.broadcast_object_list(places, src=0)
        return places[0]

    got = run_local(body, 2)[1]
    assert got["args"] == sent["args"]
    assert torch.equal(got["rng"], sent["rng"])
    for part, state in zip(parts, got["states"], strict=True):
        part.load_state_dict(state)
    module, theirs = got["states"][0], sent["states"][0]
    assert type(module) is type(theirs)
    assert module._metadata == theirs._metadata
    assert [*module] == [*theirs]
    assert all(torch.equal(module[name], theirs[name]) for name in theirs)


SCHEDULERS = {
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, 2),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 5),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=9),
    "plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "cyclic": lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.1, 0.2, cycle_momentum=False),
}
OPTIMIZERS = ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Rprop", "ASGD", "NAdam", "LBFGS"]


@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_state_of_a_scheduler_travels(name: str) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9)
    scheduler = SCHEDULERS[name](optimizer)
    assert through(scheduler.state_dict()).keys() == scheduler.state_dict().keys()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_of_an_optimizer_travels(name: str) -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = getattr(torch.optim, name)([parameter])

    def loss() -> Any:
        optimizer.zero_grad()
        value = (parameter**2).sum()
        value.backward()
        return value

    optimizer.step(loss)
    optimizer.load_state_dict(through(optimizer.state_dict()))
    optimizer.step(loss)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 5000])
def test_a_frozen_parameter_stays_frozen(dtype: torch.dtype, count: int) -> None:
    frozen = torch.nn.Parameter(torch.ones(count, dtype=dtype), requires_grad=False)
    trainable = torch.nn.Parameter(torch.ones(count))
    first, second = through([frozen, trainable])
    assert (type(first), first.requires_grad) == (torch.nn.Parameter, False)
    assert (type(second), second.requires_grad) == (torch.nn.Parameter, True)
    assert torch.equal(first, frozen)


@pytest.mark.parametrize("state", [np.ones(2, np.int64), (), (1,), (np.ones(2), False)])
def test_a_forged_parameter_is_an_error(state: Any) -> None:
    from nc10d.codec.type_registry import codec_named

    with pytest.raises(CodecError):
        codec_named("torch.nn.Parameter").decode(state)


@pytest.mark.parametrize("name", ["torch.Tensor", "float33", 7])
def test_a_forged_constant_is_an_error(name: Any) -> None:
    from nc10d.codec.type_registry import codec_named

    with pytest.raises(CodecError):
        codec_named("torch.dtype").decode(name)


def sparse_tensors() -> dict[str, torch.Tensor]:
    dense = torch.tensor([[0.0, 2.0, 0.0, 1.0], [3.0, 0.0, 0.0, 4.0]])
    places = torch.tensor([[1, 0, 1], [2, 1, 2]])
    torch.sparse.check_sparse_tensor_invariants.enable()
    try:
        return {
            "coo": dense.to_sparse(),
            "doubled": torch.sparse_coo_tensor(places, torch.ones(3), (2, 4)),
            "hybrid": torch.sparse_coo_tensor(places[:1], torch.ones(3, 2), (2, 2)),
            "csr": dense.to_sparse_csr(),
            "csc": dense.to_sparse_csc(),
            "bsr": dense.to_sparse_bsr((2, 2)),
            "bsc": dense.to_sparse_bsc((2, 2)),
            "half": dense.bfloat16().to_sparse(),
        }
    finally:
        torch.sparse.check_sparse_tensor_invariants.disable()


@pytest.mark.parametrize("name", ["coo", "doubled", "hybrid", "csr", "csc", "bsr", "bsc", "half"])
@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta")
def test_sparse_tensors_come_back_the_same(name: str) -> None:
    value = sparse_tensors()[name]
    back = through({"x": value})["x"]
    assert (back.layout, back.dtype, back.shape) == (value.layout, value.dtype, value.shape)
    assert torch.equal(back.to_dense(), value.to_dense())
    if value.layout is torch.sparse_coo:
        assert back.is_coalesced() == value.is_coalesced()


@pytest.mark.parametrize(
    "state",
    [
        ("torch.sparse_coo", (2, 4), torch.tensor([[9], [0]]), torch.ones(1), True),
        ("torch.sparse_coo", (2, 4), torch.tensor([[1, 0], [0, 0]]), torch.ones(2), True),
        ("torch.sparse_csr", (2,), torch.tensor([0]), torch.tensor([0]), torch.ones(1)),
        ("torch.strided", (2,), torch.tensor([0]), torch.tensor([0]), torch.ones(1)),
    ],
    ids=["outside", "unsorted", "csr", "strided"],
)
@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta")
def test_parts_of_a_sparse_tensor_from_a_hostile_peer_are_an_error(state: Any) -> None:
    from nc10d.torch.tensors import _from_values, _values

    parts = tuple(_values(x) if isinstance(x, torch.Tensor) else x for x in state)
    with pytest.raises(CodecError):
        _from_values(parts)
