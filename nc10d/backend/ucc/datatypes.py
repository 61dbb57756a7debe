"""nc10d's element types and reductions as UCC's.

Data is moved as unsigned ints of the same width. On the host UCC reduces wherever the rules are the
same, and nc10d's kernels do the rest. On a device UCC reduces, or the call is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from nc10d.arrays.dtypes import DType, ElementKind, ElementType, order_matters
from nc10d.backend.polled.device_arrays import device_arrays, flat_on_device
from nc10d.backend.polled.flat_buffers import FlatBuffer
from nc10d.backend.ucc.ucc_table import ENUMS
from nc10d.kernels.combine import canonical
from nc10d.ops import Op, ReduceOp
from nc10d.ops.facts import is_message, name_of
from nc10d.ops.reductions import KINDS, PAIRWISE

_DT = ENUMS["ucc_datatype_t"]
_OP = ENUMS["ucc_reduction_op_t"]
_MOVED = {nbytes: _DT[f"UCC_DT_UINT{8 * nbytes}"] for nbytes in (1, 2, 4, 8, 16)}
OPERATORS = {
    kind.name: _OP[name]
    for kind in KINDS
    if (name := f"UCC_OP_{kind.name.replace('PRODUCT', 'PROD')}") in _OP
}
_COMPLEX = {DType.COMPLEX64: "FLOAT32_COMPLEX", DType.COMPLEX128: "FLOAT64_COMPLEX"}
_NUMBERS: dict[ElementType, int] = {
    dtype: _DT[name]
    for dtype in DType
    if (name := f"UCC_DT_{_COMPLEX.get(dtype, dtype.name)}") in _DT
}
_EXACT = frozenset({DType.FLOAT32, DType.FLOAT64})
_NARROW = frozenset({DType.FLOAT16, DType.BFLOAT16})


class UccReduction(NamedTuple):
    """A reduction in UCC's terms: `datatype`, `width` of them an element, and `op`."""

    datatype: int
    width: int
    op: int


def carrier(dtype: ElementType) -> tuple[int, int]:
    """Return the UCC datatype that carries elements of `dtype` unread, and how many an element."""
    found = _MOVED.get(dtype.itemsize)
    return (_MOVED[1], dtype.itemsize) if found is None else (found, 1)


def native(op: ReduceOp, x: FlatBuffer, size: int, any_order: bool) -> UccReduction | None:
    """Return UCC's own reduction of x over `size` ranks; None if nc10d's kernels must reduce x.

    On the host AVG is a sum, and PREMUL_SUM a sum of scaled operands. TypeError for a reduction of
    device arrays that UCC lacks.
    """
    if x.device != "cpu":
        return _on_device(op, x.dtype)
    if order_matters(op, x.dtype, size) and (op.by_rank or not any_order):
        return None
    step, stored = canonical(op.pairwise, x.dtype)
    if step not in OPERATORS:
        return None
    exact = PAIRWISE[step].exact
    if not exact and any_order and stored in _NARROW:
        return UccReduction(_NUMBERS[stored], 1, OPERATORS[step])
    # UCC's minimum ignores NaN on some ranks, and narrow floats round at other places.
    is_int = stored.family in (ElementKind.INT, ElementKind.UINT)
    if not is_int and (stored not in _EXACT or exact):
        return None
    return UccReduction(_NUMBERS[stored], x.dtype.itemsize // stored.itemsize, OPERATORS[step])


def _on_device(op: ReduceOp, dtype: ElementType) -> UccReduction:
    operator, datatype = OPERATORS.get(op.kind.name), _NUMBERS.get(dtype)
    if operator is None or datatype is None:
        raise TypeError(
            f"UCC has no {op.name} of {dtype.label} on a device: copy the array to the host, or "
            "convert it"
        )
    return UccReduction(datatype, 1, operator)


def check_devices(batch: Sequence[Op]) -> None:
    """Raise TypeError where an operation's device arrays are not for UCC."""
    for op, array, device in device_arrays(batch):
        name = name_of(op)
        if is_message(op):
            text = f'the ucc backend has no messages on {device}: use "gloo" or "nccl"'
            raise TypeError(f"{name}: {text}")
        dtype = flat_on_device("ucc", op, array, device).dtype
        how: ReduceOp | None = getattr(op, "op", None)
        if how is None:
            continue
        if how.kind.prepares:
            raise TypeError(f"{name}: UCC has no {how.name}: multiply the array before the call")
        _on_device(how, dtype)
