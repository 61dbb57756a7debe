"""The site is complete: each page has a place, each public name is in the reference, once."""

import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import nc10d
from tools.site_hooks import broken, titled, unplaced

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
TORCH = any(found.name == "torch" for found in distributions())
SITE = (ROOT / "mkdocs.yml").read_text()
PLACES = re.findall(r"^ +- (?:[\w.'/ -]+: )?([\w/]+\.md)$", SITE, re.M)
UNTYPED = {"DistStoreError", "DistQueueEmptyError"}
"""c10d's names of other errors, which are described there."""


def test_the_navigation_names_pages_once() -> None:
    """Pages without a place go under "More"."""
    pages = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    assert len(PLACES) > 20
    assert len(PLACES) == len(set(PLACES))
    assert set(PLACES) <= pages


def test_a_page_without_a_place_is_found(tmp_path: Path) -> None:
    for name in ("placed.md", "start/lost.md", "logs/old.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("# Title: more\n")
    assert unplaced("nav:\n  - A: placed.md\n", tmp_path) == ["start/lost.md"]
    assert titled("see [a.md](placed.md#b).", tmp_path) == "see [Title](placed.md#b)."
    (tmp_path / "quoted.md").write_text("> A page\n\n# Title\n")
    assert titled("see [q.md](quoted.md).", tmp_path) == "see [q.md](quoted.md)."


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<a href="b.html#here">b</a> <a href="c.html">c</a>')
    (tmp_path / "b.html").write_text('<h1 id="there"><a href="https://example.org">x</a></h1>')
    assert broken(tmp_path) == ["a.html: b.html#here", "a.html: c.html"]


def test_every_public_name_is_in_the_reference_once() -> None:
    pages = (DOCS / "reference").glob("*.md")
    found = re.findall(r"^::: nc10d\.(\w+)$", "".join(page.read_text() for page in pages), re.M)
    public = {name for name in nc10d.__all__ if not name.startswith("_")}
    old = {name for name in public if nc10d._HOME[name] == "api.old_names"}
    modules = {"cuda", "errors", "exact", "functional", "numba", "optim", "torch", "testing"}
    missing = public - UNTYPED - old - set(found)
    assert not missing, f"add ::: nc10d.NAME to a page of docs/reference for {sorted(missing)}"
    assert set(found) - modules <= public
    assert len(found) == len(set(found))


def named(dotted: str) -> Any:
    """Return the module or attribute of a name."""
    try:
        return importlib.import_module(dotted)
    except ModuleNotFoundError:
        module, _, name = dotted.rpartition(".")
        return getattr(named(module), name)


def docstrings(shown: Any) -> Iterator[str]:
    """Yield the docstrings that the reference shows for a module, a class or a function."""
    members = vars(shown).items() if isinstance(shown, (type, ModuleType)) else ()
    for value in (shown, *(value for name, value in members if not name.startswith("_"))):
        yield inspect.getdoc(value) or ""


def test_a_docstring_of_the_reference_points_into_the_reference() -> None:
    pages = "".join(page.read_text() for page in (DOCS / "reference").glob("*.md"))
    names = {*re.findall(r"^::: (nc10d[\w.]*\w)", pages, re.M)}
    if not TORCH:
        names = {name for name in names if not name.startswith("nc10d.torch")}
    shown = {name: named(name) for name in names}
    for name, value in shown.items():
        for text in docstrings(value):
            for target in re.findall(r"\b[Ss]ee\s+(nc10d\.[\w.]*\w)", text):
                assert any(named(target) is other for other in shown.values()), (name, target)


def test_a_page_that_the_package_names_exists() -> None:
    for path in Path(nc10d.__file__).parent.rglob("*.py"):
        for page in re.findall(r"\bdocs/[\w/-]+\.md", path.read_text()):
            assert (ROOT / page).exists(), f"{path}: {page}"


def test_pictures_are_current() -> None:
    command = [sys.executable, "tools/pictures.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "CITATION.cff"])
def test_a_release_has_its_files(name: str) -> None:
    text = (ROOT / name).read_text()
    if name == "LICENSE":
        assert text.startswith("BSD 3-Clause License")
    elif name in ("CHANGELOG.md", "CITATION.cff"):
        assert nc10d.__version__ in text
