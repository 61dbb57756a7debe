"""Programs and libraries that name gloo get gloo's bits with nc10d in gloo's place."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

OWN_CLASSES = """
from datetime import timedelta

import torch
import torch.distributed as dist


class Named(dist.ProcessGroupGloo):
    def __init__(self, store, own_name):
        super().__init__(store, 0, 1, timedelta(seconds=30))
        self.own_name = own_name


group = Named(dist.HashStore(), "mine")
assert group.own_name == "mine"
assert isinstance(group, Named) and isinstance(group, dist.ProcessGroupGloo)
x = torch.ones(2)
group.allreduce([x]).wait()
assert x.tolist() == [1, 1]

options = dist.ProcessGroupGloo._Options()
options._timeout = timedelta(seconds=41)
options._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]
given = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, options)
assert given.options._timeout == timedelta(seconds=41)
if type(given) is dist.ProcessGroupGloo.theirs:
    assert given.options._devices == options._devices
"""


IGNITE = """
import hashlib

import ignite.distributed as idist
import torch
import torch.distributed as dist


def train(_):
    torch.manual_seed(3)
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    model = idist.auto_model(net)
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), 0.1))
    torch.manual_seed(idist.get_rank())
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(16, 8)).square().sum().backward()
        optimizer.step()
    bits = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    kind = type(dist.group.WORLD._get_backend(torch.device("cpu"))).__module__.partition(".")[0]
    if idist.get_rank() == 0:
        print(kind, type(model).__name__, idist.backend(), hashlib.sha256(bits).hexdigest())


with idist.Parallel(backend="gloo") as parallel:
    parallel.run(train)
"""


def run(tmp_path: Path, text: str, *launcher: str, as_gloo: bool = True) -> str:
    program = tmp_path / "program.py"
    program.write_text(text)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "NC10D_AS_GLOO": str(int(as_gloo))}
    ended = subprocess.run(
        [sys.executable, *launcher, program],
        capture_output=True,
        text=True,
        timeout=200,
        env=environment,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_classes_derived_from_gloos_and_its_options_stay_whole(tmp_path: Path) -> None:
    run(tmp_path, OWN_CLASSES)


@pytest.mark.slow
def test_ignite_wraps_its_model_and_trains_with_gloos_bits(tmp_path: Path) -> None:
    pytest.importorskip("ignite")
    launcher = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"
    on_gloo = run(tmp_path, IGNITE, *launcher, as_gloo=False).split()
    on_nc10d = run(tmp_path, IGNITE, *launcher).split()
    assert on_gloo[0] == "torch"
    assert on_nc10d == ["nc10d", "DistributedDataParallel", "gloo", on_gloo[-1]]
