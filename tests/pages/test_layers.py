"""A module imports only from lines above its own, or from its left in the same line.

Two tables in docs/design.md give the order: for the folders and files of nc10d, and for those of
backend/cpu. All imports count, also inside functions and for types only. Tests mirror
the package's folders, and no module of tests is imported by another.
"""

import ast
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

import nc10d
from nc10d.kernels.cache_dir import SOURCES, matching

PACKAGE = Path(nc10d.__file__).parent
CPU = PACKAGE / "backend" / "cpu"
ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
DESIGN = ROOT / "docs" / "design.md"
FILES = sorted(PACKAGE.rglob("*.py"))
ADAPTERS = {"torch"}
MOST_MODULES = 15
"""Most modules in a folder, so that a reader can keep them in mind."""
LARGE = {"backend/cpu/native", "store"}
"""Folders that may have more: the compiled engine, and a protocol with all of its stores."""

OF_NO_FOLDER = {"emulators", "faults", "pages"}
"""Folders of tests that mirror no folder of the package."""
OF_NO_MODULE = {"test_closed_descriptors.py"}
"""Loose tests of no single module: the library, its store and its launcher together."""

ENTRIES = {"nc10d"}
"""The module that leads to the layers above: the public names."""
BELOW_TESTING = 7
"""The layers below the test kit's: they know nothing of the kit, not even its name."""
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

Place = tuple[int, int]


def table(kind: str) -> dict[str, Place]:
    """Return line and column of each name in the table whose lines begin with `kind`."""
    lines = re.findall(rf"^\| {kind} \d+ \| (.+?) \|", DESIGN.read_text(), re.M)
    return {
        name: (line, column)
        for line, names in enumerate(lines)
        for column, name in enumerate(re.findall(r"`(\w+)/?`", names))
    }


