"""Code in the documentation runs: code in the readme and in docs/, and docstrings' examples.

A block of Python begins with a comment: its file name, and optionally a colon and the command that
runs it. Without a command, the file runs as a script.
"""

from __future__ import annotations

import ast
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

import benchmarks.__main__ as benchmarks
import nc10d

PACKAGE = Path(nc10d.__file__).parent
ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
TEXT = "".join(page.read_text() for page in PAGES)
DESIGN = (ROOT / "docs" / "design.md").read_text()


class Example(NamedTuple):
    """A block of Python in a page."""

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


# ---- names in pages ------------------------------------------------------------------------------


def test_files_that_are_named_exist() -> None:
    folders = "tests|docs|nc10d|benchmarks|examples|tools"
    for path in re.findall(rf"\b((?:{folders})/[\w/]+(?:\.(?:py|sh|md))?)\b(?![*.-])", TEXT):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("name", sorted(set(re.findall(r"python -m (nc10d[\w.]*\w)", TEXT))))
def test_a_command_that_is_named_exists(name: str) -> None:
    path = ROOT / name.replace(".", "/")
    script = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
    assert "__main__" in script.name or '__name__ == "__main__"' in script.read_text()


@pytest.mark.parametrize(
    "name", sorted(set(re.findall(r"python -m benchmarks ([a-z][\w-]*)", TEXT)))
)
def test_a_table_of_benchmarks_that_is_named_exists(name: str) -> None:
    assert name in benchmarks.TABLES


TABLES = re.findall(r"^\| file in `([\w/]+)/` \|.*\n\|---.*\n((?:\|.*\n)+)", DESIGN, re.M)


@pytest.mark.parametrize(("folder", "rows"), TABLES, ids=[folder for folder, _ in TABLES])
def test_a_table_of_files_has_those_of_its_folder(folder: str, rows: str) -> None:
    """Rows name each file, or its folder, and no missing file."""
    named = [
        name for row in rows.splitlines() for name in re.findall(r"`(.+?)`", row.split("|")[1])
    ]
    there = {str(path.relative_to(PACKAGE / folder)) for path in (PACKAGE / folder).rglob("*.py")}
    assert sorted({name for name in named if named.count(name) > 1}) == []
    assert {name for name in named if name.endswith(".py")} <= there
    wanted = {name for name in there if not name.endswith("__init__.py")}
    assert {name for name in wanted if not {name, name.split("/")[0] + "/"} & set(named)} == set()


def variables(path: Path) -> set[str]:
    """Return nc10d's environment variables that occur in a module as string constants."""
    nodes = ast.walk(ast.parse(path.read_text()))
    texts = {node.value for node in nodes if isinstance(node, ast.Constant)}
    return {text for text in texts if re.fullmatch(r"NC10D_[A-Z_]+", str(text))}


def test_the_variables_that_are_read_are_those_of_the_page() -> None:
    page = (ROOT / "docs" / "environment.md").read_text()
    folders = (PACKAGE, ROOT / "benchmarks")
    files = [path for folder in folders for path in folder.rglob("*.py")]
    read = set().union(*map(variables, files))
    assert set(re.findall(r"^\| `(\w+)`", page, re.M)) == read
