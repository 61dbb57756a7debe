"""The Reducer's example trains to the same weights on all ranks, with and without overlap."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "reducer_numpy.py"


@pytest.mark.slow
def test_overlap_changes_no_weight():
    command = [sys.executable, "-m", "nc10d.run", "--nproc-per-node", "2", str(EXAMPLE)]
    quiet = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=quiet)
    assert done.returncode == 0, done.stderr
    assert "weights of 2 rank(s): equal" in done.stdout
    losses = [line.split("loss ")[1].split()[0] for line in done.stdout.splitlines()[:2]]
    assert losses[0] == losses[1]
