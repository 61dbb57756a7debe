"""Each collective as steps: a generator that starts MPI requests and yields them to be waited for.

`steps(comm, op, any_order)` begins when all ranks have agreed on the call. The number and order of
requests follow from the agreed call, never from a rank's own arrays, because every rank must call
MPI in the same order. MPI itself runs a reduction whose result does not depend on the order. For
any other, ranks fold each other's arrays in rank order: all ranks the whole arrays if they are
small, else each rank a chunk, whose result it then sends to all (Rabenseifner 2004).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from nc10d import ops
from nc10d.backend.mpi.buffers import in_chunks, memory, whole
from nc10d.backend.mpi.datatypes import reduction
from nc10d.backend.mpi.library import MPI, Comm, Steps
from nc10d.backend.polled.announced_sizes import raise_if_sizes_differ
from nc10d.backend.polled.flat_buffers import (
    FlatBuffer,
    OpBuffers,
    even_counts,
    finish,
    fold,
    order_matters,
    prepare,
    row_counts,
)
from nc10d.ops.facts import facts_of

SMALL = 16 * 1024  # bytes of all ranks' arrays, up to which every rank gets all of them


def steps(comm: Comm, op: ops.Op, any_order: bool) -> Steps:
    """Return the steps of a validated collective on which all ranks have agreed."""
    buffers = OpBuffers()
    yield from STEPS[type(op)](comm, op, buffers, any_order)
    buffers.finish()


# Reductions


def _all_reduce(comm: Comm, op: ops.AllReduce, buffers: OpBuffers, any_order: bool) -> Steps:
    x = buffers.contiguous(op.x, True)
    if _reduced_by_mpi(x, op.op, comm.size, any_order):
        prepare(x, x, op.op)
        yield [comm.Iallreduce(MPI.IN_PLACE, *_operands(x, op.op))]
        finish(x, comm.size, op.op)
    elif comm.size * x.nbytes <= SMALL:
        rows = buffers.scratch(comm.size * x.count, x.dtype)
        yield [comm.Iallgatherv(whole(x), in_chunks(rows, [x.count] * comm.size))]
        fold(x, rows, comm.size, op.op)
    else:
        counts = even_counts(x.count, comm.size)
        own = buffers.scratch(counts[comm.rank], x.dtype)
        yield from _fold_chunk(comm, x, counts, own, op.op, buffers)
        yield [comm.Iallgatherv(whole(own), in_chunks(x, counts))]


def _reduce(comm: Comm, op: ops.Reduce, buffers: OpBuffers, any_order: bool) -> Steps:
    is_root = comm.rank == op.root
    x = buffers.contiguous(op.x, is_root)
    if _reduced_by_mpi(x, op.op, comm.size, any_order):
        own = x if op.op.factor is None or is_root else buffers.scratch(x.count, x.dtype)
        prepare(own, x, op.op)
        operand, operator = _operands(own, op.op)
        sent, got = (MPI.IN_PLACE, operand) if is_root else (operand, None)
        yield [comm.Ireduce(sent, got, operator, op.root)]
        if is_root:
            finish(x, comm.size, op.op)
        return
    counts = even_counts(x.count, comm.size)
    own = buffers.scratch(counts[comm.rank], x.dtype)
    yield from _fold_chunk(comm, x, counts, own, op.op, buffers)
    yield [comm.Igatherv(whole(own), in_chunks(x, counts) if is_root else None, op.root)]


def _reduce_scatter(
    comm: Comm, op: ops.ReduceScatter, buffers: OpBuffers, any_order: bool
) -> Steps:
    out = buffers.contiguous(op.out, True)
    inp, counts = buffers.chunks(op.inp, comm.size, False)
    if inp.device == "cpu" or not _reduced_by_mpi(inp, op.op, comm.size, any_order):
        yield from _fold_chunk(comm, inp, counts, out, op.op, buffers)
        return
    operand, operator = _operands(inp, op.op)
    width = reduction(op.op.pairwise, inp.dtype).width
    into = [memory(out), width * out.count, operand[2]]
    yield [comm.Ireduce_scatter(operand, into, [width * n for n in counts], operator)]


def _fold_chunk(
    comm: Comm,
    x: FlatBuffer,
    counts: Sequence[int],
    own: FlatBuffer,
    op: ops.ReduceOp,
    buffers: OpBuffers,
) -> Steps:
    """own := op over all ranks of this rank's chunk of x"""
    rows = buffers.scratch(comm.size * own.count, own.dtype)
    yield [comm.Ialltoallv(in_chunks(x, counts), in_chunks(rows, [own.count] * comm.size))]
    fold(own, rows, comm.size, op)


