"""nc10d's element types and reductions as MPI's.

Data is moved as unsigned ints of the same width. A reduction that MPI defines in the same way runs
as MPI's own. Any other (bool, narrow floats, NaN in MIN and MAX, complex products, one's own) is an
MPI.Op that calls nc10d's kernel. A single op serves all of them, and distinguishes reductions and
element types by MPI's datatype, because mpi4py allows only few ops.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from nc10d.arrays.dtypes import DType, ElementKind, ElementType
from nc10d.backend.mpi.library import MPI
from nc10d.backend.polled.flat_buffers import kernel
from nc10d.kernels.combine import canonical
from nc10d.kernels.reduce import kernel_address
from nc10d.ops.reductions import PAIRWISE, Pairwise, step_named

_MOVED = {nbytes: getattr(MPI, f"UINT{8 * nbytes}_T") for nbytes in (1, 2, 4, 8)}
_MOVED[16] = MPI.C_DOUBLE_COMPLEX
OPERATORS = {
    step: getattr(MPI, name)
    for step in PAIRWISE
    if hasattr(MPI, name := step.replace("PRODUCT", "PROD"))
}
_INTS = [dtype for dtype in DType if dtype.family in (ElementKind.INT, ElementKind.UINT)]
_NUMBERS: dict[ElementType, Any] = {dtype: getattr(MPI, f"{dtype.name}_T") for dtype in _INTS}
_NUMBERS |= {DType.FLOAT32: MPI.FLOAT, DType.FLOAT64: MPI.DOUBLE}
# Open MPI 5's vectorised sums of 8 and 16 bits saturate instead of wrapping around.
_TOO_NARROW = (DType.UINT8, DType.UINT16)


@dataclass(frozen=True, slots=True)
class MpiReduction:
    """A reduction in MPI's terms: `datatype`, `width` of them an element, and `op`."""

    datatype: MPI.Datatype
    width: int
    op: MPI.Op


def carrier(dtype: ElementType) -> Any:
    """Return the MPI datatype that carries elements of `dtype` unread."""
    found = _MOVED.get(dtype.itemsize)
    if found is None:
        found = _MOVED[dtype.itemsize] = MPI.BYTE.Create_contiguous(dtype.itemsize).Commit()
    return found


def native(step: Pairwise, dtype: ElementType) -> MpiReduction | None:
    """Return MPI's own reduction by a pairwise step, None if MPI has none of the same meaning."""
    name, stored = canonical(step, dtype)
    datatype, exact, operator = _NUMBERS.get(stored), step_named(name).exact, OPERATORS.get(name)
    if datatype is None or operator is None or (stored.family is ElementKind.FLOAT and exact):
        return None
    if stored in _TOO_NARROW and not exact:
        return None
    return MpiReduction(datatype, dtype.itemsize // stored.itemsize, operator)


@functools.cache  # by name: equal functions that a program makes again have the same one
def reduction(name: str, dtype: ElementType) -> MpiReduction:
    """Return a pairwise step's reduction for MPI to run in any order that keeps ranks' places."""
    step = step_named(name)
    same, _ = canonical(step, dtype)
    return native(step, dtype) or MpiReduction(_opaque(same, dtype), 1, _kernel_op())


_kernels: dict[int, int] = {}
"""The addresses of kernels, by MPI datatype."""


@functools.cache
def _opaque(step: str, dtype: ElementType) -> MPI.Datatype:
    """Make the MPI datatype by which the op knows a reduction of `dtype`; may compile."""
    datatype = MPI.BYTE.Create_contiguous(dtype.itemsize).Commit()
    _kernels[datatype.handle] = kernel_address(step, dtype)
    return datatype


@functools.cache
def _kernel_op() -> MPI.Op:
    def combine(lower: Any, upper: Any, datatype: MPI.Datatype) -> None:
        """upper := lower op upper"""
        run = kernel(_kernels[datatype.handle])
        run(upper.address, lower.address, upper.address, upper.nbytes)

    return MPI.Op.Create(combine, commute=False)
