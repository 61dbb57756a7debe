"""The readme's example works as the readme describes."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

Launch = Callable[..., "subprocess.CompletedProcess[str]"]
README = Path(__file__).parents[2] / "README.md"


def test_the_example_runs(launch: Launch, script: Callable[[str], str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    done = launch("--nproc-per-node", "4", script(example))
    assert done.returncode == 0, done.stderr
    lines = [f"[rank {r}] rank {r} of 4: [10. 10. 10.]" for r in range(4)]
    assert sorted(done.stdout.splitlines()) == lines
