"""Dispatch modes see torch's collectives on nc10d, and tensors that wrap others take them apart."""

import contextlib
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor, Replicate, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

import nc10d.torch

SIZE = 2
COUNT = 2
"""Elements of a rank's tensor."""
RANKS = {"world_size": SIZE, "kind": "processes"}


def start(group):
    nc10d.torch.as_torch_group()


class Log(TorchDispatchMode):
    """Notes the names of the operators of collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None):
        if operator.namespace == "c10d":
            self.seen.add(operator._opname)
        return operator(*args, **(kwargs or {}))


def of_list(call, count=SIZE):
    def make(tensor):
        outputs = [tensor(0.0) for _ in range(count)]
        call(outputs, tensor)
        return outputs

    return make


def of_one(call, rows=1):
    def make(tensor):
        output = tensor(7.0, rows)
        call(output, tensor)
        return output

    return make


def scatter(output, tensor):
    given = [tensor(float(r)) for r in range(SIZE)] if dist.get_rank() == 0 else None
    dist.scatter(output, given, 0)


def gather(tensor):
    outputs = [tensor(0.0) for _ in range(SIZE)] if dist.get_rank() == 0 else None
    dist.gather(tensor(3.0), outputs, 0)
    return outputs


def messages(tensor):
    if dist.get_rank() == 0:
        dist.send(tensor(3.0), 1)
        dist.isend(tensor(4.0), 1, tag=2).wait()
        return None
    named, tagged = tensor(0.0), tensor(0.0)
    late = dist.irecv(tagged, 0, tag=2)
    dist.recv(named, 0)
    late.wait()
    return named, tagged


def any_source(tensor):
    if dist.get_rank() == 0:
        dist.send(tensor(3.0), 1)
        return None
    output = tensor(0.0)
    return dist.recv(output), output


def asynchronous(output, tensor):
    dist.all_reduce(output, async_op=True).wait()


def coalesced(outputs, tensor):
    with dist._coalescing_manager():
        for x in outputs:
            dist.all_reduce(x)


CALLS = {
    "all_reduce": ("allreduce_", of_one(lambda x, _: dist.all_reduce(x, dist.ReduceOp.MAX))),
    "asynchronous": ("allreduce_", of_one(asynchronous)),
    "coalesced": ("allreduce_coalesced_", of_list(coalesced)),
    "broadcast": ("broadcast_", of_one(lambda x, _: dist.broadcast(x, 1))),
    "reduce": ("reduce_", of_one(lambda x, _: dist.reduce(x, 0))),
    "all_gather": ("allgather_", of_list(lambda xs, t: dist.all_gather(xs, t(3.0)))),
    "all_gather_into_tensor": (
        "_allgather_base_",
        of_one(lambda x, t: dist.all_gather_into_tensor(x, t(3.0)), SIZE),
    ),
    "reduce_scatter": (
        "reduce_scatter_",
        of_one(lambda x, t: dist.reduce_scatter(x, [t(float(r)) for r in range(SIZE)])),
    ),
    "reduce_scatter_tensor": (
        "_reduce_scatter_base_",
        of_one(lambda x, t: dist.reduce_scatter_tensor(x, t(3.0, SIZE))),
    ),
    "all_to_all": (
        "alltoall_",
        of_list(lambda xs, t: dist.all_to_all(xs, [t(float(r)) for r in range(SIZE)])),
    ),
    "all_to_all_single": (
        "alltoall_base_",
        of_one(lambda x, t: dist.all_to_all_single(x, t(3.0, SIZE)), SIZE),
    ),
    "scatter": ("scatter_", of_one(scatter)),
    "gather": ("gather_", gather),
    "messages": ({0: "send", 1: "recv_"}, messages),
    "any source": ({0: "send", 1: "recv_any_source_"}, any_source),
    "barrier": ("barrier", lambda _: dist.barrier()),
}


def plain(value, rows=1):
    return torch.arange(rows * COUNT) + value + 10 * dist.get_rank()


def other(value, rows=1):
    return -3 * plain(value, rows)


def pair(value, rows=1):
    return TwoTensor(plain(value, rows), other(value, rows))


def part(found, name):
    """Return what is found in each TwoTensor by this name."""
    if isinstance(found, (list, tuple)):
        return [part(x, name) for x in found]
    return getattr(found, name) if isinstance(found, TwoTensor) else found


def same(x, y):
    if isinstance(x, (list, tuple)):
        return len(x) == len(y) and all(map(same, x, y))
    return torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y


def seen_by_a_mode(group):
    wrong = []
    for name, (operator, call) in CALLS.items():
        expected = call(plain)
        with Log() as log:
            found = call(plain)
        seen = operator[group.rank] if isinstance(operator, dict) else operator
        if not same(found, expected) or log.seen != {seen}:
            wrong.append((name, log.seen, found, expected))
    return wrong


def test_a_mode_sees_the_operator_of_every_call(ranks):
    assert ranks.run(seen_by_a_mode) == [[]] * SIZE


def of_pairs(group):
    wrong = []
    for name, (_, call) in CALLS.items():
        first, second, both = call(plain), call(other), call(pair)
        if not (same(part(both, "a"), first) and same(part(both, "b"), second)):
            wrong.append((name, both, first, second))
    return wrong


def test_a_tensor_of_two_is_a_call_for_each_of_them(ranks):
    assert ranks.run(of_pairs) == [[]] * SIZE


def counted(group):
    with CommDebugMode() as mode:
        for _ in range(3):
            dist.all_reduce(plain(0.0))
        dist.broadcast(plain(0.0), 0)
    return mode.get_total_counts(), mode.get_comm_counts()[torch.ops.c10d.allreduce_]


def test_torchs_debug_mode_counts_calls(ranks):
    assert ranks.run(counted) == [(4, 3)] * SIZE


def beside_gloo(group):
    gloo = dist.new_group(backend="gloo")
    sums = []
    for mode in (contextlib.nullcontext(), Log()):
        x = plain(0.0)
        with mode:
            dist.all_reduce(x, group=gloo)
        sums.append(x.tolist())
    dist.destroy_process_group(gloo)
    return sums


def test_groups_of_gloo_stay_as_they_are(ranks):
    expected = (2 * torch.arange(COUNT) + 10.0).tolist()
    assert ranks.run(beside_gloo) == [[expected] * 2] * SIZE


def of_fake_tensors(group):
    with FakeTensorMode():
        x = torch.ones(COUNT)
        dist.all_reduce(x)
        return tuple(x.shape)


def test_fake_tensors_send_nothing(ranks):
    assert ranks.run(of_fake_tensors) == [(COUNT,)] * SIZE
    assert ranks.run(counted) == [(4, 3)] * SIZE


def refused(group):
    x = DTensor.from_local(torch.ones(COUNT), init_device_mesh("cpu", (SIZE,)), [Replicate()])
    with pytest.raises(TypeError, match="to_local"):
        dist.all_reduce(x)
    with (
        pytest.raises(TypeError, match=r"x\.to_local\(\)"),
        dist._coalescing_manager(async_ops=True),
    ):
        dist.send(x, 1 - dist.get_rank())


def test_a_tensor_whose_class_does_not_know_the_operator_is_refused(ranks):
    ranks.run(refused)
    assert ranks.run(counted) == [(4, 3)] * SIZE


GATHERS_OF_GLOO = """
import torch, torch.distributed as dist, nc10d.torch
dist.init_process_group("nc10d", store=dist.HashStore(), rank=0, world_size=1)
gloo = dist.new_group(backend="gloo")
gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
for _ in range(2000):
    gather(torch.zeros(4), torch.ones(4), group=gloo, async_op=True)
found = torch.zeros(2)
gather(found, torch.ones(2), group=gloo)
print(found.tolist())
"""


def test_gloos_gathers_beside_nc10d_end_while_gloo_drops_their_tensors():
    """Its threads need the GIL to drop them, and hold the lock that the next gather waits for."""
    command = [sys.executable, "-W", "ignore", "-c", GATHERS_OF_GLOO]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[1.0, 1.0]"
