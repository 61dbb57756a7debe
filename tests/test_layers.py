"""A module imports only from lines above its own, or from its left: the table is the law.

Imports inside functions and under TYPE_CHECKING count too, except that types may point anywhere.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import nc10d

# One line per layer, lowest first; on a line, what stands right may use what stands left of it.
# A name stands for the module or for everything inside the package of that name.
LAYERS = """
    errors deadline debugging
    ops dtypes codec buffer views arguments validate kernels cuda
    outcome work handshake auth control
    store launchers rendezvous
    backend
    batch collectives point_to_point members dispatch group observe
    world coalesce queries subgroups shrink mesh
    api p2p registered monitoring parcels objects deferred functional join reducer
    torch optim testing run bench debug warmup
"""
# The public names are for users: nobody inside goes through the front door.
FRONT = "nc10d"

PLACE = {
    name: (line, column)
    for line, names in enumerate(LAYERS.split("\n"))
    for column, name in enumerate(names.split())
}
ROOT = Path(nc10d.__file__).parent
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
    bad = ast.parse("def f():\n    from nc10d.group import x\n")
    assert list(imports(bad)) == [(2, "nc10d.group")]


def test_only_the_adapter_imports_torch() -> None:
    for path in FILES:
        names = {
            alias.name.partition(".")[0]
            for node in ast.walk(ast.parse(path.read_text()))
            for alias in getattr(node, "names", [])
            if isinstance(node, ast.Import)
        }
        assert "torch" not in names or part_of(path) in {
            "torch",
            "optim",
            "testing",
            "bench",
            "debug",
        }, path
