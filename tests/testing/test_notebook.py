"""Functions and classes of a notebook's cells run on ranks of all kinds."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

MISSING = [
    name for name in ("nbclient", "ipykernel", "nbformat", "cloudpickle") if not find_spec(name)
]


@pytest.mark.skipif(bool(MISSING), reason=f"needs {MISSING}, which are not installed")
def test_cells_of_a_notebook_run_on_ranks() -> None:
    script = Path(__file__).with_name("notebook_cells.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    expected = ["1 [6.0, 6.0]", "2 [6.0, 6.0]", "3 [6.0, 6.0]"]
    expected += ["4 [Box(value=2.0), Box(value=1.0)]", "5 True"]
    assert [line for line in lines if line[:2] in ("1 ", "2 ", "3 ", "4 ", "5 ")] == expected
    assert "LookupError: nothing here" in lines
    assert "raised on rank 1" in lines
    assert any(line.endswith("line 3, in fails") for line in lines), "the line of the cell"
