"""Slow is not dead: ranks that are stopped, that hold the GIL, and that are four to a core."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest


@pytest.mark.timeout(4000)
@pytest.mark.parametrize(
    ("seconds", "timeout", "share"),
    # Beside other tests a rank may be kept waiting by more than its own pause.
    [(4, 20, 0.05), pytest.param(3600, 3, 0.9, marks=pytest.mark.long)],
)
def test_no_pause_below_the_timeout_is_taken_for_a_death(
    seconds: int, timeout: int, share: float
) -> None:
    size = 4 * len(os.sched_getaffinity(0))
    words = map(str, (seconds, min(size, 16), timeout, share))
    command = [sys.executable, "-m", "nc10d.debug.pauses", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    played = json.loads(done.stdout)
    assert {report["error"] for report in played["reports"]} == {""}
    assert set(played["codes"]) == {0}
    assert len({report["calls"] for report in played["reports"]}) == 1
    assert played["reports"][0]["calls"] > 0
