"""The tool that runs torch's own tests with nc10d in gloo's place runs them, and counts."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("expecttest")  # torch's own tests import it
ROOT = Path(__file__).parents[2]
TOOL = [sys.executable, str(ROOT / "tools/torch_suite.py"), "--ranks", "2"]


@pytest.mark.slow
def test_torchs_own_tests_run_with_nc10d_in_gloos_place(tmp_path: Path) -> None:
    words = ["test_get_backend", "test_reduce_sum_twice", "test_all_to_all_single_unequal_split"]
    command = [*TOOL, "--json", str(tmp_path / "outcome"), *words]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert ended.returncode == 0, ended.stdout
    outcome = {line["test"]: line for line in json.loads((tmp_path / "outcome").read_text())}
    assert outcome["test_get_backend"]["outcome"] == "passed"
    assert outcome["test_reduce_sum_twice"]["outcome"] == "passed"
    # torch runs its tests of all_to_all with CUDA only, whatever the backend.
    assert {"passed", "skipped"} == {line["outcome"] for line in outcome.values()}


@pytest.mark.slow
def test_too_few_passed_tests_are_a_failure() -> None:
    command = [*TOOL, "--backend", "gloo", "--least", "2", "test_get_backend"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert ended.returncode == 1
    assert "1 of 1 passed" in ended.stdout
