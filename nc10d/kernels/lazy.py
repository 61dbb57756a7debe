"""Functions that are compiled when they are first used, not when their module is imported.

A program compiles only the functions that it uses: the first collective on a new machine waits for
its own functions alone. `every` lists all, to compile them ahead.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

from nc10d.kernels.cache import Signature, compiled, compiling, entry_point

EntryPoint = Callable[..., Any]
_signatures: dict[tuple[str, str], Signature] = {}


def on_demand(signature: Signature) -> Callable[[Callable[..., Any]], Any]:
    """Declare an entry point: `_name` here is compiled for `signature` when `module.name` is used.

    The module contains `__getattr__ = entry_points(__name__)`.
    """

    def declare(function: Any) -> Any:
        _signatures[function.__module__, function.__name__] = signature
        return function

    return declare


def entry_points(module: str) -> Callable[[str], EntryPoint]:
    """Return the `__getattr__` of a module of entry points (PEP 562); see `on_demand`."""

    def find(name: str) -> EntryPoint:
        signature = _signatures.get((module, f"_{name}"))
        if signature is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        names = vars(sys.modules[module])
        with compiling:
            if name not in names:  # another thread may have been faster
                names[name] = entry_point(compiled(signature)(names[f"_{name}"]))
        entry: EntryPoint = names[name]
        return entry

    return find


def every(module: str) -> Iterator[tuple[str, Callable[[], EntryPoint]]]:
    """Yield the name of each entry point of a module and the call that compiles it."""
    find = entry_points(module)
    for where, name in list(_signatures):
        if where == module:
            yield name, lambda name=name: find(name[1:])  # type: ignore[misc]
