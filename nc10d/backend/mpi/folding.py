"""Reductions on this rank, by nc10d's kernels: in rank order, as in the reference."""

from __future__ import annotations

import ctypes

from nc10d.backend.mpi.buffers import FlatBuffer
from nc10d.backend.mpi.datatypes import kernel
from nc10d.kernels.reduce import divide_address, kernel_address, scale_address
from nc10d.ops import RedOp, ReduceOp


def fold(into: FlatBuffer, rows: FlatBuffer, size: int, op: ReduceOp) -> None:
    """into := op over the `size` rows, first to last; the rows are scratch memory."""
    prepare(rows, rows, op)
    combine = kernel(kernel_address(op.kind, into.dtype))
    row = [rows.slice(r * into.count, into.count).address for r in range(size)]
    total = row[0]
    for address in row[1:]:
        combine(into.address, total, address, into.nbytes)
        total = into.address
    if size == 1:
        copy(into, rows)
    finish(into, size, op)


def prepare(into: FlatBuffer, x: FlatBuffer, op: ReduceOp) -> None:
    """into := the operand that this reduction makes of x; PREMUL_SUM scales. May be in place."""
    if op.factor is not None:
        factor = ctypes.c_double(op.factor)
        scale = kernel(scale_address(x.dtype))
        scale(into.address, x.address, ctypes.addressof(factor), x.nbytes)
    elif into.address != x.address:
        copy(into, x)


def finish(total: FlatBuffer, size: int, op: ReduceOp) -> None:
    """Turn a sum into the result: AVG divides."""
    if op.kind is RedOp.AVG:
        kernel(divide_address(total.dtype))(total.address, total.address, size, total.nbytes)


def copy(into: FlatBuffer, x: FlatBuffer) -> None:
    """into := x"""
    ctypes.memmove(into.address, x.address, x.nbytes)
