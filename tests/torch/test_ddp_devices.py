"""DistributedDataParallel on devices, as far as testable without a GPU: rules, inputs, slots.

The tests compare with torch's constructor on FakeTensors, which have a device but no memory. If
torch accepts the arguments, it fails later, when it allocates on the GPU.
"""

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from types import MappingProxyType

import pytest
import torch
import torch.distributed
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.utils import _recursive_to
from torch.nn.utils.rnn import pack_sequence

from nc10d.reducer import hooks
from nc10d.testing import run_local
from nc10d.torch import DistributedDataParallel, slots
from nc10d.torch.wrapped_module import moved, placement

MODULES = [("cpu",), ("cuda:0",), ("cuda:1", "cuda:1"), ("cuda:0", "cuda:1"), ("cpu", "cuda:0")]
IDS = [None, [], [0], [1], ["cuda:1"], [torch.device("cuda", 1)], [0, 1], ["cpu"]]
OUTPUTS = [None, 0, 1, "cuda:1"]


@pytest.fixture(scope="module", autouse=True)
def alone():
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def module_on(devices):
    found = torch.nn.Module()
    with FakeTensorMode():
        for index, device in enumerate(devices):
            found.register_parameter(f"p{index}", torch.nn.Parameter(torch.empty(2, device=device)))
    return found


def torchs(devices, device_ids, output_device):
    kind = torch.nn.parallel.DistributedDataParallel
    made = kind.__new__(kind)
    try:
        made.__init__(module_on(devices), device_ids, output_device, init_sync=False)
    except ValueError:
        return ValueError
    except NotImplementedError:
        pass  # no GPU memory here, but the arguments are accepted
    return made.device_ids, made.output_device


def ours(devices, device_ids, output_device):
    try:
        return tuple(placement(module_on(devices).parameters(), device_ids, output_device))
    except ValueError:
        return ValueError


@pytest.mark.parametrize("devices", MODULES, ids=",".join)
def test_devices_are_accepted_and_refused_as_by_torch(devices):
    cases = [(ids, output) for ids in IDS for output in OUTPUTS]
    wanted = [torchs(devices, *case) for case in cases]
    assert [ours(devices, *case) for case in cases] == wanted
    mixed = len({device.partition(":")[0] for device in devices}) > 1
    assert (len(set(map(str, wanted))) == 1) == mixed  # both outcomes occur


@pytest.mark.ranks(1)
def test_mistakes_raise_before_any_communication():
    for module in (torch.nn.Linear(2, 2, device="meta"), module_on(("cpu", "cuda:0"))):
        with pytest.raises(ValueError, match="on the CPU or on GPUs, all of it: it is on"):
            DistributedDataParallel(module)
    with pytest.raises(ValueError, match=r"got \[0\] and None for a module on cpu"):
        DistributedDataParallel(torch.nn.Linear(2, 2), device_ids=[0])
    assert True


Pair = namedtuple("Pair", ["x", "y"])


def test_inputs_are_moved_wherever_tensors_are_in_them():
    meta, x = torch.device("meta"), torch.ones(2)
    found = moved(([x, {"a": x}], Pair(x, 3), OrderedDict(b=(x,)), pack_sequence([x]), "s"), meta)
    [first, [second]], pair, ordered, packed, text = (
        [found[0][0], list(found[0][1].values())],
        *found[1:],
    )
    tensors = [first, second, pair.x, ordered["b"][0], packed.data]
    assert all(tensor.device == meta for tensor in tensors)
    assert (type(pair), pair.y, type(ordered), text) == (Pair, 3, OrderedDict, "s")
    assert type(found) is tuple


def channels_last(x):
    return x.to(memory_format=torch.channels_last)


