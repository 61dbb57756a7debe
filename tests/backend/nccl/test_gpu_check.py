"""`make gpu-check` runs to its end, over the emulators, and can fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from emulated import emulators, needs_emulators

pytestmark = needs_emulators

ROOT = Path(__file__).parents[3]
TESTS = ["backend/nccl", "backend/staged", "torch", "emulators"]
FOLDERS = ["", "tools", *(f"tests/{name}" for name in TESTS)]
CHECK = """
import sys
from gpu_check import main
if __name__ == "__main__":
    sys.exit(main(["--quick"]))
"""


def python(code: str, where: Path, *more: Path) -> subprocess.CompletedProcess[str]:
    """Run code in a folder; `more` are import paths that come before the script's own."""
    paths = [*map(str, more), *(str(ROOT / name) for name in FOLDERS)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    script = where / "code.py"
    script.write_text(code)
    return subprocess.run(
        [sys.executable, str(script)],
        cwd=where,
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
    )


@pytest.mark.timeout(420)
def test_gpu_check_runs_to_its_end(tmp_path: Path) -> None:
    with emulators(NC10D_EMULATED_GPUS="1"):
        done = python(CHECK, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "gpu-results.json").read_text())["rows"]
    assert not [row for row in rows if row["failed"]]
    names = " ".join(row["name"] for row in rows)
    parts = "staged, 2", "abort", "registered", "nonblocking", "one copy", "as a plan", "one_launch"
    for part in (*parts, "training by torch"):
        assert part in names


TORCHS = """
import gpu_times
(row,) = gpu_times.torch_rows(gpu_times.QUICK)
print(row.failed, row.result)
"""


@pytest.mark.parametrize(
    ("torch", "expected"),
    [
        ("raise OSError('libcudart.so: not found')", "True OSError: libcudart.so: not found"),
        ("", "True "),  # an empty module in torch's place
    ],
)
def test_a_torch_that_does_not_work_is_a_failure(tmp_path: Path, torch: str, expected: str) -> None:
    package = tmp_path / "packages" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(torch)
    with emulators():
        done = python(TORCHS, tmp_path, package.parent)
    assert done.stdout.startswith(expected), done.stdout + done.stderr


def test_a_check_that_raises_is_a_failed_row(tmp_path: Path) -> None:
    code = "import gpu_rows\nprint([row.failed for row in gpu_rows.run('it', lambda: 1 / 0)])"
    nothing = "\nprint([row.failed for row in gpu_rows.run('it', lambda: [])])"
    with emulators():
        done = python(code + nothing, tmp_path)
    assert done.stdout == "[True, False]\n" * 2, done.stderr
