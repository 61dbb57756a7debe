"""Reductions that fold rank 0, 1, 2, ... in turn: an exchange, a kernel, and a gather.

An array is cut into a chunk for each rank, in steps of 16 bytes; the last chunk also has the rest,
less than a step for each rank. A rank sends (n - 1) / n of its bytes in the exchange, and as many
in the gather, as in a ring:

| | exchange: rank r gets | kernel | gather |
|---|---|---|---|
| all_reduce | all ranks' chunks r | writes chunk r of the array | all chunks, to all ranks |
| reduce | the same | the same; aside, except on the root | all chunks, to the root |
| reduce_scatter | all ranks' chunks r | writes the output | |

The cut depends on count, element and world size alone, so it is the same on all ranks. Launches
share the room for other ranks' chunks, because they follow each other on a stream. Only a launch in
a graph has room of its own.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from nc10d import ops
from nc10d.arrays.buffer import Buffer, as_buffer
from nc10d.arrays.dtypes import ElementType, reduced_element
from nc10d.backend.nccl.launch.datatypes import BYTES, is_folded
from nc10d.backend.nccl.launch.nccl_calls import (
    Call,
    CallContext,
    Span,
    calls_of,
    chunks_of,
    flat,
    moving,
)
from nc10d.kernels.gpu.gpu_reduce import ROW_ALIGN, elements_a_block


class OperationCalls(NamedTuple):
    """An operation's calls, in steps: NCCL's, kernels behind them, and NCCL's behind those.

    A kernel's call is (the driver's handle, the number of blocks, an argument, ...). The calls use
    `room_nbytes` of the context's room.
    """

    calls: Sequence[Call]
    kernels: Sequence[Call] = ()
    gathers: Sequence[Call] = ()
    room_nbytes: int = 0


def all_calls_of(op: Any, context: CallContext) -> OperationCalls:
    """Return the calls for a validated operation; see `calls_of`.

    UnsupportedPlatform, on every rank, if a kernel is needed and can't be made.
    """
    folds = _FOLDS.get(type(op))
    if folds is not None:
        x = as_buffer(op.out if isinstance(op, ops.ReduceScatter) else op.x)
        if is_folded(x.dtype, op.op, context.size):
            # A row of numbers may be a record.
            element = reduced_element(x.dtype, op.op, x.shape[-1] if x.shape else 1)
            return folds(op, context, element)
    return OperationCalls(calls_of(op, context))


def _all_reduce(op: ops.AllReduce, context: CallContext, element: ElementType) -> OperationCalls:
    x = flat(op, op.x, element)
    chunks = _cut(x, element, context.size)
    mine, each = chunks[context.rank][0], chunks[0][1]
    found, _ = _fold(op, context, element, chunks, mine)
    if context.size == 1:
        return found
    rest = chunks[-1][1] - each
    end = x.address + x.nbytes - rest
    chunks_of_all = "ncclAllGather", mine, x.address, each, BYTES
    behind_them = "ncclBroadcast", end, end, rest, BYTES, context.size - 1
    return found._replace(gathers=moving([chunks_of_all, behind_them]))


def _reduce(op: ops.Reduce, context: CallContext, element: ElementType) -> OperationCalls:
    chunks = _cut(flat(op, op.x, element), element, context.size)
    own, nbytes = chunks[context.rank]
    is_root = context.rank == op.root
    found, dst = _fold(op, context, element, chunks, own if is_root else None)
    sent = "ncclSend", dst, nbytes, BYTES, op.root
    gathers = _with_others("ncclRecv", chunks, context) if is_root else moving([sent])
    return found._replace(gathers=gathers)


def _reduce_scatter(
    op: ops.ReduceScatter, context: CallContext, element: ElementType
) -> OperationCalls:
    chunks, out = chunks_of(op, op.inp, context.size, element), flat(op, op.out, element)
    return _fold(op, context, element, chunks, out.address)[0]


_FOLDS: dict[type[Any], Callable[[Any, CallContext, ElementType], OperationCalls]] = {
    ops.AllReduce: _all_reduce,
    ops.Reduce: _reduce,
    ops.ReduceScatter: _reduce_scatter,
}


def _cut(x: Buffer, element: ElementType, size: int) -> list[Span]:
    """Cut an array into a chunk for each rank, with whole elements; see above."""
    item = element.itemsize
    step = max(ROW_ALIGN // item, 1)
    each = x.nbytes // item // size // step * step * item
    sizes = [each] * (size - 1) + [x.nbytes - each * (size - 1)]
    return [(x.address + rank * each, nbytes) for rank, nbytes in enumerate(sizes)]


def _fold(
    op: Any, context: CallContext, element: ElementType, chunks: Sequence[Span], dst: int | None
) -> tuple[OperationCalls, int]:
    """Return the exchange and the kernel that folds this rank's chunk, and where that writes.

    Without `dst` the kernel writes to this rank's place in the room.
    """
    kernel = context.kernel(op.op.kind, element)
    own, nbytes = chunks[context.rank]
    stride = -(-nbytes // ROW_ALIGN) * ROW_ALIGN
    rows, room_nbytes = context.room, context.size * stride if context.size > 1 else 0
    spans = [(rows + peer * stride, nbytes) for peer in range(context.size)]
    sent = _with_others("ncclSend", chunks, context)
    taken = _with_others("ncclRecv", spans, context)
    dst = spans[context.rank][0] if dst is None else dst
    count, share = nbytes // element.itemsize, elements_a_block(element)
    (factor,) = struct.unpack("q", struct.pack("d", op.op.factor or 0.0))
    arguments = dst, own, rows, stride, context.rank, context.size, count, share, factor, 0
    launch = kernel, -(-count // share), *arguments
    return OperationCalls([*sent, *taken], [launch] if count else [], (), room_nbytes), dst


def _with_others(function: str, spans: Sequence[Span], context: CallContext) -> list[Call]:
    """Return a message to or from each other rank, whose span is given."""
    peers = [peer for peer in range(context.size) if peer != context.rank]
    return moving((function, *spans[peer], BYTES, peer) for peer in peers)
