"""`@reduction`: a reduction of one's own, from a Python function of two elements."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import numpy as np
import numpy.typing as npt

from nc10d.arrays.dtypes import DType, ElementType, RecordType, element_of
from nc10d.kernels.reduce import kernel_address
from nc10d.ops import ReduceOp
from nc10d.ops.own_reductions import Elements, Function, Place, field_dtypes, own_reduction
from nc10d.ops.reductions import kind_of_own


def reduction(
    dtype: npt.DTypeLike,
    *,
    map: Function | None = None,
    finish: Function | None = None,
    identity: Any = None,
    any_order: bool = False,
) -> Callable[[Function], ReduceOp]:
    """Make a function of two elements a reduction: an `op=` for arrays of `dtype`.

        Best = np.dtype([("value", "f4"), ("token", "i4")])

        @nc10d.reduction(Best)
        def best(a, b):
            return b if b.value > a.value else a

        dist.all_reduce(x, op=best)  # x.dtype is Best

    The elements are folded in rank order, ((r0, r1), r2), ...: the function must be associative,
    and need not be commutative. Numba compiles the function, and keeps it on disk. `map(a)` is
    applied to each contribution, `finish(a)` to the result; `identity` is the neutral element, for
    `exscan`. All are of `dtype`. `any_order` promises that no order of the elements changes a bit
    of the result: then hosts fold first, and MPI runs the function as an MPI_Op.

    An element is a number, or a record of at most 520 bytes, whose fields are attributes. The
    function returns one of its arguments, a number, or a tuple with all fields. With a third
    parameter it writes to that record, which begins as a copy of the first: for fields that are
    arrays. Floats narrower than float32 are computed in float32. An array of numbers may stand for
    records with fields of that type, if its last dimension has as many.

    Ranks compare the functions by bytecode, constants, closed-over values and dtype, all of them
    frozen now; a difference is a CollectiveMismatch. TypeError, which quotes the line, for a
    function that Numba can't compile, or that raises, allocates or calls the interpreter.
    """
    if isinstance(dtype, FunctionType):
        raise TypeError("reduction needs the elements' dtype: @nc10d.reduction('f4')")
    label = str(dtype).removeprefix("torch.")
    named = next((each for each in DType if each.label == label), None)
    element = named or element_of(np.dtype(dtype))

    def decorate(function: Function) -> ReduceOp:
        given = {"step": function, "map": map, "finish": finish}
        functions = {part: each for part, each in given.items() if each is not None}
        neutral = None if identity is None else _neutral(identity, element)
        key = element.code, any_order, None if neutral is None else neutral.tobytes()
        own = own_reduction(functions, _elements(element), element.label, neutral, key)
        made = ReduceOp(kind_of_own(own, any_order))
        for part in functions:
            kernel_address(made.kind.compared + f"/{part}" * (part != "step"), element)
        return made

    return decorate


def _neutral(identity: Any, element: ElementType) -> Any:
    """Return the identity as an array; ValueError if that is no element, or changes an int."""
    given = identity.tolist() if isinstance(identity, (np.generic, np.ndarray)) else identity
    try:
        with np.errstate(over="raise"):
            found = np.zeros((), element.numpy)  # also the bytes between fields
            found[...] = np.array(given, element.numpy)
        parts = [found[name] for name in element.numpy.names or ()] or [found]
        values = given if isinstance(given, tuple) and len(parts) > 1 else [given] * len(parts)
        ints = [(x, y) for x, y in zip(parts, values, strict=True) if x.dtype.kind in "biu"]
        fits = found.shape == () and all(np.all(x == y) for x, y in ints)
    except (TypeError, ValueError, OverflowError, FloatingPointError):
        fits = False
    if not fits:
        raise ValueError(f"identity must be an element of {element.label}, got {identity!r}")
    return found


def _elements(element: ElementType) -> Elements:
    """Return the function that sees arrays of `element`, rows of numbers, or fields as elements."""
    wanted = element.numpy
    fields = [wanted[name] for name in wanted.names or ()]
    dtypes, shapes = [field.base for field in fields], [field.shape for field in fields]
    rows = isinstance(element, RecordType) and not element.padded

    def elements(*places: Place) -> np.dtype[Any] | None:
        if [dtype for dtype, _ in places] == [wanted]:
            return wanted
        return wanted if fields and field_dtypes(places, shapes, rows) == dtypes else None

    return elements
