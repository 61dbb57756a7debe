"""A call on a tensor uses the memory of its values, or is a TypeError that leaves all unchanged."""

import gc
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor

import nc10d as dist
import nc10d.torch
from nc10d.testing import Ranks, run_ranks

RANKS = {"world_size": 3}


class Sub(torch.Tensor):
    """A subclass that adds nothing."""


class Loud(torch.Tensor):
    """A subclass that describes itself wrongly."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if "data_ptr" in str(function):
            return 12345
        return super().__torch_function__(function, types, args, kwargs or {})


class Wrapper(torch.Tensor):
    """A tensor around another, as distributed and asynchronous tensors are."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError(function)


def fake():
    with FakeTensorMode():
        return torch.ones(4)


def with_storage(nbytes, part=slice(None)):
    x = torch.ones(4)
    found = x[part]
    x.untyped_storage().resize_(nbytes)
    return found


def inside(transform):
    """Return a tensor as a function under a transform sees it."""
    seen = []
    transform(lambda x: (seen.append(x), x.sum())[1])(torch.ones(2, 3))
    return seen[0]


warned = pytest.mark.filterwarnings("ignore:torch.quantize|The PyTorch API of nested tensors")
parts = [torch.ones(2), torch.ones(3)]
REFUSED = {
    "several arrays": lambda: torch.eye(2).to_sparse(),
    "no such type.*|.*torch.qint8": lambda: torch.quantize_per_tensor(
        torch.ones(4), 1.0, 0, torch.qint8
    ),
    "FakeTensor has no memory": fake,
    "Wrapper has no memory": lambda: Wrapper(torch.ones(4)),
    "Sub has no memory": lambda: with_storage(0).as_subclass(Sub),
    "freed": lambda: with_storage(0),
    "freed or": lambda: with_storage(0, part=slice(1, 3)),
    "cut": lambda: with_storage(12),
    "freed or cut": lambda: with_storage(15, part=slice(None, None, 3)),
    "does not hold its elements": lambda: torch._efficientzerotensor(4),
    "does not hold": lambda: torch._to_functional_tensor(torch.ones(3)),
    "transform": lambda: inside(torch.vmap),
    "transform such": lambda: inside(torch.func.grad),
    "nested": lambda: torch.nested.nested_tensor(parts),
    "layout torch.jagged": lambda: torch.nested.nested_tensor(parts, layout=torch.jagged),
    "negative": lambda: torch.ones(2, dtype=torch.complex64).conj().imag.as_subclass(Sub),
    "no such type": lambda: torch.zeros(2, dtype=torch.float8_e4m3fnuz),
    "resolve_conj": lambda: torch.zeros(2, dtype=torch.complex64).conj(),
    "resolve_neg": lambda: torch.zeros(2, dtype=torch.complex64).conj().imag,
    "no backend for meta": lambda: torch.zeros(2, device="meta"),
    "elements must not share": lambda: torch.zeros(1).expand(3),
}


@pytest.mark.ranks(1, strict=False)
@warned
@pytest.mark.parametrize("reason", REFUSED)
def test_a_tensor_without_memory_of_its_values_is_refused(reason):
    x, out = REFUSED[reason](), torch.zeros(4)
    for mode in (False, True):
        with pytest.raises((TypeError, ValueError), match=reason):
            dist.all_reduce(x, async_op=mode)
        if "share" not in reason:
            with pytest.raises((TypeError, ValueError), match=reason):
                dist.all_gather([out], x, async_op=mode)
    assert out.tolist() == [0] * 4


@warned
@pytest.mark.parametrize(
    "reason",
    [r for r in REFUSED if not re.search("share|trans|several arrays", r)],  # sparse ones travel
)
def test_an_object_with_a_tensor_without_values_is_refused_with_the_reason(reason):
    def run(group):
        x = REFUSED[reason]()
        if type(x) not in (torch.Tensor, torch.nn.Parameter) or x.is_neg() or x.is_conj():
            return  # other types are not carried, and lazy tensors are resolved
        with pytest.raises(dist.CodecError, match="part of an object: "):
            dist.all_gather_object([None], [x])

    with Ranks(1) as one:
        one.run(run)


