"""Tensors around other tensors in ordinary calls: a TypeError that leaves both of them unchanged.

A functional call hands such a tensor to its own type, which may know the operators.
"""

import pytest
import torch
import torch.distributed as torch_dist
from torch.distributed.tensor import DTensor, Replicate, init_device_mesh
from torch.testing._internal.two_tensor import TwoTensor

import nc10d as dist
from nc10d.torch import functional as F

TWICE = dist.premul_sum(2.0)
"""A reduction that changes its input in a world of one rank, too."""


@pytest.fixture(scope="module", autouse=True)
def alone():
    dist.init_process_group(rank=0, world_size=1, store=dist.HashStore())
    torch_dist.init_process_group("gloo", rank=0, world_size=1, store=torch_dist.HashStore())
    yield
    torch_dist.destroy_process_group()
    dist.destroy_process_group()


def distributed():
    inner = torch.ones(4)
    mesh = init_device_mesh("cpu", (1,))
    return DTensor.from_local(inner, mesh, [Replicate()]), [inner]


def parameter():
    x, inner = distributed()
    return torch.nn.Parameter(x), inner


def pair():
    inner = [torch.ones(4), torch.ones(4)]
    return TwoTensor(*inner), inner


WRAPPERS = {"DTensor": distributed, "parameter": parameter, "TwoTensor": pair}
CALLS = {
    "all_reduce": lambda x: dist.all_reduce(x, TWICE),
    "asynchronous": lambda x: dist.all_reduce(x, TWICE, async_op=True),
    "into a result": lambda x: dist.all_reduce(torch.zeros(4), TWICE, out=x),
    "of a group": lambda x: dist.get_default_group().all_reduce(x, TWICE),
    "broadcast": lambda x: dist.broadcast(x, 0),
    "gathered": lambda x: dist.all_gather([torch.zeros(4)], x),
    "a gather's output": lambda x: dist.all_gather([x], torch.zeros(4)),
    "reduce_scatter": lambda x: dist.reduce_scatter_tensor(x, torch.zeros(4), TWICE),
    "all_to_all": lambda x: dist.all_to_all_single(x, torch.zeros(4)),
    "several": lambda x: dist.all_reduce_coalesced([torch.zeros(4), x], TWICE),
    "object": lambda x: dist.all_gather_object([None], x),
    "arrays as results": lambda x: dist.functional.all_reduce(x, TWICE),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_an_ordinary_call_refuses_a_wrapper_and_touches_nothing(wrapper, call):
    x, inner = WRAPPERS[wrapper]()
    with pytest.raises((TypeError, dist.CodecError), match=r"to_local|register the type"):
        CALLS[call](x)
    assert all(part.tolist() == [1] * 4 for part in inner)


def test_a_functional_call_is_for_the_wrapper_to_take_or_to_refuse():
    x, _ = pair()
    found = F.all_reduce(x, TWICE)
    assert isinstance(found, TwoTensor)
    assert found.a.tolist() == found.b.tolist() == [2] * 4
    with pytest.raises(NotImplementedError, match="sharding strategy"):
        F.all_reduce(distributed()[0], TWICE)
