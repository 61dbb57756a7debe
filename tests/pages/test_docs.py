"""Documentation is true: examples run, named files exist, pages are short and linked.

A block of Python in a page begins with a comment: the name of its file and, behind a colon, the
command that runs it. Without a command it is run as a script, in this process if that is possible.
"""

import ast
import doctest
import importlib
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import benchmarks.__main__ as benchmarks
import nc10d.__main__
from nc10d.base.variables import VARIABLES

PACKAGE = Path(nc10d.__file__).parent
ROOT = Path(__file__).parents[2]
LOGS = ROOT / "docs" / "logs"
"""Former pages: the files that they name may have moved."""
FIRST = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
PAGES = sorted(page for page in [*FIRST, *(ROOT / "docs").rglob("*.md")] if page.parent != LOGS)
TEXT = "".join(page.read_text() for page in PAGES)
LINK = re.compile(r"\]\(([\w./-]+)")
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


def test_pages_have_examples() -> None:
    assert {example.page for example in EXAMPLES} >= {"README.md", "testing.md"}


def marks_of(example: Example) -> list[pytest.MarkDecorator]:
    return [pytest.mark.slow] if "import torch" in example.code else []


@pytest.mark.parametrize(
    "example", [pytest.param(e, marks=marks_of(e), id=f"{e.page}: {e.name}") for e in EXAMPLES]
)
def test_an_example_runs(example: Example, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / example.name).write_text(example.code)
    assert example.command[0] == "python"
    if example.command == ["python", example.name] and example.page != "README.md":
        monkeypatch.chdir(tmp_path)
        runpy.run_path(example.name, run_name="__main__")
        return
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


# ---- names in pages -----------------------------------------------------------------------------


def test_named_files_exist() -> None:
    folders = "tests|docs|nc10d|benchmarks|examples|tools"
    for path in re.findall(rf"\b((?:{folders})/[\w/]+(?:\.(?:py|sh|md))?)\b(?![*.-])", TEXT):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("name", sorted(set(re.findall(r"python -m (nc10d[\w.]*\w)", TEXT))))
def test_a_named_command_exists(name: str) -> None:
    path = ROOT / name.replace(".", "/")
    script = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
    assert "__main__" in script.name or '__name__ == "__main__"' in script.read_text()


def test_the_commands_of_the_package_are_listed() -> None:
    folders = {path.parent.name for path in PACKAGE.glob("*/__main__.py")}
    files = {
        path.stem for path in PACKAGE.glob("[!_]*.py") if "\nif __name__ ==" in path.read_text()
    }
    assert folders | files == nc10d.__main__.COMMANDS.keys()


@pytest.mark.parametrize(("words", "code"), [([], 0), (["--help"], 0), (["no-such-command"], 2)])
def test_the_package_alone_lists_its_commands(words: list[str], code: int) -> None:
    command = [sys.executable, "-m", "nc10d", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == code
    for name in nc10d.__main__.COMMANDS:
        assert f"python -m nc10d.{name} " in done.stdout + done.stderr
    assert f"nc10d {nc10d.__version__}, Python 3." in done.stdout + done.stderr


def test_the_package_tells_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["nc10d", "--version"])
        assert nc10d.__main__.main() == 0
    assert capsys.readouterr().out == f"nc10d {nc10d.__version__}\n"


@pytest.mark.parametrize("name", nc10d.__main__.COMMANDS)
def test_every_command_has_help(name: str) -> None:
    command = [sys.executable, "-m", f"nc10d.{name}", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: ")


@pytest.mark.parametrize(
    "name", sorted(set(re.findall(r"python -m benchmarks ([a-z][\w-]*)", TEXT)))
)
def test_a_named_table_of_benchmarks_exists(name: str) -> None:
    assert name in benchmarks.TABLES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_page_lead_to_files(page: Path) -> None:
    for target in LINK.findall(page.read_text()):
        assert (page.parent / target).exists(), target


def test_every_page_links_to_another_and_is_linked() -> None:
    """The readme is the first page."""
    links = {
        page: {(page.parent / target).resolve() for target in LINK.findall(page.read_text())}
        for page in PAGES
    }
    for page in PAGES:
        assert links[page] & set(PAGES) - {page}, page
        first = page == ROOT / "README.md"
        assert first or any(page in links[other] for other in PAGES if other != page), page


@pytest.mark.parametrize(("name", "most"), {"design": 350, "performance": 200}.items())
def test_a_page_is_short(name: str, most: int) -> None:
    assert len((ROOT / "docs" / f"{name}.md").read_text().splitlines()) <= most


def test_the_glossary_defines_each_term_once() -> None:
    rows = DESIGN.partition("## Glossary")[2].splitlines()
    terms = [line.split("|")[1].strip() for line in rows if line.startswith("| ")][1:]
    assert 0 < len(set(terms)) == len(terms) <= 40


@pytest.mark.parametrize(
    "folder",
    sorted({path.parent for path in PACKAGE.rglob("*.py")}),
    ids=lambda folder: str(folder.relative_to(PACKAGE)),
)
def test_a_folder_states_its_purpose(folder: Path) -> None:
    assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))


def variables(path: Path) -> set[str]:
    """Return the environment variables of nc10d that a module names in a string of their own."""
    nodes = ast.walk(ast.parse(path.read_text()))
    texts = {node.value for node in nodes if isinstance(node, ast.Constant)}
    return {text for text in texts if re.fullmatch(r"NC10D_[A-Z_]+", str(text))}


def test_the_page_of_variables_lists_the_variables_that_are_read() -> None:
    page = (ROOT / "docs" / "environment.md").read_text()
    folders = (PACKAGE, ROOT / "benchmarks")
    files = {path for folder in folders for path in folder.rglob("*.py")}
    read = set().union(*map(variables, files - {PACKAGE / "base" / "variables.py"}))
    assert set(re.findall(r"^\| `(\w+)`", page, re.M)) == read == VARIABLES.keys()
