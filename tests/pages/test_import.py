"""`import nc10d` costs nothing, and the public names are all there."""

import importlib
import re
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path
from types import ModuleType

import pytest

import nc10d

# Modules that an import of the package itself must not import.
_HEAVY_NAMES = "numba asyncio ml_dtypes torch socket selectors multiprocessing numpy"
HEAVY = _HEAVY_NAMES.split()
ROOT = Path(__file__).parents[2]
TORCH = any(found.name == "torch" for found in distributions())


def fresh(code: str) -> str:
    """Run `code` in a new interpreter; return its output."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=240
    )
    return done.stdout.strip()


def test_importing_nc10d_imports_one_module_and_starts_no_thread() -> None:
    code = f"""
import nc10d, os, sys
print([m for m in {HEAVY} if m in sys.modules], len(os.listdir("/proc/self/task")))
print(*(m for m in sys.modules if m.startswith("nc10d.")))"""
    assert fresh(code).splitlines() == ["[] 1", "nc10d.base nc10d.base.run_to_end"]


def test_the_calls_themselves_import_neither_numba_nor_asyncio() -> None:
    heavy = ["numba", "asyncio", "ml_dtypes", "torch"]
    code = f"""
import sys
from nc10d import all_reduce, coalescing_manager, new_group, P2POp, Work
print([m for m in {heavy} if m in sys.modules])"""
    assert fresh(code) == "[]"


def test_every_public_name_is_there() -> None:
    for name in nc10d.__all__:
        assert getattr(nc10d, name) is not None


def test_dir_has_the_public_names_and_no_others() -> None:
    """Also after an import of every module, and of the modules that typing needs."""
    listed = {name for name in dir(nc10d) if name != "__version__"}
    assert listed >= {name for name in nc10d.__all__ if not name.startswith("_")}
    modules = {"cuda", "device_mesh", "distributed_c10d", "exact", "functional", "group", "nccl"}
    modules |= {"numba", "observe"}
    assert listed - set(nc10d.__all__) == modules
    assert not [name for name in listed if name.startswith("_")]


def test_no_public_name_becomes_a_module() -> None:
    """Names stay what they are after an import of every module, as `rendezvous` once did not."""
    code = """
import contextlib, importlib, pkgutil, types, nc10d, nc10d.reducer
for found in pkgutil.walk_packages(nc10d.__path__, "nc10d."):
    if not found.name.endswith("__main__"):
        with contextlib.suppress(ImportError, nc10d.UnsupportedPlatform):
            importlib.import_module(found.name)
packages = [nc10d, nc10d.reducer]
names = [(package, name) for package in packages for name in package.__all__]
print([name for package, name in names if isinstance(getattr(package, name), types.ModuleType)])
print([name for package, name in names if name in vars(package) and getattr(package, name) is not
    getattr(importlib.import_module(f"{package.__name__}.{package._HOME[name]}"), name)])"""
    assert fresh(code).split() == ["[]", "[]"]


def test_no_package_has_a_name_and_a_module_of_that_name() -> None:
    """An import of the module would replace the name."""
    root = Path(nc10d.__file__).parent
    for init in root.rglob("__init__.py"):
        folder = init.parent
        package = ".".join(("nc10d", *folder.relative_to(root).parts))
        # They import what need not be there; a folder tests/torch passes for a package.
        if folder.name in ("torch", "mpi") or (".torch." in package and not TORCH):
            continue
        modules = {path.stem for path in folder.glob("*.py")}
        modules |= {path.parent.name for path in folder.glob("*/__init__.py")}
        found = importlib.import_module(package)
        both = modules & {*getattr(found, "__all__", ())}
        assert all(isinstance(getattr(found, name), ModuleType) for name in both), package


def test_names_of_the_reducer_are_imported_on_first_use() -> None:
    names = """Reducer ReducerOptions GradBucket Logger SparseGradient CommHook
        compute_bucket_assignment_by_size"""
    code = f"""
import sys, nc10d.reducer
print([m for m in sys.modules if m.startswith("nc10d.reducer.")])
from nc10d.reducer import {", ".join(names.split())}
print(Reducer.__module__, set(nc10d.reducer.__all__) == set({names.split()}))"""
    assert fresh(code).split("\n") == ["[]", "nc10d.reducer.reducer True"]


SUBMODULES = ["observe.FlightRecorder", "functional.all_reduce", "cuda.stream", "exact.sum"]


@pytest.mark.parametrize("use", SUBMODULES)
def test_a_public_submodule_needs_no_import_of_its_own(use: str) -> None:
    assert fresh(f"import nc10d; print(nc10d.{use}.__module__)").startswith("nc10d.")
    assert use.partition(".")[0] in dir(nc10d)


@pytest.mark.slow
def test_a_module_that_a_page_names_can_be_imported_as_one() -> None:
    """The import gives the module that the attribute is."""
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    text = "".join(page.read_text() for page in pages if page.parent.name != "logs")
    named = {*re.findall(r"nc10d(?:\.[a-z_]\w*)+", text)}
    code = f"""
import importlib, operator, types, nc10d
{"import nc10d.torch" if TORCH else ""}
for name in {sorted(named)}:
    try:
        value = operator.attrgetter(name.partition(".")[2])(nc10d)
    except (AttributeError, ImportError, nc10d.UnsupportedPlatform):
        continue  # imported by its name alone, or for another machine
    if isinstance(value, types.ModuleType):
        assert importlib.import_module(name) is value, name
import nc10d.functional, nc10d.observe as observe
print(nc10d.functional.all_reduce.__name__, observe.FlightRecorder.__name__)"""
    assert fresh(code) == "all_reduce FlightRecorder"


def test_the_types_checker_and_the_table_of_names_agree() -> None:
    """The imports under TYPE_CHECKING are the names that `__getattr__` finds."""
    import ast

    tree = ast.parse(Path(nc10d.__file__).read_text())
    named = {
        (alias.asname or alias.name, node.module)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("nc10d.")
        for alias in node.names
    }
    named = {(name, home) for name, home in named if name not in nc10d._SUBMODULES}
    assert named == {(name, f"nc10d.{home}") for name, home in nc10d._HOME.items()}
    assert {name for name, _ in named} == set(nc10d.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(nc10d, "no_such_name")


def test_a_star_import_works_and_the_group_alias_answers_for_the_world() -> None:
    code = """
from nc10d import *
import nc10d as d
print(all_reduce.__module__, d.group.WORLD, d.GroupMember.WORLD, d.group.ProcessGroup.__module__)"""
    assert fresh(code) == "nc10d.api.calls None None nc10d.group.process_group"
