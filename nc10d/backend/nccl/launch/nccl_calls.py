"""An operation as NCCL's calls. Pure: this module reads addresses and sizes and calls nothing.

A Call is a function's name and arguments without the last two, communicator and stream, which end
all of NCCL's operations. An operation that NCCL lacks is several calls in a group. The choice of
calls must not depend on facts that only a single rank knows, because every rank must make the same
calls. So a list of arrays is always a call per rank, even if the arrays are adjacent. Gathers and
scatters are messages, whose sizes may differ, unless the operation is `even` on all ranks:
ncclGather and ncclScatter need contiguous parts with equal sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from nc10d import ops
from nc10d.arrays.buffer import Buffer, as_buffer
from nc10d.arrays.dtypes import DType, ElementType, alignment, scalar
from nc10d.backend.nccl.launch.datatypes import BYTES, FP8, FP8_NEEDS, INT32, SUM, reduction
from nc10d.ops import Array
from nc10d.ops.facts import name_of
from nc10d.ops.operations import Arrays
from nc10d.ops.reductions import ReductionKind

Call = tuple[Any, ...]
"""(function, argument, ...), all arguments ints."""


@dataclass(frozen=True, slots=True)
class CallContext:
    """The facts beside the operation on which the calls depend."""

    # `has(name)` returns whether this NCCL has a function; all ranks must have the same release.
    # `premul_op` returns the operator for a PREMUL_SUM by factor, NCCL's type and nc10d's.
    # `scratch` is the address of 4 bytes on the device for barriers. Without `fp8`, this NCCL or
    # this device reduces no 8-bit floats. `kernel` returns the handle of the kernel that folds such
    # elements; `room` is the address of the memory that a fold needs. With `links` a message's
    # communicator has two ranks, else all of the group.

    rank: int
    size: int
    has: Callable[[str], bool]
    premul_op: Callable[[float, int, DType], int]
    scratch: int
    fp8: bool = True
    kernel: Callable[[ReductionKind, ElementType], int] = lambda *_: 0
    room: int = 0
    links: bool = True


def calls_of(op: ops.Op, context: CallContext) -> list[Call]:
    """Return the calls for a validated operation; calls that would move nothing are left out."""
    # TypeError or ValueError for operations, arrays and reductions that NCCL can't take.
    if type(op) not in CALLS:
        raise TypeError(f"NCCL has no {name_of(op)}: the CPU's backend has it, on host memory")
    return moving(CALLS[type(op)](op, context))


def moving(calls: Iterable[Call]) -> list[Call]:
    """Return the calls that move something."""
    return [call for call in calls if call[_COUNT[call[0]]]]


# The index of the element count among each function's arguments.
_COUNT = {
    name: 2 if name in ("ncclSend", "ncclRecv") else 3
    for name in (
        *("ncclSend", "ncclRecv", "ncclAllReduce", "ncclReduce", "ncclBroadcast"),
        *("ncclAllGather", "ncclReduceScatter", "ncclAlltoAll", "ncclGather", "ncclScatter"),
    )
}


def flat(op: ops.Op, x: Array, element: ElementType | None = None) -> Buffer:
    """Return an array's memory, which must be on a device, contiguous, and aligned.

    `element` is the type to which the array is aligned, if another than its own.
    """
    found = as_buffer(x)
    name = name_of(op)
    if found.device != "cuda":
        raise ValueError(f"{name}: nccl takes arrays in device memory, got one on {found.device}")
    assert found.contiguous, "strided arrays have been copied"
    part = alignment((element or found.dtype).itemsize)
    if found.address % part:
        raise ValueError(f"{name}: the array is not aligned to its elements ({part} bytes)")
    return found


def _flats(op: ops.Op, arrays: Arrays, element: ElementType | None = None) -> list[Buffer]:
    return [flat(op, x, element) for x in arrays]


def _reducing(op: Any, x: Buffer, context: CallContext) -> tuple[int, int, int]:
    """Return count, type and operator for a reduction of `x`."""
    how: ops.ReduceOp = op.op
    if x.dtype in FP8 and not context.fp8:
        raise TypeError(f"{name_of(op)}: {x.dtype.label} needs {FP8_NEEDS}")
    found = reduction(scalar(x.dtype), how)
    if found.op is not None:
        return x.count * found.elements, found.datatype, found.op
    assert how.factor is not None, "PREMUL_SUM has a factor"
    operator = context.premul_op(how.factor, found.datatype, found.scalar)
    return x.count * found.elements, found.datatype, operator


def _all_reduce(op: ops.AllReduce, context: CallContext) -> Iterator[Call]:
    x = flat(op, op.x)
    yield "ncclAllReduce", x.address, x.address, *_reducing(op, x, context)


def _reduce(op: ops.Reduce, context: CallContext) -> Iterator[Call]:
    x = flat(op, op.x)
    out = x.address if context.rank == op.root else 0
    yield "ncclReduce", x.address, out, *_reducing(op, x, context), op.root


def _broadcast(op: ops.Broadcast, context: CallContext) -> Iterator[Call]:
    x = flat(op, op.x)
    yield "ncclBroadcast", x.address, x.address, x.nbytes, BYTES, op.root


def _all_gather(op: ops.AllGather, context: CallContext) -> Iterator[Call]:
    x = flat(op, op.inp)
    if not isinstance(op.out, (list, tuple)):
        yield "ncclAllGather", x.address, flat(op, op.out).address, x.nbytes, BYTES
        return
    for root, out in enumerate(_flats(op, op.out)):
        source = x.address if root == context.rank else out.address
        yield "ncclBroadcast", source, out.address, out.nbytes, BYTES, root


def _reduce_scatter(op: ops.ReduceScatter, context: CallContext) -> Iterator[Call]:
    out = flat(op, op.out)
    if not isinstance(op.inp, (list, tuple)):
        how = _reducing(op, out, context)
        yield "ncclReduceScatter", flat(op, op.inp).address, out.address, *how
        return
    for root, x in enumerate(_flats(op, op.inp)):
        to = out.address if root == context.rank else 0
        yield "ncclReduce", x.address, to, *_reducing(op, x, context), root


def _all_to_all(op: ops.AllToAll, context: CallContext) -> Iterator[Call]:
    if isinstance(op.out, (list, tuple)):
        yield from _exchange(_spans(_flats(op, op.inp)), _spans(_flats(op, op.out)))
        return
    out, inp = flat(op, op.out), flat(op, op.inp)
    if op.out_splits is None and op.in_splits is None and context.has("ncclAlltoAll"):
        yield "ncclAlltoAll", inp.address, out.address, inp.nbytes // context.size, BYTES
    else:
        sent = _pieces(inp, op.in_splits, context.size)
        yield from _exchange(sent, _pieces(out, op.out_splits, context.size))


Span = tuple[int, int]
"""An address and a byte count."""


def _spans(buffers: Sequence[Buffer]) -> list[Span]:
    return [(x.address, x.nbytes) for x in buffers]


def _pieces(x: Buffer, splits: Sequence[int] | None, size: int) -> list[Span]:
    """Cut an array along its first dimension, evenly without `splits`."""
    rows = [x.shape[0] // size] * size if splits is None else [int(n) for n in splits]
    row = prod(x.shape[1:]) * x.dtype.itemsize
    starts = [sum(rows[:index]) for index in range(size)]
    return [(x.address + start * row, n * row) for start, n in zip(starts, rows, strict=True)]


def _exchange(sent: Sequence[Span], got: Sequence[Span]) -> Iterator[Call]:
    for peer, (address, nbytes) in enumerate(sent):
        yield "ncclSend", address, nbytes, BYTES, peer
    for peer, (address, nbytes) in enumerate(got):
        yield "ncclRecv", address, nbytes, BYTES, peer


def _gather(op: ops.Gather, context: CallContext) -> Iterator[Call]:
    x = flat(op, op.inp)
    if op.even and context.has("ncclGather"):
        out = 0 if op.out is None else flat(op, op.out).address
        yield "ncclGather", x.address, out, x.nbytes, BYTES, op.root
        return
    yield "ncclSend", x.address, x.nbytes, BYTES, op.root
    if op.out is not None:
        for peer, (address, nbytes) in enumerate(chunks_of(op, op.out, context.size)):
            yield "ncclRecv", address, nbytes, BYTES, peer


def _scatter(op: ops.Scatter, context: CallContext) -> Iterator[Call]:
    if op.even and context.has("ncclScatter"):
        inp, x = 0 if op.inp is None else flat(op, op.inp).address, flat(op, op.out)
        yield "ncclScatter", inp, x.address, x.nbytes, BYTES, op.root
        return
    if op.inp is not None:
        for peer, (address, nbytes) in enumerate(chunks_of(op, op.inp, context.size)):
            yield "ncclSend", address, nbytes, BYTES, peer
    out = flat(op, op.out)
    yield "ncclRecv", out.address, out.nbytes, BYTES, op.root


def chunks_of(
    op: ops.Op, arrays: Arrays, size: int, element: ElementType | None = None
) -> list[Span]:
    """Return each rank's chunk of a list or of a flat array; see `flat`."""
    if isinstance(arrays, (list, tuple)):
        return _spans(_flats(op, arrays, element))
    x = flat(op, arrays, element)
    nbytes = x.nbytes // size
    return [(x.address + rank * nbytes, nbytes) for rank in range(size)]


def _send(op: ops.Send, context: CallContext) -> Iterator[Call]:
    x = flat(op, op.x)
    # A link's sender is rank 0 there.
    yield "ncclSend", x.address, x.nbytes, BYTES, 1 if context.links else op.peer


def _recv(op: ops.Recv, context: CallContext) -> Iterator[Call]:
    x = flat(op, op.x)
    assert op.peer is not None, "a receive from any rank has been refused"
    yield "ncclRecv", x.address, x.nbytes, BYTES, 0 if context.links else op.peer


def _barrier(op: ops.Barrier, context: CallContext) -> Iterator[Call]:
    yield "ncclAllReduce", context.scratch, context.scratch, 1, INT32, SUM


CALLS: dict[type[Any], Callable[[Any, CallContext], Iterator[Call]]] = {
    ops.AllReduce: _all_reduce,
    ops.Reduce: _reduce,
    ops.Broadcast: _broadcast,
    ops.AllGather: _all_gather,
    ops.ReduceScatter: _reduce_scatter,
    ops.AllToAll: _all_to_all,
    ops.Gather: _gather,
    ops.Scatter: _scatter,
    ops.Send: _send,
    ops.Recv: _recv,
    ops.Barrier: _barrier,
}
