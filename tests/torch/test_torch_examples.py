"""The examples of torch.distributed on nc10d run, and what they say is true."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from nc10d.testing import run_ranks

ROOT = Path(__file__).parents[2]


def run(ranks: int, *words: str) -> str:
    """Run an example on nc10d.run's ranks (0: by itself); return what it prints."""
    launcher = ["-m", "nc10d.run", "--nproc-per-node", str(ranks)] if ranks else []
    command = [sys.executable, *launcher, *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_three_ranks_resume_a_checkpoint_of_two(tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    first = run(2, "examples/torch_fsdp.py", "--steps", "2", "--save", folder)
    assert "step 0: loss" in first
    resumed = run(3, "examples/torch_fsdp.py", "--steps", "1", "--resume", folder)
    assert "step 2: loss" in resumed


def test_three_ranks_resume_an_optimizer_of_four_with_the_same_curve(tmp_path: Path) -> None:
    example = runpy.run_path(str(ROOT / "examples" / "torch_zero.py"))
    file = str(tmp_path / "half.pt")

    def trained(ranks: int, *words: str) -> tuple[list[int], list[float]]:
        options = example["parsed"](["--steps", "8", *words])
        held, losses = zip(*run_ranks(lambda _: example["train"](options), ranks), strict=True)
        assert all(row == losses[0] for row in losses)
        return list(held), losses[0]

    held, before = trained(4, "--save-after", "4", file)
    assert max(held) <= 0.3 * sum(held)
    _, after = trained(3, "--resume", file)
    assert after == pytest.approx(before[4:], abs=example["NEAR"])
    assert before[4:] != pytest.approx(before[:4], abs=example["NEAR"]), "curves can differ"


@pytest.mark.slow
def test_a_split_network_learns_as_the_whole_one() -> None:
    assert "largest difference" in run(2, "examples/torch_tensor_parallel.py")


def test_lightning_trains_on_nc10d() -> None:
    pytest.importorskip("lightning")
    assert "backend nc10d, loss" in run(0, "examples/torch_lightning.py")


def test_accelerate_trains_on_nc10d() -> None:
    pytest.importorskip("accelerate")
    assert "2 ranks, backend nc10d, DistributedDataParallel" in run(
        2, "examples/torch_accelerate.py"
    )
