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


def test_both_implementations_have_the_same_loss_curve(tmp_path):
    losses, picture = tmp_path / "losses.json", tmp_path / "loss.png"
    assert run("--ddp", "torch", "--save", losses).returncode == 0
    done = run("--ddp", "nc10d", "--against", losses, "--plot", picture)
    assert done.returncode == 0, done.stderr
    assert "the same curve as with torch's DDP: at most 0.0e+00 apart" in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_job_in_low_precision_with_uneven_data_goes_on_from_its_file(tmp_path):
    words = ("--mixed", "--uneven", "--keep", tmp_path / "state.pt")
    assert run(*words, "--steps", "4").returncode == 0
    done = run(*words)
    assert done.returncode == 0, done.stderr
    whole = run("--mixed", "--uneven", "--save", tmp_path / "losses.json")
    assert whole.returncode == 0, whole.stderr
    state = torch.load(tmp_path / "state.pt")
    assert state["losses"] == json.loads((tmp_path / "losses.json").read_text())[1]
    assert len(state["losses"]) == 8


@pytest.mark.long
def test_another_loss_curve_is_detected(tmp_path):
    losses = tmp_path / "losses.json"
    losses.write_text('["a flat line", [3, 3, 3, 3, 3, 3, 3, 3]]')
    done = run("--against", losses)
    assert done.returncode == 1
    assert "ANOTHER CURVE" in done.stdout
