"""A reduction of one's own: a Python function of two elements, as data.

An `OwnReduction` names the functions, the elements that they are for, and a digest that ranks
compare. Nothing is compiled here (`nc10d.kernels.own` does). The functions are frozen: what they
close over, and the globals that they read, are copied when the reduction is made.
"""

from __future__ import annotations

import builtins
import dis
import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any, TypeAlias

import numpy as np

Function: TypeAlias = Callable[..., Any]
Place: TypeAlias = tuple[np.dtype[Any], int]
"""An array's dtype and last dimension."""
Elements: TypeAlias = Callable[..., np.dtype[Any] | None]
"""From an array's Place, or those of several arrays with a field each, to the dtype of an element.

None if the reduction takes no such arrays.
"""
MOST_BYTES = 520
"""The most bytes of a record that a function combines."""


@dataclass(frozen=True, slots=True, eq=False)
class OwnReduction:
    """The functions of a reduction, by the part that each has: "step", "map" or "finish".

    `elements` says which arrays the reduction takes, `takes` describes them in words. `identity` is
    the neutral element, or None. `where` is the function's file and line. `made` has module, name
    and arguments by which another process finds a ready-made reduction.
    """

    name: str
    functions: dict[str, Function]
    elements: Elements
    takes: str
    identity: Any
    digest: str
    where: str
    made: tuple[str, str, tuple[Any, ...]] | None = None

    def element(self, *places: Place) -> np.dtype[Any]:
        """Return the dtype of the elements in an array, or in several with a field each.

        TypeError for arrays that the reduction does not take.
        """
        found = self.elements(*places)
        if found is None or found.itemsize > MOST_BYTES:
            given = " and ".join(f"{dtype} (last dimension {last})" for dtype, last in places)
            raise TypeError(f"{self.name} reduces {self.takes}; not arrays of {given}")
        return found


def field_dtypes(places: Sequence[Place], shapes: list[Any], rows: bool) -> list[np.dtype[Any]]:
    """Return the dtypes of fields in arrays with a field each, or in rows of numbers if `rows`.

    The list is empty for other arrays.
    """
    counts = [math.prod(shape) for shape in shapes]
    if len(places) == 1:
        return [places[0][0]] * len(shapes) if rows and places[0][1] == sum(counts) else []
    parts = zip(shapes, counts, places, strict=False)
    fit = len(places) == len(shapes) and all(not shape or n == at for shape, n, (_, at) in parts)
    return [dtype for dtype, _ in places] if fit else []


