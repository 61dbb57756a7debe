"""Element types and reductions as NCCL has them. Pure.

Operations that only move data move bytes. A reduction uses one of NCCL's types: the array's own,
several elements of another type (a complex number as two floats), or another type that gives the
same bits (a bool as uint8, whose maximum is "or"). A reduction in rank order for which NCCL does
not promise the bits is folded by nc10d's kernels (`rank_order`).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from nc10d.arrays.dtypes import DType, ElementKind, ElementType, order_matters, scalar
from nc10d.backend.nccl.bindings.header_table import ENUMS, Version
from nc10d.ops import ReduceOp

_TYPES = ENUMS["ncclDataType_t"]
_OPS = ENUMS["ncclRedOp_t"]
BYTES = _TYPES["ncclInt8"]
INT32, FLOAT32, SUM = _TYPES["ncclInt32"], _TYPES["ncclFloat32"], _OPS["ncclSum"]
FP8_SINCE: Version = (2, 24, 0)
FP8_CAPABILITY = 9
FP8_NEEDS = "NCCL >= 2.24 and a device of compute capability 9.0"
FP8 = frozenset({DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2})

_NATIVE = {
    DType.INT8: _TYPES["ncclInt8"],
    DType.UINT8: _TYPES["ncclUint8"],
    DType.INT32: _TYPES["ncclInt32"],
    DType.UINT32: _TYPES["ncclUint32"],
    DType.INT64: _TYPES["ncclInt64"],
    DType.UINT64: _TYPES["ncclUint64"],
    DType.FLOAT16: _TYPES["ncclFloat16"],
    DType.BFLOAT16: _TYPES["ncclBfloat16"],
    DType.FLOAT8_E4M3FN: _TYPES["ncclFloat8e4m3"],
    DType.FLOAT8_E5M2: _TYPES["ncclFloat8e5m2"],
    DType.FLOAT32: _TYPES["ncclFloat32"],
    DType.FLOAT64: _TYPES["ncclFloat64"],
}
_HALVES = {DType.COMPLEX64: DType.FLOAT32, DType.COMPLEX128: DType.FLOAT64}
OPERATORS = {
    "SUM": _OPS["ncclSum"],
    "PRODUCT": _OPS["ncclProd"],
    "MAX": _OPS["ncclMax"],
    "MIN": _OPS["ncclMin"],
    "AVG": _OPS["ncclAvg"],
    "PREMUL_SUM": None,
}
_OF_TRUTH = {"BOR": _OPS["ncclMax"], "BAND": _OPS["ncclMin"]}


class NcclReduction(NamedTuple):
    """A reduction in NCCL's terms: type, elements per array element, operator."""

    # `op` is None for PREMUL_SUM, whose operator each communicator makes; the factor has the type
    # `scalar`.

    datatype: int
    elements: int
    op: int | None
    scalar: DType


@functools.cache
def reduction(dtype: DType, op: ReduceOp) -> NcclReduction:
    """Return how NCCL reduces arrays of `dtype` by `op`; TypeError if it can't."""
    name, step = op.kind.name, op.pairwise
    if dtype.family is ElementKind.BOOL and step.of_truth in _OF_TRUTH:
        return NcclReduction(_TYPES["ncclUint8"], 1, _OF_TRUTH[step.of_truth], dtype)
    half = _HALVES.get(dtype)
    if half is not None and step.name == "SUM":  # complex numbers: the sums of their parts
        return NcclReduction(_NATIVE[half], 2, OPERATORS[name], half)
    if dtype in _NATIVE and name in OPERATORS:
        return NcclReduction(_NATIVE[dtype], 1, OPERATORS[name], dtype)
    raise TypeError(f"NCCL has no {op.name} of {dtype.label}: {_why(dtype)}")


@functools.cache
def is_folded(dtype: ElementType, op: ReduceOp, size: int) -> bool:
    """Return whether ranks fold in rank order themselves: NCCL lacks `op`, or its bits may differ.

    Only for reductions in rank order. NCCL may scale before it adds, and contract the two.
    """
    if not op.by_rank:
        return False
    maps = op.kind.prepares or op.kind.finishes
    if op.pairwise.own is not None or dtype in FP8 or order_matters(op, dtype, 3 if maps else size):
        return True
    try:
        reduction(scalar(dtype), op)
    except TypeError:
        return True
    return False


def _why(dtype: DType) -> str:
    if dtype in (DType.INT16, DType.UINT16):
        return "it moves 16-bit ints and reduces none; convert to int32"
    return "the CPU's backend has it, on a copy in host memory"
