"""Each collective as steps: a generator that starts MPI requests and yields what it waits for.

`steps(comm, op, any_order)` begins when all ranks have agreed on the call. The number and order of
requests follow from what was agreed, never from one rank's own arrays, because every rank must
call MPI in the same order. A reduction whose order can't be seen in the result is MPI's own; any
other sends rows to where they are folded in rank order: to everybody if they are few bytes,
else one chunk to each rank, which then sends its result round (Rabenseifner 2004).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from nc10d.backend.mpi import folding
from nc10d.backend.mpi.buffers import FlatBuffer, OpBuffers
from nc10d.backend.mpi.datatypes import order_matters, reduction
from nc10d.backend.mpi.library import MPI, Comm, Steps
from nc10d.errors import CollectiveMismatch
from nc10d.ops import (
    OP_NAMES,
    AllGather,
    AllReduce,
    AllToAll,
    Barrier,
    Broadcast,
    Gather,
    Op,
    Reduce,
    ReduceOp,
    ReduceScatter,
    Scatter,
)

SMALL = 16 * 1024  # bytes of all ranks' rows up to which everybody gets all of them


def steps(comm: Comm, op: Op, any_order: bool) -> Steps:
    """Carry out a validated collective on which all ranks have agreed."""
    room = OpBuffers()
    yield from _STEPS[type(op)](comm, op, room, any_order)
    room.finish()


# Reductions


def _all_reduce(comm: Comm, op: AllReduce, room: OpBuffers, any_order: bool) -> Steps:
    x = room.flat(op.x, True)
    if _by_mpi(x, op.op, comm.size, any_order):
        folding.prepare(x, x, op.op)
        yield [comm.Iallreduce(MPI.IN_PLACE, *_operands(x, op.op))]
        folding.finish(x, comm.size, op.op)
    elif comm.size * x.nbytes <= SMALL:
        rows = room.scratch(comm.size * x.count, x.dtype)
        yield [comm.Iallgatherv(x.all(), rows.cut([x.count] * comm.size))]
        folding.fold(x, rows, comm.size, op.op)
    else:
        counts = _even(x.count, comm.size)
        mine = room.scratch(counts[comm.rank], x.dtype)
        yield from _fold_chunk(comm, x, counts, mine, op.op, room)
        yield [comm.Iallgatherv(mine.all(), x.cut(counts))]


def _reduce(comm: Comm, op: Reduce, room: OpBuffers, any_order: bool) -> Steps:
    here = comm.rank == op.root
    x = room.flat(op.x, here)
    if _by_mpi(x, op.op, comm.size, any_order):
        mine = x if op.op.factor is None or here else room.scratch(x.count, x.dtype)
        folding.prepare(mine, x, op.op)
        operand, how = _operands(mine, op.op)
        sent, got = (MPI.IN_PLACE, operand) if here else (operand, None)
        yield [comm.Ireduce(sent, got, how, op.root)]
        if here:
            folding.finish(x, comm.size, op.op)
        return
    counts = _even(x.count, comm.size)
    mine = room.scratch(counts[comm.rank], x.dtype)
    yield from _fold_chunk(comm, x, counts, mine, op.op, room)
    yield [comm.Igatherv(mine.all(), x.cut(counts) if here else None, op.root)]


def _reduce_scatter(comm: Comm, op: ReduceScatter, room: OpBuffers, any_order: bool) -> Steps:
    out = room.flat(op.out, True)
    inp, counts = room.chunks(op.inp, comm.size, False)
    if inp.device == "cpu" or not _by_mpi(inp, op.op, comm.size, any_order):
        yield from _fold_chunk(comm, inp, counts, out, op.op, room)
        return
    operand, how = _operands(inp, op.op)
    width = reduction(op.op.kind, inp.dtype).width
    into = [out.memory(), width * out.count, operand[2]]
    yield [comm.Ireduce_scatter(operand, into, [width * n for n in counts], how)]


def _fold_chunk(
    comm: Comm,
    x: FlatBuffer,
    counts: Sequence[int],
    mine: FlatBuffer,
    op: ReduceOp,
    room: OpBuffers,
) -> Steps:
    """mine := op over ranks of their chunk of x that is this rank's"""
    rows = room.scratch(comm.size * mine.count, mine.dtype)
    yield [comm.Ialltoallv(x.cut(counts), rows.cut([mine.count] * comm.size))]
    folding.fold(mine, rows, comm.size, op)


def _by_mpi(x: FlatBuffer, op: ReduceOp, size: int, any_order: bool) -> bool:
    """Say whether MPI reduces; device arrays leave no other way."""
    return any_order or x.device != "cpu" or not order_matters(op.kind, x.dtype, size)


def _operands(x: FlatBuffer, op: ReduceOp) -> tuple[list[Any], Any]:
    how = reduction(op.kind, x.dtype)
    return [x.memory(), x.count * how.width, how.datatype], how.op


