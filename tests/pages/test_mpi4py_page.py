"""docs/from_mpi4py.md is that of the code and of the mpi4py of the ordinary suite."""

import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from tools.mpi4py_names import unknown

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "from_mpi4py.md"


def test_the_page_of_mpi4pys_names_is_current() -> None:
    pytest.importorskip("mpi4py")
    made = re.search(r"from mpi4py ([\d.]+\d)", PAGE.read_text())
    assert made
    if version("mpi4py") != made[1]:
        pytest.skip(f"the page is that of mpi4py {made[1]}")
    done = subprocess.run(
        [sys.executable, "tools/mpi4py_names.py"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, f"names without an entry, or of nothing:\n{done.stderr}"
    assert done.stdout == PAGE.read_text() + "\n", "run python tools/mpi4py_names.py --write"


def test_a_name_without_an_entry_or_of_nothing_is_found() -> None:
    text = "| `Foo` | absent | ? |\n| `Bar` | same | `nc10d.bar()`, `nc10d.Work.wait()` |\n"
    assert unknown(text) == ["| `Foo` | absent | ? |", "nc10d.bar does not exist"]
