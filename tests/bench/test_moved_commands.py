"""Old commands name their replacements."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from benchmarks.__main__ import TABLES
from nc10d.run.moved import MOVED


@pytest.mark.parametrize("module", MOVED)
def test_an_old_module_names_the_new_command(module: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=f"checkout, python -m {MOVED[module]}$"):
        importlib.import_module(module)


def test_every_new_command_is_there() -> None:
    tables = {command.removeprefix("benchmarks ") for command in MOVED.values()}
    assert tables - {"simulation"} <= TABLES.keys()


@pytest.mark.parametrize("module", ["nc10d.bench.store", "nc10d.testing.simulation"])
def test_an_old_command_ends_with_the_new_one(module: str) -> None:
    command = [sys.executable, "-m", module]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode
    assert f"{module} has moved: in a checkout, python -m {MOVED[module]}" in done.stderr


def test_other_modules_are_missing_as_ever() -> None:
    with pytest.raises(ModuleNotFoundError, match="No module named"):
        importlib.import_module("nc10d.bench.no_such_module")