def _even(count: int, size: int) -> list[int]:
    return [count // size + (rank < count % size) for rank in range(size)]


# Moving


def _broadcast(comm: Comm, op: Broadcast, room: OpBuffers, any_order: bool) -> Steps:
    x = room.flat(op.x, comm.rank != op.root)
    yield [comm.Ibcast(x.all(), op.root)]


def _all_gather(comm: Comm, op: AllGather, room: OpBuffers, any_order: bool) -> Steps:
    inp = room.flat(op.inp, False)
    out, counts = room.chunks(op.out, comm.size, True)
    yield [comm.Iallgatherv(_unless_in_place(inp, out, counts, comm.rank), out.cut(counts))]


def _all_to_all(comm: Comm, op: AllToAll, room: OpBuffers, any_order: bool) -> Steps:
    inp, sends = room.chunks(op.inp, comm.size, False)
    out, takes = room.chunks(op.out, comm.size, True)
    if exchanges_sizes(op):
        sends = _split(inp.count, op.in_splits, sends)
        takes = _split(out.count, op.out_splits, takes)
        yield from _announce(comm, op, sends, takes)
    yield [comm.Ialltoallv(inp.cut(sends), out.cut(takes))]


def _gather(comm: Comm, op: Gather, room: OpBuffers, any_order: bool) -> Steps:
    inp = room.flat(op.inp, False)
    sends = [inp.count if rank == op.root else 0 for rank in range(comm.size)]
    if comm.rank != op.root:
        yield from _announce(comm, op, sends, [0] * comm.size)
        yield [comm.Igatherv(inp.all(), None, op.root)]
        return
    out, counts = room.chunks(op.out, comm.size, True)
    yield from _announce(comm, op, sends, counts)
    mine = _unless_in_place(inp, out, counts, comm.rank)
    yield [comm.Igatherv(mine, out.cut(counts), op.root)]


def _scatter(comm: Comm, op: Scatter, room: OpBuffers, any_order: bool) -> Steps:
    out = room.flat(op.out, True)
    takes = [out.count if rank == op.root else 0 for rank in range(comm.size)]
    if comm.rank != op.root:
        yield from _announce(comm, op, [0] * comm.size, takes)
        yield [comm.Iscatterv(None, out.all(), op.root)]
        return
    inp, counts = room.chunks(op.inp, comm.size, False)
    yield from _announce(comm, op, counts, takes)
    mine = _unless_in_place(out, inp, counts, comm.rank)
    yield [comm.Iscatterv(inp.cut(counts), mine, op.root)]


def _barrier(comm: Comm, op: Barrier, room: OpBuffers, any_order: bool) -> Steps:
    """Do nothing: to agree, every rank had to come."""
    yield from ()


def _unless_in_place(piece: FlatBuffer, whole: FlatBuffer, counts: Sequence[int], rank: int) -> Any:
    """Describe `piece` for MPI, which must be told if that is this rank's chunk of `whole`."""
    chunk = whole.part(sum(counts[:rank]), counts[rank])
    return MPI.IN_PLACE if piece.count and piece.address == chunk.address else piece.all()


def _split(count: int, splits: Sequence[int] | None, counts: list[int]) -> list[int]:
    """Return the elements of each chunk of `count` elements in rows; without splits, `counts`."""
    if splits is None:
        return counts
    rows = sum(splits)
    return [n * (count // rows) if rows else 0 for n in splits]


# Sizes that only two ranks know


def exchanges_sizes(op: Op) -> bool:
    """Say whether ranks must tell each other the sizes: what all know is in the fingerprint."""
    if isinstance(op, AllToAll):
        splits = (op.in_splits, op.out_splits)
        return isinstance(op.inp, (list, tuple)) or splits != (None, None)
    return isinstance(op, (Gather, Scatter))


def _announce(comm: Comm, op: Op, sends: Sequence[int], takes: Sequence[int]) -> Steps:
    """Compare what ranks send with what their peers expect; all raise if any two differ."""
    coming = np.empty(comm.size, np.int64)
    yield [comm.Ialltoall(np.array(sends, np.int64), coming)]
    first = np.array([comm.size if coming.tolist() == list(takes) else comm.rank])
    yield [comm.Iallreduce(MPI.IN_PLACE, first, MPI.MIN)]
    if first[0] < comm.size:
        name, rank = OP_NAMES[type(op)], int(first[0])
        text = f"{name}: rank {rank} expects other sizes than its peers send"
        detail = f" (it sends {list(sends)}, takes {list(takes)}, and is sent {coming.tolist()})"
        raise CollectiveMismatch(text + detail * (rank == comm.rank), rank=rank, op=name)


_STEPS: dict[type[Any], Callable[[Comm, Any, OpBuffers, bool], Steps]] = {
    AllReduce: _all_reduce,
    Reduce: _reduce,
    Broadcast: _broadcast,
    AllGather: _all_gather,
    ReduceScatter: _reduce_scatter,
    AllToAll: _all_to_all,
    Gather: _gather,
    Scatter: _scatter,
    Barrier: _barrier,
}
