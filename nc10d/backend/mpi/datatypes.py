"""nc10d's element types and reductions as MPI's.

Data is moved as unsigned ints of the same width. A reduction that MPI defines in the same way runs
as MPI's own. Any other (bool, narrow floats, NaN in MIN and MAX, complex products) is an MPI.Op
that calls nc10d's kernel. An op serves all element types, and distinguishes them by MPI's datatype,
because mpi4py allows only few ops.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from nc10d.arrays.dtypes import DType, ElementKind
from nc10d.backend.mpi.library import MPI
from nc10d.backend.polled.flat_buffers import kernel
from nc10d.kernels.combine import canonical
from nc10d.kernels.reduce import kernel_address
from nc10d.ops.reductions import PAIRWISE, Pairwise

_MOVED = {nbytes: getattr(MPI, f"UINT{8 * nbytes}_T") for nbytes in (1, 2, 4, 8)}
_MOVED[16] = MPI.C_DOUBLE_COMPLEX
OPERATORS = {
    step: getattr(MPI, name)
    for step in PAIRWISE
    if hasattr(MPI, name := step.replace("PRODUCT", "PROD"))
}
_INTS = [dtype for dtype in DType if dtype.family in (ElementKind.INT, ElementKind.UINT)]
_NUMBERS = {dtype: getattr(MPI, f"{dtype.name}_T") for dtype in _INTS}
_NUMBERS |= {DType.FLOAT32: MPI.FLOAT, DType.FLOAT64: MPI.DOUBLE}
# Open MPI 5's vectorised sums of 8 and 16 bits saturate instead of wrapping around.
_TOO_NARROW = (DType.UINT8, DType.UINT16)


@dataclass(frozen=True, slots=True)
class MpiReduction:
    """A reduction in MPI's terms: `datatype`, `width` of them an element, and `op`."""

    datatype: MPI.Datatype
    width: int
    op: MPI.Op


def carrier(dtype: DType) -> Any:
    """Return the MPI datatype that carries elements of `dtype` unread."""
    return _MOVED[dtype.itemsize]


def native(step: Pairwise, dtype: DType) -> MpiReduction | None:
    """Return MPI's own reduction by a pairwise step, None if MPI has none of the same meaning."""
    name, stored = canonical(step, dtype)
    datatype, exact = _NUMBERS.get(stored), PAIRWISE[name].exact
    if datatype is None or (stored.family is ElementKind.FLOAT and exact):
        return None
    if stored in _TOO_NARROW and not exact:
        return None
    return MpiReduction(datatype, dtype.itemsize // stored.itemsize, OPERATORS[name])


@functools.cache
def reduction(step: Pairwise, dtype: DType) -> MpiReduction:
    """Return the reduction for MPI to run in any order that keeps ranks' places."""
    same, _ = canonical(step, dtype)
    return native(step, dtype) or MpiReduction(_opaque(dtype), 1, _kernel_op(same))


_opaque_dtypes: dict[int, DType] = {}


@functools.cache
def _opaque(dtype: DType) -> MPI.Datatype:
    """Make the MPI datatype by which a kernel's op knows `dtype`."""
    datatype = MPI.BYTE.Create_contiguous(dtype.itemsize).Commit()
    _opaque_dtypes[datatype.handle] = dtype
    return datatype


@functools.cache
def _kernel_op(step: str) -> MPI.Op:
    def combine(lower: Any, upper: Any, datatype: MPI.Datatype) -> None:
        """upper := lower op upper"""
        run = kernel(kernel_address(step, _opaque_dtypes[datatype.handle]))
        run(upper.address, lower.address, upper.address, upper.nbytes)

    return MPI.Op.Create(combine, commute=False)
