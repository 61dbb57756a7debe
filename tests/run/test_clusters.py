"""Ranks in the workers of Ray and Dask: `pip install ray distributed`, then `make test-long`."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.long
@pytest.mark.parametrize(("name", "package"), [("Ray", "ray"), ("Dask", "distributed")])
def test_ranks_in_workers_of_a_cluster_agree(name: str, package: str) -> None:
    if find_spec(package) is None:
        pytest.skip(f"needs {package}, a package of its own")
    command = [sys.executable, str(ROOT / "examples" / f"on_{name.lower()}.py"), "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert f"2 ranks of {name} agree on 1.0" in done.stdout
