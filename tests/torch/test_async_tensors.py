"""AsyncCollectiveTensor: a torch.Tensor that waits when it is first used."""

import copy
import gc
import io
import pickle

import numpy as np
import pytest
import torch

import nc10d as dist
from nc10d.api.async_array import AsyncCollectiveArray
from nc10d.torch import functional as F
from nc10d.work import Future, Work


def deferred():
    """Return a result, and the Future that ends it."""
    future = Future()
    pending = AsyncCollectiveArray(torch.arange(3.0), Work.from_future(future))
    return F.AsyncCollectiveTensor(pending), future


def saved(x):
    memory = io.BytesIO()
    torch.save(x, memory)
    memory.seek(0)
    return torch.load(memory)


USES = {
    "operator": lambda a: a + 1,
    "reflected": lambda a: 1 - a,
    "function": lambda a: torch.stack([a, a]),
    "nested arguments": lambda a: torch.cat([torch.zeros(1), a]),
    "method": lambda a: a.sum(),
    "view": lambda a: a.view(3, 1),
    "index": lambda a: a[1:],
    "item": lambda a: torch.tensor(a[1].item()),
    "in place": lambda a: a.add_(1),
    "assignment": lambda a: assigned(a),
    "as an output": lambda a: torch.add(torch.ones(3), 1, out=a),
    "numpy": lambda a: torch.from_numpy(a.numpy()),
    "asarray": lambda a: torch.from_numpy(np.asarray(a)),
    "tolist": lambda a: torch.tensor(a.tolist()),
    "dlpack": torch.from_dlpack,
    "address": lambda a: torch.tensor(a.data_ptr() != 0),
    "pickle": lambda a: pickle.loads(pickle.dumps(a)),
    "save": saved,
    "deep copy": copy.deepcopy,
    "copy": copy.copy,
    "print": lambda a: torch.tensor(len(str(a))),
    "to": lambda a: a.to(torch.float64),
    "detach": lambda a: a.detach(),
    "another call's input": lambda a: torch.tensor(dist.as_buffer(a).count),
    "wait_tensor": F.wait_tensor,
}


ITSELF = {"in place", "as an output"}


def assigned(a):
    a[0] = 5
    return a + 0


@pytest.mark.parametrize("use", USES)
def test_a_result_waits_when_it_is_used_and_gives_plain_tensors(use):
    a, future = deferred()
    assert isinstance(a, torch.Tensor)
    assert (a.shape, a.dtype, a.device.type, a.numel()) == ((3,), torch.float32, "cpu", 3)
    assert not a.completed
    assert not a.requires_grad
    future.set_exception(LookupError("used"))
    with pytest.raises(LookupError, match="used"):
        USES[use](a)
    b, future = deferred()
    future.set_result(None)
    found, expected = USES[use](b), USES[use](torch.arange(3.0))
    assert found is b if use in ITSELF else type(found) is torch.Tensor
    if use == "print":
        assert str(b) == f"AsyncCollectiveTensor({torch.arange(3.0)})"
    else:
        assert torch.equal(found, expected)


@pytest.mark.ranks(2, strict=False)
@pytest.mark.filterwarnings("ignore")
def test_results_of_a_call_are_asynchronous_and_pass_through_calls_and_graphs(world):
    torch._dynamo.reset()
    x = torch.ones(3) + world.rank
    a = F.all_reduce(x, "sum")
    assert type(a) is F.AsyncCollectiveTensor
    b = F.all_reduce(F.all_reduce(a, "max"), "sum")
    dist.all_reduce(F.all_gather_tensor(a, 0))
    objects = [b if world.rank == 0 else None]
    dist.broadcast_object_list(objects)
    compiled = torch.compile(lambda y: y + 1, backend="aot_eager", fullgraph=True)
    assert b.tolist() == [6.0] * 3
    assert objects[0].tolist() == [6.0] * 3
    assert compiled(F.all_reduce(x, "sum")).tolist() == [4.0] * 3


@pytest.mark.ranks(2, strict=False)
def test_a_dropped_result_does_not_wait_for_peers(world):
    x, told = torch.ones(3), torch.zeros(1)
    if world.rank == 0:
        F.all_reduce(x, "sum")
        gc.collect()
        world.send(told, 1)
    else:
        world.recv(told, 0)
        F.wait_tensor(F.all_reduce(x, "sum"))
    assert F.all_reduce(x, "sum").tolist() == [2.0] * 3
