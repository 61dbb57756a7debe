"""Functions as bytes, by value: for functions that another process cannot import.

A function from a notebook, a REPL or another function has no name that a new process could import.
It is sent as code, with the values of the names that the code uses; a class by cloudpickle, where
that is installed. The bytes are unpickled and run as code, so they are for processes with the
same user and Python only: ranks for tests.
"""

from __future__ import annotations

import builtins
import importlib
import io
import marshal
import pickle
import sys
import types
from collections.abc import Iterator
from typing import Any

from nc10d.base.run_to_end import import_to_end, off_main


def dumps(value: Any, with_main: bool = False) -> bytes:
    """Pickle a value; functions that cannot be imported elsewhere go by value.

    `with_main` says that the other process has no `__main__` of this program. TypeError names a
    function, or a function's variable, that cannot be sent.
    """
    out = io.BytesIO()
    _Pickler(out, with_main).dump(value)
    return out.getvalue()


class _Pickler(pickle.Pickler):
    def __init__(self, out: io.BytesIO, with_main: bool) -> None:
        super().__init__(out, pickle.HIGHEST_PROTOCOL)
        main = sys.modules.get("__main__")
        # A started process runs the main file again, if there is one.
        self._no_main = with_main or getattr(main, "__file__", None) is None

    def reducer_override(self, obj: object) -> Any:
        if isinstance(obj, types.ModuleType):
            return importlib.import_module, (obj.__name__,)
        if isinstance(obj, types.FunctionType) and not self._importable(obj):
            return self._by_value(obj)
        if isinstance(obj, type) and not self._importable(obj):
            return _class_by_value(obj)
        return NotImplemented

    def _importable(self, obj: Any) -> bool:
        if obj.__module__ == "__main__" and self._no_main:
            return False
        found: Any = sys.modules.get(obj.__module__)
        for name in obj.__qualname__.split("."):
            found = getattr(found, name, None)
        return found is obj

    def _by_value(self, function: types.FunctionType) -> object:
        names = set(_names(function.__code__))
        state = {
            "globals": {k: v for k, v in function.__globals__.items() if k in names},
            "defaults": function.__defaults__,
            "kwdefaults": function.__kwdefaults__,
            "cells": [_content(cell) for cell in function.__closure__ or ()],
            "name": (function.__name__, function.__qualname__),
        }
        for variables in (state["globals"], state["cells"]):
            self._check(function, variables)
        code = marshal.dumps(function.__code__)
        made = (code, function.__module__, len(function.__closure__ or ()))
        # The state comes after the function itself, because it may contain the function.
        return _make, made, state, None, None, _set_state

    def _check(self, function: types.FunctionType, variables: Any) -> None:
        """Raise TypeError for a variable that does not pickle; functions are looked at later."""
        pairs = variables.items() if isinstance(variables, dict) else enumerate(variables)
        cells = function.__code__.co_freevars
        for key, value in pairs:
            if isinstance(value, (types.FunctionType, types.ModuleType, type)):
                continue
            try:
                dumps(value)
            except (TypeError, pickle.PicklingError, AttributeError, RecursionError) as error:
                name = key if isinstance(key, str) else cells[key]
                raise TypeError(
                    f"{function.__qualname__} cannot be sent to another process: it uses {name}, "
                    f"a {type(value).__name__} ({error})"
                ) from error


@off_main
def _class_by_value(kind: type) -> object:
    try:
        cloudpickle = import_to_end("cloudpickle")
    except ImportError:
        name = f"{kind.__module__}.{kind.__qualname__}"
        raise TypeError(
            f"class {name} cannot be sent to another process: put it in a module, or install "
            "cloudpickle"
        ) from None
    return pickle.loads, (cloudpickle.dumps(kind),)


class _Empty:
    """Stands for the missing value of a variable."""


def _content(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # the variable has no value yet
        return _Empty


def _names(code: types.CodeType) -> Iterator[str]:
    """Yield the global names that code may use, inner functions included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _make(code: bytes, module: str, cells: int) -> types.FunctionType:
    closure = tuple(types.CellType() for _ in range(cells))
    names: dict[str, Any] = {"__builtins__": builtins, "__name__": module}
    return types.FunctionType(marshal.loads(code), names, "", None, closure or None)


def _set_state(function: types.FunctionType, state: dict[str, Any]) -> None:
    function.__globals__.update(state["globals"])
    function.__defaults__ = state["defaults"]
    function.__kwdefaults__ = state["kwdefaults"]
    function.__name__, function.__qualname__ = state["name"]
    for cell, value in zip(function.__closure__ or (), state["cells"], strict=True):
        if value is not _Empty:
            cell.cell_contents = value
