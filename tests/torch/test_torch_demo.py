"""The demo trains by either DistributedDataParallel, with the same loss curve."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


def run(*words):
    command = [sys.executable, "-m", "nc10d.run", "--nproc-per-node", "2", "examples/torch_ddp.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, "--steps", "8", *map(str, words)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("mode", [[], pytest.param(["--uneven"], marks=pytest.mark.long)])
def test_both_implementations_have_the_same_loss_curve(tmp_path, mode):
    losses, picture = tmp_path / "losses.json", tmp_path / "loss.png"
    assert run("--ddp", "torch", "--save", losses, *mode).returncode == 0
    done = run("--ddp", "nc10d", "--against", losses, "--plot", picture, *mode)
    assert done.returncode == 0, done.stderr
    assert "the same curve as with torch's DDP: at most 0.0e+00 apart" in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
def test_a_job_in_low_precision_goes_on_from_its_file_as_if_it_had_not_ended(tmp_path):
    kept = tmp_path / "state.pt"
    assert run("--mixed", "--keep", kept, "--steps", "4").returncode == 0
    assert run("--mixed", "--keep", kept).returncode == 0
    whole = run("--mixed", "--save", tmp_path / "losses.json")
    assert whole.returncode == 0, whole.stderr
    losses = torch.load(kept)["losses"]
    assert losses == json.loads((tmp_path / "losses.json").read_text())[1]
    assert len(losses) == 8


@pytest.mark.long
def test_another_loss_curve_is_detected(tmp_path):
    losses = tmp_path / "losses.json"
    losses.write_text('["a flat line", [3, 3, 3, 3, 3, 3, 3, 3]]')
    done = run("--against", losses)
    assert done.returncode == 1
    assert "ANOTHER CURVE" in done.stdout
