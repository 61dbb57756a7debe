"""The backend comes by an entry point, ends without traces, and leaves a script its exit code."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TURNS = os.environ.get("TORCH_TURNS", "12")  # 200 in docs/torch.md

LIFE = """
import gc, os, sys, tempfile
import torch, torch.distributed as dist
import nc10d.torch
from nc10d.torch import stores

rank, folder, turns = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
x = torch.ones(2)

def begin(turn, below=False):
    place = {"init_method": f"file://{folder}/{turn}", "rank": rank, "world_size": 2}
    if below:
        nc10d.init_process_group(**place)
        nc10d.torch.as_torch_group()
    else:
        dist.init_process_group("nc10d", **place)

def traces():
    gc.collect()
    places = "/proc/self/fd", "/proc/self/task", tempfile.gettempdir()
    return [*(len(os.listdir(place)) for place in places), len(stores._kept)]

for turn in range(turns):
    begin(turn, below=turn % 3 == 0)
    pair = dist.new_group([0, 1])
    dist.all_reduce(x, group=pair)
    dist.all_reduce(x, async_op=True).get_future().wait()
    if turn % 2:
        dist.destroy_process_group(pair)
    dist.destroy_process_group()
    del pair
    if turn == 1:
        before = traces()
assert traces() == before, (traces(), before)
begin("last")
dist.barrier()
child = os.fork()
if not child:
    try:
        dist.barrier()
    except dist.DistBackendError:
        dist.destroy_process_group()
        os._exit(3)
assert os.waitpid(child, 0)[1] >> 8 == 3
dist.barrier()
if rank == 0:
    dist.shrink_group([1])
    dist.all_reduce(x)
    assert dist.get_world_size() == 1
    dist.destroy_process_group()
    nc10d.torch.init_process_group(f"file://{folder}/alone", rank=0, world_size=1)
sys.exit(5)
"""

SPAWNED = """
import os, sys
import torch, torch.distributed as dist, torch.multiprocessing
import nc10d.torch

def main(rank, folder):
    dist.init_process_group("nc10d", f"file://{folder}/meeting", rank=rank, world_size=2)
    assert dist.get_debug_level() == dist.DebugLevel.DETAIL
    x = torch.ones(2)
    dist.all_reduce(x)
    assert x.tolist() == [2.0, 2.0]
    try:
        dist.all_reduce(torch.ones(2 + rank))
    except dist.DistBackendError as error:
        os.write(1, f"rank {rank}: {error}\\n".encode())  # one write: two ranks share the pipe
        dist.destroy_process_group()
        return
    raise AssertionError("the calls differ")

if __name__ == "__main__":
    torch.multiprocessing.spawn(main, sys.argv[1:], nprocs=2)
"""

NEVER_WAITS = """
import sys
import torch, torch.distributed as dist
import nc10d.torch

rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("nc10d", f"file://{folder}/meeting", rank=rank, world_size=2)
pair = dist.new_group([0, 1])
pair.allreduce([torch.ones(3 + rank)])
dist.barrier()
if sys.argv[3] == "destroy":
    dist.destroy_process_group()
"""

ENTRY = """
import sys, torch
assert torch.distributed.Backend.NC10D == "nc10d"
claimed = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
assert torch.distributed.Backend.backend_capability["nc10d"] == claimed
print(*sorted(name for name in sys.modules if name.partition(".")[0] in ("nc10d", "numba")))
store = torch.distributed.HashStore()
torch.distributed.init_process_group("nc10d", rank=0, world_size=1, store=store)
torch.distributed.all_reduce(torch.ones(1))
"""


def python(*arguments, path=(), **variables):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*map(str, path), str(ROOT)])}
    environment |= variables
    command = [sys.executable, "-W", "error::ResourceWarning", *map(str, arguments)]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.slow
def test_a_group_leaves_no_traces_and_the_script_its_exit_code(tmp_path):
    script = tmp_path / "life.py"
    script.write_text(LIFE)
    own = tmp_path / "temporary"
    own.mkdir()
    both = [python(script, rank, tmp_path, TURNS, TMPDIR=str(own)) for rank in range(2)]
    outputs = [each.communicate(timeout=100 + 4 * int(TURNS)) for each in both]
    assert [each.returncode for each in both] == [5, 5], outputs


@pytest.mark.slow
def test_spawned_ranks_at_level_detail_name_calls_that_differ(tmp_path):
    script = tmp_path / "spawned.py"
    script.write_text(SPAWNED)
    dumps = tmp_path / "dumps"
    dumps.mkdir()
    process = python(script, tmp_path, TORCH_DISTRIBUTED_DEBUG="DETAIL", NC10D_DUMP_DIR=str(dumps))
    output, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    found = sorted(output.splitlines())
    assert [line[:6] for line in found] == ["rank 0", "rank 1"]
    assert all("count=2" in line and "count=3" in line for line in found), found
    assert len([*dumps.iterdir()]) == 2


def test_torch_finds_the_backend_without_an_import(tmp_path):
    found = tmp_path / "found-1.0.dist-info"
    found.mkdir()
    (found / "METADATA").write_text("Name: found\nVersion: 1.0\n")
    entry = "nc10d = nc10d.torch_entry:register"
    assert entry in (ROOT / "pyproject.toml").read_text().replace('"', "")
    (found / "entry_points.txt").write_text(f"[torch.backends]\n{entry}\n")
    process = python("-c", ENTRY, path=[tmp_path])
    output, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    base = ["nc10d.base", "nc10d.base.run_to_end", "nc10d.base.torch_registration"]
    assert output.split() == ["nc10d", *base, "nc10d.torch_entry"]


@pytest.mark.parametrize("end", ["destroy", "exit"])
def test_a_failure_that_nobody_waits_for_is_told_at_the_end(tmp_path, end):
    ranks = [python("-c", NEVER_WAITS, rank, tmp_path, end) for rank in (0, 1)]
    told = ""
    for rank in ranks:
        _, errors = rank.communicate(timeout=200)
        assert rank.returncode == 0, errors
        told += errors
    assert "rank 0 called all_reduce(dtype=float32, count=3" in told
