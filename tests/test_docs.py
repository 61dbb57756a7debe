"""What the documentation shows is run: code in the readme and in docs/, and docstrings' examples.

A block of Python begins with a comment: the name of its file, and, behind a colon, the command
that runs it. Without a command it is run as a script.
"""

from __future__ import annotations

import doctest
import importlib
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import nc10d

PACKAGE = Path(nc10d.__file__).parent
ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


class Example(NamedTuple):
    """One block of Python in a page."""

    page: str
    name: str
    command: list[str]
    code: str


def examples(page: Path) -> Iterator[Example]:
    for code in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S):
        head = re.match(r"# (\w+\.py)(?:: (.+))?\n", code)
        assert head, f"{page.name}: no file name in the first line of\n{code}"
        name, command = head.group(1), head.group(2) or f"python {head.group(1)}"
        yield Example(page.name, name, shlex.split(command), code)


EXAMPLES = [example for page in PAGES for example in examples(page)]


def test_there_are_examples() -> None:
    assert {example.page for example in EXAMPLES} >= {"README.md", "testing.md"}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: f"{e.page}: {e.name}")
def test_an_example_runs(example: Example, tmp_path: Path) -> None:
    (tmp_path / example.name).write_text(example.code)
    assert example.command[0] == "python"
    command = [sys.executable, "-W", "error", *example.command[1:]]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr


MODULES = [
    ".".join(("nc10d", *path.relative_to(PACKAGE).with_suffix("").parts))
    for path in sorted(PACKAGE.rglob("*.py"))
    if re.search(r"^\s*>>> ", path.read_text(), re.M)
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_are_true(name: str) -> None:
    module = importlib.import_module(name.removesuffix(".__init__"))
    failed, tried = doctest.testmod(module)
    assert tried
    assert not failed


def test_files_that_are_named_exist() -> None:
    text = "".join(page.read_text() for page in PAGES)
    for path in re.findall(r"`((?:tests|docs|nc10d|examples)/[\w/.]+)`", text):
        assert (ROOT / path).exists(), path
