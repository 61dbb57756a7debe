"""The site is complete: each page has a place, each public name is in the reference, once."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import nc10d

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
SITE = (ROOT / "mkdocs.yml").read_text()
PLACES = re.findall(r"^ +- (?:[\w.'/ -]+: )?([\w/]+\.md)$", SITE, re.M)
UNTYPED = {"DistStoreError", "DistQueueEmptyError"}
"""c10d's names of other errors, which are described there."""


def test_every_page_is_in_the_navigation_once() -> None:
    pages = {
        str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md") if path.parent.name != "logs"
    }
    assert sorted(PLACES) == sorted(pages)


def test_every_public_name_is_in_the_reference_once() -> None:
    pages = (DOCS / "reference").glob("*.md")
    found = re.findall(r"^::: nc10d\.(\w+)$", "".join(page.read_text() for page in pages), re.M)
    public = {name for name in nc10d.__all__ if not name.startswith("_")}
    old = {name for name in public if nc10d._HOME[name] == "api.old_names"}
    modules = {"errors", "functional", "numba", "torch", "testing"}
    assert sorted(set(found) - modules) == sorted(public - UNTYPED - old)
    assert len(found) == len(set(found))


def test_pictures_are_current() -> None:
    command = [sys.executable, "tools/pictures.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "CITATION.cff"])
def test_a_release_has_its_files(name: str) -> None:
    text = (ROOT / name).read_text()
    if name == "LICENSE":
        assert text.startswith("BSD 3-Clause License")
    elif name in ("CHANGELOG.md", "CITATION.cff"):
        assert nc10d.__version__ in text
