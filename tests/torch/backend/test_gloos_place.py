"""nc10d in gloo's place: a program that names gloo, unchanged, runs on nc10d with gloo's bits."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from nc10d.base.torch_registration import GloosPlace

PROGRAM = """
import logging
import sys

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroupGloo
from torch.distributed.device_mesh import init_device_mesh

logging.basicConfig(level=logging.DEBUG if "--debug" in sys.argv else logging.WARNING)
dist.init_process_group("gloo")
rank = dist.get_rank()
world = dist.group.WORLD
assert "nc10d" in sys.modules, "torch found nothing that makes groups of nc10d"
import nc10d.torch
from nc10d.torch.backend.torch_versions import PYTHON_BACKENDS, SELF_RECORDING

# Every way by which a program asks torch for gloo.
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("all",))
groups = [world, dist.new_group(backend="gloo"), dist.new_group([0, 1], backend="cpu:gloo")]
groups += [dist.new_group([1, 0]), mesh.get_group(), dist.new_subgroups(2, backend="gloo")[0]]
if not PYTHON_BACKENDS:
    groups.append(dist.new_group(backend="cpu:gloo,cuda:nccl"))
torch.manual_seed(rank)
x = torch.randn(10_000)
names = set()
for group in groups:
    names.add(dist.get_backend(group))
    assert nc10d.torch.group_of(group).size() == 2
    assert isinstance(group._get_backend(torch.device("cpu")), ProcessGroupGloo)
    y = x.clone()
    dist.all_reduce(y, group=group)
    objects = [None, None]
    dist.all_gather_object(objects, {"rank": rank}, group=group)
    assert objects == [{"rank": 0}, {"rank": 1}]
assert names <= {"gloo", "cpu:gloo", "cpu:gloo,cuda:nccl"}, names
assert world.name() == "gloo"
dist.monitored_barrier()

# gloo's own bits, by torch's class.
store = dist.distributed_c10d._get_default_store()
real = ProcessGroupGloo.theirs(dist.PrefixStore("real", store), rank, 2)
z = x.clone()
real.allreduce([z]).wait()
assert torch.equal(y, z)
assert isinstance(real, ProcessGroupGloo)

# As vLLM and torch's RPC make groups: by the class, without torch.distributed's functions.
for name in "first", "second":
    own = ProcessGroupGloo(dist.PrefixStore(name, store), rank, 2)
    assert hasattr(own, "nc10d_group") == PYTHON_BACKENDS
    group = dist.ProcessGroup(dist.PrefixStore(name, store), rank, 2)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    own._set_sequence_number_for_group()
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, own)
    y = x.clone()
    group.allreduce([y]).wait()
    assert torch.equal(y, z)
    group.broadcast(y, root=1).wait()
for arguments, wrong in (("x", 0, 2), TypeError), ((store, 2, 2), ValueError):
    try:
        PYTHON_BACKENDS and ProcessGroupGloo(*arguments)
    except wrong as error:
        assert str(error).startswith("ProcessGroupGloo: ")
    else:
        assert not PYTHON_BACKENDS, arguments

# torch's DDP, whose C++ code takes a group that is named gloo for gloo's class; torch's profile.
with torch.profiler.profile() as profile:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    model(x[:4]).sum().backward()
    dist.all_reduce(y)
assert world.name() == dist.get_backend() == "gloo"
events = {event.name for event in profile.events()}
assert "gloo:all_reduce" in events, events
if SELF_RECORDING:
    assert b"all_reduce" in torch._C._distributed_c10d._dump_fr_trace_json(backend="gloo")
dist.destroy_process_group()
print("done")
"""


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=200)


def test_a_program_that_names_gloo_runs_on_nc10d(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    launcher = ["-m", "nc10d.run", "--nproc-per-node", "2", "--as-gloo"]
    ended = run(*launcher, program, "--debug")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("done") == 2
    assert "group '0', rank 0 of 2: nc10d in gloo's place" in ended.stderr


def test_without_the_variable_gloo_is_gloo() -> None:
    assert not isinstance(dist.ProcessGroupGloo, GloosPlace)


@pytest.mark.slow
def test_replacing_gloo_twice_replaces_it_once() -> None:
    script = """
import torch.distributed as dist
import nc10d.torch
nc10d.torch.replace_gloo()
first = dist.ProcessGroupGloo
nc10d.torch.replace_gloo()
assert dist.ProcessGroupGloo is first
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
assert nc10d.torch.group_of().size() == 1
"""
    ended = run("-c", script)
    assert ended.returncode == 0, ended.stderr