def _reduced_by_mpi(x: FlatBuffer, op: ops.ReduceOp, size: int, any_order: bool) -> bool:
    """Return whether MPI itself reduces; for device arrays there is no alternative."""
    return any_order or x.device != "cpu" or not order_matters(op, x.dtype, size)


def _operands(x: FlatBuffer, op: ops.ReduceOp) -> tuple[list[Any], Any]:
    operator = reduction(op.pairwise, x.dtype)
    return [memory(x), x.count * operator.width, operator.datatype], operator.op


# Moving


def _broadcast(comm: Comm, op: ops.Broadcast, buffers: OpBuffers, any_order: bool) -> Steps:
    x = buffers.contiguous(op.x, comm.rank != op.root)
    yield [comm.Ibcast(whole(x), op.root)]


def _all_gather(comm: Comm, op: ops.AllGather, buffers: OpBuffers, any_order: bool) -> Steps:
    inp = buffers.contiguous(op.inp, False)
    out, counts = buffers.chunks(op.out, comm.size, True)
    yield [comm.Iallgatherv(_unless_in_place(inp, out, counts, comm.rank), in_chunks(out, counts))]


def _all_to_all(comm: Comm, op: ops.AllToAll, buffers: OpBuffers, any_order: bool) -> Steps:
    inp, sends = buffers.chunks(op.inp, comm.size, False)
    out, takes = buffers.chunks(op.out, comm.size, True)
    if facts_of(op).own_sizes(op):
        sends = row_counts(inp.count, op.in_splits, sends)
        takes = row_counts(out.count, op.out_splits, takes)
        yield from _announce(comm, op, sends, takes)
    yield [comm.Ialltoallv(in_chunks(inp, sends), in_chunks(out, takes))]


def _gather(comm: Comm, op: ops.Gather, buffers: OpBuffers, any_order: bool) -> Steps:
    inp = buffers.contiguous(op.inp, False)
    sends = [inp.count if rank == op.root else 0 for rank in range(comm.size)]
    if comm.rank != op.root:
        yield from _announce(comm, op, sends, [0] * comm.size)
        yield [comm.Igatherv(whole(inp), None, op.root)]
        return
    out, counts = buffers.chunks(op.out, comm.size, True)
    yield from _announce(comm, op, sends, counts)
    own = _unless_in_place(inp, out, counts, comm.rank)
    yield [comm.Igatherv(own, in_chunks(out, counts), op.root)]


def _scatter(comm: Comm, op: ops.Scatter, buffers: OpBuffers, any_order: bool) -> Steps:
    out = buffers.contiguous(op.out, True)
    takes = [out.count if rank == op.root else 0 for rank in range(comm.size)]
    if comm.rank != op.root:
        yield from _announce(comm, op, [0] * comm.size, takes)
        yield [comm.Iscatterv(None, whole(out), op.root)]
        return
    inp, counts = buffers.chunks(op.inp, comm.size, False)
    yield from _announce(comm, op, counts, takes)
    own = _unless_in_place(out, inp, counts, comm.rank)
    yield [comm.Iscatterv(in_chunks(inp, counts), own, op.root)]


def _barrier(comm: Comm, op: ops.Barrier, buffers: OpBuffers, any_order: bool) -> Steps:
    """Do nothing: the call check needed every rank."""
    yield from ()


def _unless_in_place(piece: FlatBuffer, parts: FlatBuffer, counts: Sequence[int], rank: int) -> Any:
    """Describe `piece` for MPI: IN_PLACE if it is this rank's chunk of `parts`."""
    chunk = parts.slice(sum(counts[:rank]), counts[rank])
    return MPI.IN_PLACE if piece.count and piece.address == chunk.address else whole(piece)


# Sizes that only sender and receiver know


def _announce(comm: Comm, op: ops.Op, sends: Sequence[int], takes: Sequence[int]) -> Steps:
    """Compare the sizes that ranks send with those their peers expect; all raise if any differ."""
    coming = np.empty(comm.size, np.int64)
    yield [comm.Ialltoall(np.array(sends, np.int64), coming)]
    first = np.array([comm.size if coming.tolist() == list(takes) else comm.rank])
    yield [comm.Iallreduce(MPI.IN_PLACE, first, MPI.MIN)]
    sizes = sends, takes, coming.tolist()
    raise_if_sizes_differ(op, int(first[0]), comm.rank, sizes, comm.size)


STEPS: dict[type[Any], Callable[[Comm, Any, OpBuffers, bool], Steps]] = {
    ops.AllReduce: _all_reduce,
    ops.Reduce: _reduce,
    ops.Broadcast: _broadcast,
    ops.AllGather: _all_gather,
    ops.ReduceScatter: _reduce_scatter,
    ops.AllToAll: _all_to_all,
    ops.Gather: _gather,
    ops.Scatter: _scatter,
    ops.Barrier: _barrier,
}
