"""The example that loses a rank during training: three of four ranks finish, and learn as well."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Launch = Callable[..., "subprocess.CompletedProcess[str]"]
SURVIVE = Path(__file__).parents[2] / "examples" / "survive.py"


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, pytest.param(3, marks=pytest.mark.long)])
def test_the_training_goes_on_with_three_of_four(launch: Launch, victim: int) -> None:
    words = ["--keep-going", "--no-prefix", "--nproc-per-node", "4", str(SURVIVE)]
    done = launch(*words, "--steps", "300", "--victim", str(victim))
    assert done.returncode == 0, done.stderr
    assert f"rank {victim} failed with SIGKILL" in done.stderr
    assert "the others go on" in done.stderr
    assert "killed by signal 9; 3 ranks go on" in done.stdout
    assert "weights of 3 rank(s): bitwise equal" in done.stdout
    (accuracy,) = re.findall(r"^test accuracy: (\d\d\.\d) %$", done.stdout, re.MULTILINE)
    assert float(accuracy) > 90


FAILS = """
import os, sys
sys.exit(int(os.environ["RANK"]) {comparison} 1)
"""


def test_with_keep_going_a_job_fails_only_if_all_ranks_fail(
    launch: Launch, script: Callable[[str], str]
) -> None:
    for comparison, code in (("== ", 0), (">= -", 1)):
        path = script(FAILS.format(comparison=comparison))
        done = launch("--keep-going", "--nproc-per-node", "3", path)
        assert done.returncode == code, done.stderr
