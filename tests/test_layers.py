"""A module imports only from lines above its own, or from its left: the table is the law.

It stands in docs/design.md, one line per layer. A name stands for the module or for everything
inside the package of that name. Imports inside functions count too; types may point anywhere.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import nc10d

# The public names are for users: nobody inside goes through the front door.
FRONT = "nc10d"

ROOT = Path(nc10d.__file__).parent
DESIGN = Path(__file__).parent.parent / "docs" / "design.md"
LAYERS = re.findall(r"^\| \d \| (.+?) \|", DESIGN.read_text(), re.M)
PLACE = {
    name: (line, column)
    for line, names in enumerate(LAYERS)
    for column, name in enumerate(re.findall(r"`(\w+)/?`", names))
}
FILES = sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")
TOP = PLACE["torch"][0]


def part_of(path: Path) -> str:
    """Return the name in the table that a file belongs to."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, part) for each import of nc10d that is there at run time."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"line {node.lineno}: imports are absolute"
            if node.module == FRONT:
                yield from ((node.lineno, f"{FRONT}.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, node.module or ""
        yield from imports(node)


def used(path: Path) -> list[tuple[int, str]]:
    found = imports(ast.parse(path.read_text()))
    return [
        (line, name.split(".")[1] if "." in name else FRONT)
        for line, name in found
        if name.partition(".")[0] == FRONT
    ]


def allowed(user: str, name: str) -> bool:
    """Say whether `user` may import `name`."""
    if user == name:
        return True
    if name not in PLACE:
        return PLACE[user][0] == TOP  # the front door, for the tools on top
    return PLACE[user][0] == TOP or PLACE[name] < PLACE[user]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_imports_only_from_above_or_left(path: Path) -> None:
    user = part_of(path)
    assert user in PLACE, f"{user} has no place in the table of layers"
    wrong = [(line, name) for line, name in used(path) if not allowed(user, name)]
    assert not wrong, f"{user} may not import: {wrong}"


def test_the_law_can_fail() -> None:
    assert not allowed("group", "api")
    assert not allowed("reducer", "testing")
    assert not allowed("buffer", "arguments")
    assert allowed("api", "group")
    assert allowed("testing", "bench")
    bad = ast.parse("def f():\n    from nc10d.group.process_group import x\n")
    assert list(imports(bad)) == [(2, "nc10d.group.process_group")]


def test_what_has_a_place_is_there() -> None:
    assert set(PLACE) == {part_of(path) for path in FILES}


def packages(tree: ast.AST) -> set[str]:
    """Return the top-level packages that are imported anywhere in a tree."""
    named = [
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    ]
    named += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in named}


ADAPTERS = {"torch", "bench", "debug"}


def test_only_the_adapter_imports_torch() -> None:
    for path in FILES:
        if part_of(path) not in ADAPTERS:
            assert "torch" not in packages(ast.parse(path.read_text())), path


@pytest.mark.parametrize("line", ["import torch", "import torch.nn as nn", "from torch import nn"])
def test_every_way_to_import_torch_is_seen(line: str) -> None:
    assert packages(ast.parse(f"def f():\n    {line}")) == {"torch"}