def own_reduction(
    functions: dict[str, Function],
    elements: Elements,
    takes: str,
    identity: Any,
    key: object,
    name: str = "",
    made_by: tuple[str, str, tuple[Any, ...]] | None = None,
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
    return OwnReduction(name, dict(frozen), elements, takes, identity, digest, where, made_by)


def _frozen(function: Any, made: list[FunctionType]) -> FunctionType:
    """Return a copy that no later change reaches; TypeError unless this is a Python function.

    Adds the copy, and those of the functions that it calls, to `made`.
    """
    if not isinstance(function, FunctionType):
        raise TypeError(f"a reduction is a Python function, got {function!r}")
    _check_code(function)
    try:
        copy = copied(function, lambda called: _frozen(called, made))
    except RecursionError:
        raise TypeError(f"{function.__name__} calls functions that call each other") from None
    made.append(copy)
    return copy


def copied(function: FunctionType, replace: Callable[[FunctionType], Any]) -> FunctionType:
    """Return a copy of a function with globals and cells of its own.

    The functions that it calls, also those that Numba has compiled, are replaced by
    `replace(called)`.
    """
    # This module's name: the compiled code is kept for programs that lack the function's module.
    names = {"__builtins__": vars(builtins), "__name__": __name__}
    cells = tuple(CellType() for _ in function.__closure__ or ())
    code = function.__code__
    copy = FunctionType(code, names, function.__name__, function.__defaults__, cells)
    copy.__qualname__, copy.__kwdefaults__ = function.__qualname__, function.__kwdefaults__

    def kept(value: Any) -> Any:
        inner = getattr(value, "py_func", value)
        if inner is function:
            return copy
        if isinstance(value, np.ndarray):
            return value.copy()
        if type(value) is tuple:
            return tuple(map(kept, value))
        return replace(inner) if isinstance(inner, FunctionType) else value

    names.update({name: kept(value) for name, value in _globals_of(function).items()})
    for cell, old in zip(cells, function.__closure__ or (), strict=True):
        cell.cell_contents = kept(old.cell_contents)
    return copy


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of a function, and of those inside."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _globals_of(function: FunctionType) -> dict[str, Any]:
    """Return the globals that a function reads, also in functions inside; no builtins."""
    reads = {
        each.argval
        for code in _codes(function.__code__)
        for each in dis.get_instructions(code)
        if each.opname == "LOAD_GLOBAL"
    }
    return {name: x for name, x in function.__globals__.items() if name in reads}


def _check_code(function: FunctionType) -> None:
    """Raise TypeError for writes to what is frozen, imports, and ints that Numba cuts."""
    own = set(function.__code__.co_freevars)
    for code in _codes(function.__code__):
        constants: list[int] = []
        for each in dis.get_instructions(code):
            name, closed = each.argval, each.opname in ("STORE_DEREF", "DELETE_DEREF")
            if each.opname in ("STORE_GLOBAL", "DELETE_GLOBAL") or (closed and name in own):
                raise TypeError(f"{function.__name__} writes to {name}, which is frozen")
            if each.opname == "IMPORT_NAME":
                raise TypeError(f"{function.__name__} imports {name}: import it outside")
            if each.opname.startswith("LOAD_") and type(name) is int:
                constants.append(name)
            elif each.argrepr == "**" and len(constants) > 1:  # what Python has not folded
                constants = [constants[-2] ** min(constants[-1], 64)]
            else:
                constants.clear()
            for value in constants[-1:]:
                _check_int(function, value)


def _check_int(function: FunctionType, value: int) -> None:
    if not -(2**63) <= value < 2**64:
        raise TypeError(f"{function.__name__} reads an int of more than 64 bits")


def _function_text(function: FunctionType) -> str:
    """Return all that the function's results depend on, as text; the same on every rank."""
    code = function.__code__
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    values = _globals_of(function) | {name: cell.cell_contents for name, cell in cells}
    if any(value is np for value in values.values()) and "random" in code.co_names:
        raise TypeError(f"{function.__name__} uses numpy.random: ranks would not agree")
    read = [(name, _value_text(function, name, value)) for name, value in sorted(values.items())]
    return repr((_code_text(code), function.__defaults__, read))


def _code_text(code: CodeType) -> tuple[Any, ...]:
    constants = [_code_text(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts]
    return code.co_code, code.co_names, constants


_MOST_TABLE = 10**6
"""The most bytes that Numba keeps in code."""
_KNOWN_MODULES = {"math", "cmath", "operator", "numpy"}
"""The modules whose functions and types are the same on every rank."""


def _value_text(reader: FunctionType, name: str, value: Any) -> str:
    if isinstance(value, (np.ndarray, np.generic)):
        if value.nbytes > _MOST_TABLE:
            raise TypeError(
                f"{reader.__name__} reads {name}, an array of more than {_MOST_TABLE} bytes"
            )
        clean = np.zeros(value.shape, value.dtype)  # also the bytes between fields
        clean[...] = value
        return repr((str(value.dtype), value.shape, clean.tobytes()))
    if isinstance(value, tuple):
        return repr([_value_text(reader, name, each) for each in value])
    if isinstance(value, FunctionType):
        return value.__name__ if value is reader else _function_text(value)
    if type(value) is int:
        _check_int(reader, value)
    if type(value) in (bool, int, float, complex, str, bytes, type(None)):
        return repr(value)
    home = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", "")
    if home in _KNOWN_MODULES | {"builtins"} and hasattr(value, "__name__"):
        return f"{home}.{value.__name__}"
    if isinstance(value, np.ufunc):
        return f"numpy.{value.__name__}"
    kind = f"the module {home}" if isinstance(value, ModuleType) else f"a {type(value).__name__}"
    raise TypeError(
        f"{reader.__name__} reads {name}, {kind}, which ranks can't compare: give it the values"
    )
