"""A package of its own adds a backend by an entry point; nothing in nc10d names it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import nc10d as dist
from nc10d.backend.registry import register_backend, unregister_backend
from nc10d.errors import UnsupportedPlatform
from nc10d.group.process_group import ProcessGroup
from nc10d.testing import run_ranks

PROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "plugged"
version = "1.0"
[tool.setuptools]
py-modules = ["plugged"]
[project.entry-points."nc10d.backends"]
plugged = "plugged:register"
forgetful = "plugged:forget"
"""
MODULE = """
import nc10d
from nc10d.testing.local_backend import LocalBackend, LocalHub

hub = LocalHub()

class Plugged(LocalBackend):
    name = "plugged"

def make(setup):
    return Plugged(hub, setup.group_name, setup.rank, setup.size)

def works():
    print("asked whether it works")

def register():
    nc10d.register_backend("plugged", make, ["cpu"], requires=works)

def forget():
    pass
"""
PROGRAM = """
import sys
import nc10d as dist
from nc10d.testing import check_backend

assert "plugged" not in sys.modules
assert {"plugged", "forgetful"} <= set(dist.Backend.backend_list) and dist.Backend.PLUGGED
assert "plugged" not in sys.modules
assert dist.is_backend_available("Plugged") and "plugged" in sys.modules
print(check_backend("plugged", world_sizes=[2], dtypes=[dist.DType.FLOAT32]), "checks")
try:
    dist.is_backend_available("forgetful") or dist.init_process_group("forgetful")
except ValueError as error:
    print(error)
try:
    dist.init_process_group("pluged", store=dist.HashStore(), rank=0, world_size=1)
except ValueError as error:
    print(error)
"""


def test_a_package_adds_a_backend_that_passes_all_checks(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "site"
    source.mkdir()
    (source / "pyproject.toml").write_text(PROJECT)
    (source / "plugged.py").write_text(MODULE)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(target)]
    offline = ["--no-deps", "--no-build-isolation", "--no-index", str(source)]
    subprocess.run([*pip, *offline], check=True)
    env = os.environ | {"PYTHONPATH": f"{target}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-c", PROGRAM]
    found = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr
    asked, *_, checks, forgotten, unknown = found.stdout.splitlines()
    assert asked == "asked whether it works"
    assert int(checks.split()[0]) > 100
    assert (
        forgotten == "plugged:forget (entry point of nc10d.backends) has not registered 'forgetful'"
    )
    assert unknown.startswith("unknown backend 'pluged'; known are: ")
    assert " plugged," in unknown


def test_a_group_is_refused_for_the_reason_that_its_backend_gives() -> None:
    def lacking() -> None:
        raise UnsupportedPlatform("there is no torus here")

    def refused(_: ProcessGroup) -> None:
        with pytest.raises(UnsupportedPlatform, match=r"'torus' can't work .* no torus here"):
            dist.new_group(backend="torus")

    register_backend("torus", lambda setup: pytest.fail("it is never made"), requires=lacking)
    try:
        run_ranks(refused, 2)
    finally:
        unregister_backend("torus")