STEPS = {
    "conj": lambda x: x.conj(),
    "real or imaginary": lambda x: x.imag if x.is_complex() else x,
    "transpose": lambda x: x.t(),
    "every second": lambda x: x[::2],
    "bfloat16": lambda x: x if x.is_complex() else x.to(torch.bfloat16),
    "history": lambda x: x * x.detach().clone().requires_grad_() if not x.is_leaf else x,
    "needs a gradient": lambda x: x.requires_grad_() if x.is_leaf else x,
    "subclass": lambda x: x.as_subclass(Sub),
    "loud": lambda x: x.as_subclass(Loud),
    "parameter": lambda x: torch.nn.Parameter(x.detach()),
}


def gathers_or_refuses(group, steps):
    x = torch.complex(torch.arange(6.0), torch.arange(6.0) + 7).reshape(2, 3)
    for step in steps:
        x = STEPS[step](x)
    plain = x.detach().as_subclass(torch.Tensor)
    lazy, expected = plain.is_conj() or plain.is_neg(), plain.clone().resolve_conj().resolve_neg()
    out = [torch.zeros(expected.shape, dtype=expected.dtype) for _ in range(group.size)]
    if lazy:
        with pytest.raises(TypeError, match="resolve_"):
            dist.all_gather(out, x)
        expected = torch.zeros_like(expected)
    else:
        dist.all_gather(out, x)
    assert all(torch.equal(each, expected) for each in out)


@settings(deadline=None)
@given(steps=st.lists(st.sampled_from([*STEPS]), max_size=6))
def test_a_tensor_of_any_type_is_its_values_or_is_refused(ranks, steps):
    ranks.run(gathers_or_refuses, [steps] * 3)


@pytest.mark.ranks(2, strict=False)
def test_results_reach_the_memory_of_a_subclass():
    x = torch.ones(3, dtype=torch.bfloat16).as_subclass(Sub)
    y = torch.ones(3, requires_grad=True).as_subclass(Loud)
    for _ in range(3):
        dist.all_reduce(x)
        dist.all_reduce(y)
    work = dist.all_reduce(x, async_op=True)
    assert work.result()[0] is x
    assert (x.tolist(), y.tolist()) == ([16.0] * 3, [8.0] * 3)


@pytest.mark.ranks(2)
def test_an_asynchronous_tensor_of_torch_is_the_tensor_in_it():
    x = torch.ones(3)
    dist.all_reduce(AsyncCollectiveTensor(x))
    assert x.tolist() == [2.0] * 3


@pytest.mark.ranks(1)
def test_a_tensor_is_refused_though_its_address_had_a_longer_one():
    for _ in range(50):  # torch's allocator gives the same addresses again
        x = torch.ones(4)
        dist.all_reduce(x)
        x.untyped_storage().resize_(12)
        with pytest.raises(TypeError, match="cut"):
            dist.all_reduce(x)


@pytest.mark.ranks(2, strict=False)
def test_a_kept_block_follows_the_memory_of_its_tensors():
    x, y = torch.ones(1000), torch.ones(1000).as_subclass(Sub)
    z = bytearray(8)
    with dist.coalescing_manager() as block:
        for each in (x, y, z):
            dist.all_reduce(each)
    plan = block.plan()
    x.data, y.data = torch.full((1000,), 3.0), torch.full((1000,), 3.0)
    plan.launch()
    plan.launch()
    x.untyped_storage().resize_(0)
    with pytest.raises(TypeError, match="freed"):
        plan.launch()
    x.untyped_storage().resize_(4000)
    x.fill_(5)
    plan.launch()
    assert (x[0].item(), y[0].item()) == (10.0, 24.0)


def loses_its_storage(group):
    x = torch.ones(1_000_000)
    group.barrier()
    if group.rank == 0:
        work = dist.all_reduce(x, async_op=True)
        x.data = torch.zeros(1)
        gc.collect()
        group.store.set("moved", b"")
        work.wait()
        return x.tolist()
    group.store.wait(["moved"])
    dist.all_reduce(x)
    return x[:1].tolist()


def test_the_memory_of_an_operation_in_flight_outlives_its_tensor():
    assert run_ranks(loses_its_storage, 2) == [[0.0], [2.0]]


@pytest.mark.ranks(1, strict=False)
def test_a_lazy_negative_is_not_confused_with_the_tensor_of_its_memory():
    x = torch.zeros(1, dtype=torch.complex64)
    dist.all_reduce(torch.view_as_real(x)[:, 1])  # this memory is in the cache now
    with pytest.raises(TypeError, match="resolve_neg"):
        dist.all_reduce(x.conj().imag)
