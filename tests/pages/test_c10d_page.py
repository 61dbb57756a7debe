"""docs/c10d_names.md is that of the code and of the torch of the ordinary suite."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "c10d_names.md"


def test_the_page_of_names_is_current() -> None:
    torch = pytest.importorskip("torch")
    made = re.search(r"from torch ([\d.]+)", PAGE.read_text())
    assert made
    if torch.__version__.partition("+")[0] != made[1]:
        pytest.skip(f"the page is that of torch {made[1]}")
    done = subprocess.run(
        [sys.executable, "tools/c10d_names.py"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, f"names without a reason:\n{done.stderr}"
    assert done.stdout == PAGE.read_text() + "\n", "run python tools/c10d_names.py --write"
