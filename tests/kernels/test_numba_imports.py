"""Numba's imports: two threads that import its parts at once would meet half of a module."""

import ast
from pathlib import Path

import nc10d


def whole_before_parts(source: str) -> bool:
    """Whether the first import is of `numba` itself, which waits for another thread's import."""
    for each in ast.walk(ast.parse(source)):
        modules = []
        if isinstance(each, ast.Import):
            modules = [alias.name for alias in each.names]
        elif isinstance(each, ast.ImportFrom) and each.level == 0:
            modules = [each.module or ""]
        for module in modules:
            if module.partition(".")[0] == "numba":
                return module == "numba"
    return True


def test_every_module_imports_numba_before_parts_of_it() -> None:
    assert not whole_before_parts("from numba.core import config\nimport numba")
    files = Path(nc10d.__file__).parent.rglob("*.py")
    assert [file for file in files if not whole_before_parts(file.read_text())] == []
