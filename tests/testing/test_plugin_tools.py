"""Tools of users in ranks: a debugger on a chosen rank, and coverage."""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest
from at_terminal import AtTerminal

from nc10d.kernels import cache_dir

pytest_plugins = ["pytester"]
CACHE = next(iter(cache_dir.roots()))
ENVIRONMENT = os.environ | {"NC10D_CACHE_DIR": str(CACHE)}
PYTEST = [sys.executable, "-m", "pytest", "-p", "pytest_nc10d", "-p", "no:cacheprovider"]
BREAKPOINT = """
import pytest
import nc10d as dist
from nc10d.testing import run_ranks

def body(world):
    if world.rank == 1:
        breakpoint()
    dist.barrier()

@pytest.mark.ranks(2, timeout=60)
def test_it(world):
    body(world)

if __name__ == "__main__":
    run_ranks(body, 2, "processes", timeout=60)
    print("1 passed")
"""


@pytest.mark.parametrize(
    ("how", "prompt"),
    [
        ("a script", "(rank 1) "),
        ("processes", "(rank 1) "),
        ("threads", "(Pdb) "),
        ("simulated", "(Pdb) "),
    ],
)
def test_a_breakpoint_of_a_rank_asks_on_the_terminal(
    pytester: pytest.Pytester, how: str, prompt: str
) -> None:
    path = pytester.makepyfile(test_it=BREAKPOINT)
    pytester.makeini("[pytest]")
    command = [sys.executable, str(path)]
    if how != "a script":
        command = [*PYTEST, "--nc10d-kind", how, str(path)]
    with AtTerminal(command, ENVIRONMENT) as terminal:
        terminal.read_until(prompt)
        terminal.press(b"p 'the rank is', world.rank + 40\n")
        terminal.read_until("('the rank is', 41)")
        terminal.press(b"c\n")
        terminal.read_until("1 passed")


COVERED = """
import pytest
import nc10d as dist

def on_rank_0():
    return 0

def on_rank_1():
    return 1

@pytest.mark.ranks(2, timeout=60)
def test_it(world):
    on_rank_1() if world.rank else on_rank_0()
    dist.barrier()
"""


@pytest.mark.skipif(not find_spec("pytest_cov"), reason="needs pytest-cov, which is not installed")
@pytest.mark.parametrize("kind", ["threads", "processes", "simulated"])
def test_coverage_sees_the_lines_of_all_ranks(pytester: pytest.Pytester, kind: str) -> None:
    path = pytester.makepyfile(test_it=COVERED)
    pytester.makeini("[pytest]")
    pytester.makefile(".toml", pyproject='[tool.coverage.run]\npatch = ["subprocess", "_exit"]\n')
    command = [*PYTEST, "--nc10d-kind", kind, "--cov", "test_it", "--cov-report", "json", str(path)]
    done = subprocess.run(
        command, cwd=pytester.path, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((pytester.path / "coverage.json").read_text())
    assert report["files"]["test_it.py"]["missing_lines"] == []
    assert re.search("1 passed", done.stdout)
