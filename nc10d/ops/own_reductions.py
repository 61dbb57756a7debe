"""A reduction of one's own: a Python function of two elements, as data.

An `OwnReduction` names the functions, the elements that they are for, and a digest that ranks
compare. Nothing is compiled here (`nc10d.kernels.own_reduce` does), and the functions are frozen:
what they close over, and the globals that they read, are copied when the reduction is made.
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
Elements: TypeAlias = Callable[[np.dtype[Any], int], np.dtype[Any] | None]
"""From an array's dtype and last dimension to the dtype of an element; None if it fits none."""


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

    def element(self, dtype: np.dtype[Any], row: int) -> np.dtype[Any]:
        """Return the dtype of the elements in an array whose last dimension is `row`.

        TypeError for arrays that the reduction does not take.
        """
        found = self.elements(dtype, row)
        if found is None:
            raise TypeError(f"{self.name} reduces {self.takes}, not arrays of {dtype}")
        return found


def own_reduction(
    functions: dict[str, Function], elements: Elements, takes: str, identity: Any, key: object
) -> OwnReduction:
    """Return the reduction by `functions`, frozen; `key` is part of the digest.

    TypeError if a function reads a value that ranks can't compare.
    """
    frozen = {part: _frozen(function) for part, function in functions.items()}
    text = repr((key, identity, sorted((p, _function_text(f)) for p, f in frozen.items())))
    digest = hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
    for function in frozen.values():
        # A name in memory: object files that are loaded side by side share a table of symbols.
        function.__qualname__ = f"{function.__name__}_{digest}"
    code = frozen["step"].__code__
    where = f"{Path(code.co_filename).name}:{code.co_firstlineno}"
    return OwnReduction(
        frozen["step"].__name__, dict(frozen), elements, takes, identity, digest, where
    )


def _frozen(function: Any) -> FunctionType:
    """Return a copy with cells and globals of its own; TypeError unless this is plain Python."""
    if not isinstance(function, FunctionType):
        raise TypeError(f"a reduction is a Python function, got {function!r}")
    seen = inspect.getclosurevars(function)
    names = {**seen.globals, "__builtins__": function.__globals__.get("__builtins__")}
    names["__name__"] = function.__globals__.get("__name__")
    cells = tuple(CellType(cell.cell_contents) for cell in function.__closure__ or ())
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, cells)
    copy.__kwdefaults__ = function.__kwdefaults__
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