@pytest.mark.parametrize("lay", [torch.clone, channels_last, lambda x: x.permute(1, 0, 3, 2)])
@pytest.mark.parametrize("same_layout", [True, False])
def test_the_reducer_copies_from_the_memory_of_a_gradient(lay, same_layout):
    """The gradient is passed in memory order if its strides match the slot's, else copied."""
    values = torch.arange(36.0).reshape(1, 4, 3, 3)
    x = torch.nn.Parameter(lay(torch.zeros(1, 4, 3, 3)))
    x.grad = lay(values) if same_layout else lay(values).contiguous().flip(0)
    expected = x.grad.clone()
    bucket = torch.zeros(36)
    slot = slots.OnDevice(x, bucket.reshape(x.shape))
    view, _ = slot.move(x, 2, False)
    assert (view is not None) == (x.grad.stride() == x.stride())
    if view is not None:
        assert view.is_contiguous()
        assert view.data_ptr() == x.grad.data_ptr()
        bucket.copy_(view.reshape(-1))
    assert torch.equal(slot.view, expected)
    bucket *= 2
    if view is not None:
        view.copy_(bucket.reshape(view.shape))
    copy = slot.give(x)
    assert (copy is None) == (view is not None)
    if copy is not None:
        copy[0].copy_(copy[1])
    assert torch.equal(x.grad, 2 * expected)


@pytest.mark.parametrize("hook", [None, hooks.fp16_compress_hook, hooks.bf16_compress_hook])
def test_hooks_see_buckets_that_are_tensors(monkeypatch, hook):
    monkeypatch.setattr(slots, "MOVED", {"cpu"})

    def run(group):
        model = DistributedDataParallel(torch.nn.Linear(3, 1, bias=False))
        if hook is not None:
            model.register_comm_hook(group, hook)
        for _ in range(2):
            model.zero_grad()
            model(torch.full((1, 3), 2.0 * group.rank)).sum().backward()
        assert all(type(x) is torch.Tensor for x in model.reducer.gradients)
        return model.module.weight.grad.tolist()

    assert run_local(run, 3) == [[[2.0] * 3]] * 3


class Either(torch.nn.Module):
    """Uses both of its layers, or only the first."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (torch.nn.Linear(2, 1, bias=False) for _ in range(2))

    def forward(self, x, both):
        return self.a(x) + self.b(x) if both else self.a(x)


def test_gradients_of_a_failed_pass_are_not_used_in_the_next_pass(monkeypatch):
    """A parameter that this rank does not use gets the mean of the ranks that use it."""
    monkeypatch.setattr(slots, "MOVED", {"cpu"})

    def run(group):
        failing = []

        def hook(group, bucket):
            if failing:
                raise KeyError("the hook's own")
            return hooks.allreduce_hook(group, bucket)

        model = DistributedDataParallel(Either(), find_unused_parameters=True)
        model.register_comm_hook(group, hook)
        x = torch.full((1, 2), 2.0)
        failing.append(True)
        with pytest.raises(KeyError):
            model(x, True).sum().backward()
        failing.clear()
        with pytest.raises(RuntimeError, match="exception has ended"):  # the pass is over now
            model(x, True)
        model.zero_grad(set_to_none=False)
        model(x, group.rank == 1).sum().backward()
        return model.module.b.weight.grad.tolist()

    assert run_local(run, 2) == [[[1.0, 1.0]]] * 2


@pytest.mark.parametrize(
    "value",
    [
        UserDict(x=torch.ones(1)),
        MappingProxyType({"x": torch.ones(1)}),
        defaultdict(list),
        torch.Size([2]),
        ({"x": [torch.ones(1)]}, [], ()),
        OrderedDict(x=torch.ones(1)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_inputs_of_other_types_are_moved_as_by_torch(value):
    def kinds(x):
        inner = x.values() if isinstance(x, dict) else x if isinstance(x, (list, tuple)) else ()
        return type(x), getattr(x, "device", None), [kinds(tensor) for tensor in inner]

    meta = torch.device("meta")
    (wanted,) = _recursive_to(value, meta, False)
    assert kinds(moved(value, meta)) == kinds(wanted)
