"""A compiled function calls nc10d as Python does: calls are graph breaks, and stay uncompiled.

test_functional_graphs has the calls that a graph may have, and those that it may not.
"""

import inspect
import subprocess
import sys

import pytest
import torch

import nc10d as dist
from nc10d import functional
from nc10d.torch import DistributedDataParallel

CALLS = {
    "future": lambda x: dist.all_reduce(x, async_op=True).get_future().then(lambda f: 1).wait(),
    "functional": lambda x: x.copy_(functional.all_reduce(x, "sum") + 0),
    "functional in an operation": lambda x: torch.relu(functional.all_reduce(x, "max").wait()),
    "objects": lambda x: dist.all_gather_object([None], {"a": 1}),
    "queries": lambda x: x.add_(dist.get_rank() * dist.get_world_size()),
    "a new group": lambda x: dist.all_reduce(x, group=dist.new_group([0])),
    "a mesh": lambda x: dist.all_reduce(x, group=dist.init_device_mesh("cpu", (1,)).get_group()),
    "store": lambda x: dist.HashStore().set("a", "b"),
}


@pytest.fixture
def alone():
    """A world of one rank, and no compiled code of other tests."""
    dist.init_process_group(rank=0, world_size=1, store=dist.HashStore())
    torch._dynamo.reset()
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")  # of the compiler's
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_compiled_function_may_make_any_call(alone, call):
    @torch.compile(backend="eager")
    def step(x):
        y = x * 2
        call(y)
        return y + 1

    for _ in range(2):  # cold and warm
        assert step(torch.ones(2)).tolist() == [3, 3]


@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_step_of_training_may_reduce_its_loss(world):
    torch._dynamo.reset()
    model = DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))

    @torch.compile(backend="eager")
    def step(x):
        loss = model(x).sum()
        shown = loss.detach().clone()
        world.all_reduce(shown)
        return loss, shown

    loss, shown = step(torch.ones(1, 2))
    loss.backward()
    assert shown.item() == loss.item()
    assert model.module.weight.grad.tolist() == [[1, 1]]


def test_every_public_call_is_marked_and_is_the_function_itself():
    """No wrapper stands around a call: its frames and its time are as without torch."""
    kinds = (dist.ProcessGroup, dist.Work, dist.Future, dist.TCPStore, dist.DeviceMesh)
    methods = [x for kind in kinds for _, x in inspect.getmembers(kind, inspect.isfunction)]
    calls = [getattr(dist, name) for name in dist.__all__]
    functions = [x for x in (*calls, *methods) if inspect.isfunction(x)]
    assert len(functions) > 150
    for function in functions:
        if function.__module__.startswith("nc10d."):
            assert function._torchdynamo_disable, function
            assert not hasattr(function, "_torchdynamo_orig_callable"), function


def test_the_compiler_is_loaded_by_users_of_it_alone():
    code = "import sys, nc10d.torch; print('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