def module_of(path: Path) -> str:
    parts = ["nc10d", *path.relative_to(PACKAGE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in FILES}


def imports(tree: ast.AST, module: str = "") -> Iterator[str]:
    """Yield the modules of nc10d that a file imports anywhere."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("nc10d"))
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module}, line {node.lineno}: imports are absolute"
            base = node.module or ""
            if base.split(".")[0] == "nc10d":
                for alias in node.names:
                    inner = f"{base}.{alias.name}"
                    yield inner if inner in MODULES else base
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "import_to_end":
            yield from (at.value for at in node.args if isinstance(at, ast.Constant))


@cache
def graph() -> dict[str, set[str]]:
    """Return the modules that each module imports."""
    return {
        module: {name for name in imports(ast.parse(path.read_text()), module) if name != module}
        for module, path in MODULES.items()
        if module not in ENTRIES
    }


def cycle(arrows: Mapping[str, Iterable[str]]) -> list[str]:
    """Return the names on a cycle of arrows; empty if there is none.

    >>> cycle({"a": ["b"], "b": ["c"], "c": ["b"]})
    ['b', 'c']
    """
    done: set[str] = set()
    path: list[str] = []

    def visit(name: str) -> list[str]:
        if name in path:
            return path[path.index(name) :]
        if name in done:
            return []
        path.append(name)
        for target in sorted(arrows.get(name, ())):
            if found := visit(target):
                return found
        path.pop()
        done.add(name)
        return []

    return next((found for name in sorted(arrows) if (found := visit(name))), [])


def between(folder: Path, depth: int) -> dict[str, set[str]]:
    """Return the arrows between the parts of a folder: its files and the folders in it."""
    prefix = module_of(folder / "__init__.py") + "."
    arrows: dict[str, set[str]] = {}
    for module, targets in graph().items():
        if module.startswith(prefix):
            name = module.split(".")[depth]
            inside = {target.split(".")[depth] for target in targets if target.startswith(prefix)}
            arrows.setdefault(name, set()).update(inside - {name})
    return arrows


def wrong(arrows: Mapping[str, set[str]], places: Mapping[str, Place]) -> list[str]:
    """Return the arrows that point to a line below, or to the right on the same line."""
    return [
        f"{name} -> {target}"
        for name, targets in arrows.items()
        for target in targets
        if places[target] >= places[name]
    ]


FOLDERS = {"layer": PACKAGE, "cpu layer": CPU}


@pytest.mark.parametrize("kind", FOLDERS)
def test_every_part_has_a_place_and_imports_from_above_or_left(kind: str) -> None:
    folder = FOLDERS[kind]
    depth = len(folder.relative_to(PACKAGE).parts) + 1
    arrows, places = between(folder, depth), table(kind)
    assert set(places) == set(arrows) | {t for targets in arrows.values() for t in targets}
    assert wrong(arrows, places) == []


def test_imports_between_files_have_no_cycle() -> None:
    assert cycle(graph()) == []


@pytest.mark.parametrize(
    "folder", sorted({path.parent for path in FILES}), ids=lambda p: str(p.relative_to(PACKAGE))
)
def test_imports_between_the_parts_of_a_folder_have_no_cycle(folder: Path) -> None:
    assert cycle(between(folder, len(folder.relative_to(PACKAGE).parts) + 1)) == []


@pytest.mark.parametrize(
    "folder", sorted({path.parent for path in FILES}), ids=lambda p: str(p.relative_to(PACKAGE))
)
def test_a_folder_has_few_modules(folder: Path) -> None:
    name = str(folder.relative_to(PACKAGE))
    modules = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
    if name not in LARGE:
        assert len(modules) <= (10 if folder == PACKAGE else MOST_MODULES), name


def by_string(source: str) -> list[str]:
    """Return what a file names by strings: modules of nc10d that it imports, and the test kit."""
    imported = re.findall(r"\bimport_module\(f?\"nc10d\b", source)
    return imported + re.findall(r"\bnc10d[./]testing\b|\"testing\"", source)


def test_lower_layers_import_no_module_by_string_and_do_not_know_the_test_kit() -> None:
    low = {name for name, (line, _) in table("layer").items() if line < BELOW_TESTING}
    for module, path in MODULES.items():
        if {*module.split(".")[1:2]} & low:
            assert by_string(path.read_text()) == [], module
    for found in ('import_module("nc10d.api")', 'import_module(f"nc10d.{x}")', '"nc10d/testing/"'):
        assert by_string(found), found


def test_the_law_can_fail() -> None:
    places = {"low": (0, 0), "left": (1, 0), "right": (1, 1)}
    assert wrong({"right": {"left", "low"}}, places) == []
    assert wrong({"left": {"right"}, "low": {"left"}}, places) == ["left -> right", "low -> left"]
    inside = "def f():\n    from nc10d.group import dispatch\n    import_to_end('nc10d.cuda')\n"
    typed = "if TYPE_CHECKING:\n    import nc10d.work\n"
    found = ["nc10d.cuda", "nc10d.group.dispatch", "nc10d.work"]
    assert sorted(imports(ast.parse(inside + typed))) == found
    assert cycle({"a": ["b"], "b": ["a"]}) == ["a", "b"]


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


def test_only_the_adapter_imports_torch() -> None:
    for path in FILES:
        if path.relative_to(PACKAGE).parts[0] not in ADAPTERS:
            assert "torch" not in packages(ast.parse(path.read_text())), path


def test_the_package_needs_nothing_that_is_not_installed() -> None:
    for path in FILES:
        found = packages(ast.parse(path.read_text()))
        assert not found & {"benchmarks", "simulation", "tests", "tools"}, path


@pytest.mark.parametrize("line", ["import torch", "import torch.nn as nn", "from torch import nn"])
def test_every_way_to_import_torch_is_seen(line: str) -> None:
    assert packages(ast.parse(f"def f():\n    {line}")) == {"torch"}


def test_one_module_reads_the_clocks() -> None:
    """Other readers see a clock that a library for tests has stopped."""
    names = [
        "monotonic",
        "monotonic_ns",
        "perf_counter",
        "perf_counter_ns",
        "time",
        "time_ns",
        "clock_gettime",
    ]
    clocks = re.compile(rf"\btime\.({'|'.join(names)})\b")
    readers = set[str]()
    for module, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            used = isinstance(node, ast.Attribute) and clocks.fullmatch(ast.unparse(node))
            named = isinstance(node, ast.ImportFrom) and node.module == "time"
            if used or (named and {alias.name for alias in node.names} & names):
                readers.add(module)
    assert readers == {"nc10d.base.deadline"}


def test_a_call_imports_by_import_to_end() -> None:
    """Imports of programs, of tests, and in functions that torch.compile traces may be cut."""
    free = {"testing", "run", "bench", "warmup", "nc10d.store.server_process"}
    free |= {"nc10d.torch.compiling.rewriting"}
    for module, path in MODULES.items():
        if {module, *module.split(".")[1:2]} & free:
            continue
        functions = (
            node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, FUNCTIONS)
        )
        inside = {name for function in functions for name in packages(function)}
        inside -= sys.stdlib_module_names
        # `import_to_end` itself is imported by a statement.
        assert inside <= ({"nc10d"} if module in ENTRIES else set()), module


def test_compiled_code_reaches_only_the_sources_that_name_its_cache() -> None:
    """A constant of any other module could change, and old machine code would go on with it."""
    sources = {module_of(path) for path in matching(PACKAGE, SOURCES)}
    compiling = [
        module
        for module, path in MODULES.items()
        if re.search(r"^@(compiled|compiled_callback|on_demand|njit)\b", path.read_text(), re.M)
    ]
    assert len(compiling) > 20
    for module in compiling:
        reached = {name for name in graph()[module] if not name.startswith("nc10d.base.")}
        assert reached <= sources | {"nc10d.errors"}, module


def misplaced(tests: Iterable[str]) -> list[str]:
    """Return the files of tests, relative to tests/, that mirror nothing of the package."""

    def mirrors(folder: str, name: str) -> bool:
        if folder:
            return folder in OF_NO_FOLDER or (PACKAGE / folder).is_dir()
        return name in OF_NO_MODULE or (PACKAGE / name.removeprefix("test_")).exists()

    split = (test.rpartition("/") for test in tests)
    return [folder + slash + name for folder, slash, name in split if not mirrors(folder, name)]


def test_tests_mirror_the_package() -> None:
    assert misplaced(str(path.relative_to(TESTS)) for path in TESTS.rglob("test_*.py")) == []
    lost = ["test_group.py", "objects/test_codec.py", "calls/test_work.py"]
    assert misplaced(["test_work.py", "backend/cpu/test_arena.py", *lost]) == lost


def test_no_module_of_tests_is_imported_by_another() -> None:
    for path in TESTS.rglob("*.py"):
        found = packages(ast.parse(path.read_text()))
        assert not {name for name in found if name.startswith("test_")}, path
