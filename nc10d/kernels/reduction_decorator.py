"""`@reduction`: a reduction of one's own, from a Python function of two elements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from nc10d.arrays.dtypes import RecordType, element_of
from nc10d.kernels.reduce import kernel_address
from nc10d.ops import ReduceOp
from nc10d.ops.own_reductions import Elements, Place, own_reduction
from nc10d.ops.reductions import kind_of_own

Function = Callable[..., Any]


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
    element = element_of(np.dtype(dtype))

    def decorate(function: Function) -> ReduceOp:
        given = {"step": function, "map": map, "finish": finish}
        functions = {part: each for part, each in given.items() if each is not None}
        neutral = None if identity is None else np.array(identity, element.numpy)
        key = element.code, any_order, None if neutral is None else neutral.tobytes()
        own = own_reduction(functions, _elements(element.numpy), element.label, neutral, key)
        made = ReduceOp(kind_of_own(own, any_order))
        for part in functions:
            kernel_address(made.kind.compared + f"/{part}" * (part != "step"), element)
        return made

    return decorate


def _elements(wanted: np.dtype[Any]) -> Elements:
    """Return the function that sees arrays of `wanted`, rows of numbers, or fields as elements."""
    element = element_of(wanted)
    row = element.row if isinstance(element, RecordType) else None
    fields = element.fields if isinstance(element, RecordType) else ()
    parts = [(field.dtype.numpy, field.is_scalar, field.count) for field in fields]

    def elements(*places: Place) -> np.dtype[Any] | None:
        if len(places) > 1:
            pairs = zip(parts, places, strict=False)
            fits = len(places) == len(parts) and all(
                dtype == part[0] and (part[1] or last == part[2]) for part, (dtype, last) in pairs
            )
        else:
            ((dtype, last),) = places
            is_row = row is not None and (dtype, last) == (row[0].numpy, row[1])
            fits = is_row or dtype == wanted
        return wanted if fits else None

    return elements
