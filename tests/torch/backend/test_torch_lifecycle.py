"""The backend comes by an entry point, ends without traces, and leaves a script its exit code."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]

LIFE = """
import gc, os, sys, threading
import torch, torch.distributed as dist
import nc10d.torch

rank, folder = int(sys.argv[1]), sys.argv[2]
x = torch.ones(2)

def begin(turn):
    dist.init_process_group("nc10d", f"file://{folder}/{turn}", rank=rank, world_size=2)

def traces():
    gc.collect()
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

for turn in range(12):
    begin(turn)
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
sys.exit(5)
"""

ENTRY = """
import sys, torch
assert torch.distributed.Backend.NC10D == "nc10d"
assert torch.distributed.Backend.backend_capability["nc10d"] == ["cpu", "cuda"]
print(*sorted(name for name in sys.modules if name.partition(".")[0] in ("nc10d", "numba")))
store = torch.distributed.HashStore()
torch.distributed.init_process_group("nc10d", rank=0, world_size=1, store=store)
torch.distributed.all_reduce(torch.ones(1))
"""


def python(*arguments, path=()):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*map(str, path), str(ROOT)])}
    command = [sys.executable, "-W", "error::ResourceWarning", *map(str, arguments)]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_a_group_leaves_no_traces_and_the_script_its_exit_code(tmp_path):
    script = tmp_path / "life.py"
    script.write_text(LIFE)
    both = [python(script, rank, tmp_path) for rank in range(2)]
    outputs = [each.communicate(timeout=100) for each in both]
    assert [each.returncode for each in both] == [5, 5], outputs


def test_torch_finds_the_backend_without_an_import(tmp_path):
    found = tmp_path / "found-1.0.dist-info"
    found.mkdir()
    (found / "METADATA").write_text("Name: found\nVersion: 1.0\n")
    entry = "nc10d = nc10d.base.torch_entry:register"
    assert entry in (ROOT / "pyproject.toml").read_text().replace('"', "")
    (found / "entry_points.txt").write_text(f"[torch.backends]\n{entry}\n")
    process = python("-c", ENTRY, path=[tmp_path])
    output, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    assert output.split() == ["nc10d", "nc10d.base", "nc10d.base.torch_entry"]
