"""A reduction of one's own: a Python function of two elements, as data.

An `OwnReduction` names the functions, the elements that they are for, and a digest that ranks
compare. Nothing is compiled here (`nc10d.kernels.own` does). The functions are frozen: what they
close over, and the globals that they read, are copied when the reduction is made.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType
from typing import Any, TypeAlias

import numpy as np

Function: TypeAlias = Callable[..., Any]
Place: TypeAlias = tuple[np.dtype[Any], int]
"""An array's dtype and last dimension."""
Elements: TypeAlias = Callable[..., np.dtype[Any] | None]
"""From an array's Place, or those of several arrays with a field each, to the dtype of an element.

None if the reduction takes no such arrays.
"""


@dataclass(frozen=True, slots=True, eq=False)
class OwnReduction:
    """The functions of a reduction, by the part that each has: "step", "map" or "finish".

    `elements` says which arrays the reduction takes, `takes` is the same in words. `identity` is
    the neutral element, or None. `where` is the function's file and line.
    """

    name: str
    functions: dict[str, Function]
    elements: Elements
    takes: str
    identity: Any
    digest: str
    where: str

    def element(self, *places: Place) -> np.dtype[Any]:
        """Return the dtype of the elements in an array, or in several with a field each.

        TypeError for arrays that the reduction does not take.
        """
        found = self.elements(*places)
        if found is None:
            given = " and ".join(f"{dtype} (last dimension {last})" for dtype, last in places)
            raise TypeError(f"{self.name} reduces {self.takes}, not arrays of {given}")
        return found


def own_reduction(
    functions: dict[str, Function],
    elements: Elements,
    takes: str,
    identity: Any,
    key: object,
    name: str = "",
) -> OwnReduction:
    """Return the reduction by `functions`, frozen; `key` is part of the digest.

    Without a name the reduction has that of its step. TypeError if a function reads a value that
    ranks can't compare.
    """
    made: list[FunctionType] = []
    frozen = {part: _frozen(function, made) for part, function in functions.items()}
    text = repr((key, identity, sorted((p, _function_text(f)) for p, f in frozen.items())))
    digest = hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
    for number, function in enumerate(made):
        # A name in memory: object files that are loaded side by side share a table of symbols.
        function.__qualname__ = f"{function.__name__}_{digest}_{number}"
    code = frozen["step"].__code__
    where = f"{Path(code.co_filename).name}:{code.co_firstlineno}"
    name = name or frozen["step"].__name__
    return OwnReduction(name, dict(frozen), elements, takes, identity, digest, where)


def _frozen(function: Any, made: list[FunctionType]) -> FunctionType:
    """Return a copy that no later change reaches; TypeError unless this is a Python function.

    Adds the copy, and those of the functions that it calls, to `made`.
    """
    if not isinstance(function, FunctionType):
        raise TypeError(f"a reduction is a Python function, got {function!r}")
    copy = copied(function, lambda called: _frozen(called, made))
    made.append(copy)
    return copy


def copied(function: FunctionType, replace: Callable[[FunctionType], Any]) -> FunctionType:
    """Return a copy of a function with globals and cells of its own.

    The functions that it calls are replaced by `replace(called)`.
    """
    names = {name: function.__globals__.get(name) for name in ("__builtins__", "__name__")}
    cells = tuple(CellType() for _ in function.__closure__ or ())
    code = function.__code__
    copy = FunctionType(code, names, function.__name__, function.__defaults__, cells)
    copy.__qualname__, copy.__kwdefaults__ = function.__qualname__, function.__kwdefaults__

    def kept(value: Any) -> Any:
        if value is function:
            return copy
        return replace(value) if isinstance(value, FunctionType) else value

    seen = inspect.getclosurevars(function).globals
    names.update({name: kept(value) for name, value in seen.items()})
    for cell, old in zip(cells, function.__closure__ or (), strict=True):
        cell.cell_contents = kept(old.cell_contents)
    return copy


def _function_text(function: FunctionType) -> str:
    """Return all that the function's results depend on, as text; the same on every rank."""
    seen = inspect.getclosurevars(function)
    values = sorted({**seen.globals, **seen.nonlocals}.items())
    read = [(name, _value_text(function, name, value)) for name, value in values]
    return repr((_code_text(function.__code__), function.__defaults__, read))


def _code_text(code: CodeType) -> tuple[Any, ...]:
    constants = [_code_text(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts]
    return code.co_code, code.co_names, constants


def _value_text(reader: FunctionType, name: str, value: Any) -> str:
    if isinstance(value, np.ndarray):
        return repr((str(value.dtype), value.shape, value.tobytes()))
    if isinstance(value, tuple):
        return repr([_value_text(reader, name, each) for each in value])
    if isinstance(value, int | float | complex | str | bytes | type(None) | np.generic):
        return repr(value)
    if isinstance(value, ModuleType | BuiltinFunctionType | type | np.ufunc):
        return f"{getattr(value, '__module__', '')}.{value.__name__}"
    inner = getattr(value, "py_func", value)  # Numba's functions
    if isinstance(inner, FunctionType):
        return inner.__qualname__ if inner is reader else _function_text(inner)
    message = f"{reader.__name__} reads {name}, a {type(value).__name__}, which ranks can't compare"
    raise TypeError(message)
