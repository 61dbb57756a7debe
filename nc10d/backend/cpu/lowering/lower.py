"""From an operation to a program: which arrays it takes, and how to build its steps.

`lower(op, shape)` reads the operation's arrays and returns a key, the buffers in the order in which
the program numbers them, and a builder, called only when no program of that key is cached. A key
holds everything that the program depends on, so that operations with equal keys share a program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nc10d.arrays.buffer import Buffer, as_buffer
from nc10d.backend.cpu.algorithms import choose, exchange
from nc10d.backend.cpu.algorithms.group_shape import GroupShape
from nc10d.backend.cpu.algorithms.hosts_exchange import local_first
from nc10d.backend.cpu.algorithms.reduction import Reduction
from nc10d.backend.cpu.program.program import At, CallInfo, Program, Step, line_down, user
from nc10d.ops import (
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


@dataclass(frozen=True, slots=True)
class StridedArray:
    """A strided array: the numbers of its contiguous copy, of itself and of its shape's words.

    A copy that the program has `written` is copied back.
    """

    copy: int
    strided: int
    shape: int
    written: bool


@dataclass(slots=True)
class LoweredOp:
    """A program's key, its arrays in the program's order, and how to build it.

    Buffers are arrays of the user; other arrays belong to the program (sizes, shapes, copies).
    `outs` are the numbers of the arrays that are written. `part` is the bytes and reduction of an
    all_reduce, which a batch may join with others. `strided` are the arrays with copies.
    """

    key: tuple[Any, ...]
    arrays: list[Buffer | npt.NDArray[Any]]
    outs: tuple[int, ...]
    build: Callable[[], Program]
    part: tuple[int, Reduction] | None = None
    strided: tuple[StridedArray, ...] = ()


def lower(op: Op, shape: GroupShape) -> LoweredOp:
    """Lower a collective, which has been validated, for this rank of a group of this shape."""
    return _LOWERINGS[type(op)](op, shape)


def _program(call: CallInfo, steps: Sequence[Step], users: int) -> Program:
    return Program(call, tuple(steps), users)


def _reduce_name(op: ReduceOp) -> str:
    return op.name if op.factor is None else f"{op.name}({op.factor})"


def _all_reduce(op: AllReduce, shape: GroupShape) -> LoweredOp:
    x = as_buffer(op.x)
    reduction = Reduction(op.op, x.dtype.label, shape.size)
    call = CallInfo("all_reduce", x.dtype.label, x.count, _reduce_name(op.op))
    key = (AllReduce, x.dtype, x.count, op.op)

    def build() -> Program:
        return _program(call, choose.all_reduce(shape, x.nbytes, reduction), 1)

    return LoweredOp(key, [x], (0,), build, part=(x.nbytes, reduction))


def _reduce(op: Reduce, shape: GroupShape) -> LoweredOp:
    x = as_buffer(op.x)
    reduction = Reduction(op.op, x.dtype.label, shape.size)
    call = CallInfo("reduce", x.dtype.label, x.count, _reduce_name(op.op), op.root)
    key = (Reduce, x.dtype, x.count, op.op, op.root)
    outs = (0,) if shape.rank == op.root else ()

    def build() -> Program:
        return _program(call, choose.all_reduce(shape, x.nbytes, reduction, op.root), 1)

    return LoweredOp(key, [x], outs, build)


def _broadcast(op: Broadcast, shape: GroupShape) -> LoweredOp:
    x = as_buffer(op.x)
    call = CallInfo("broadcast", x.dtype.label, x.count, root=op.root)
    outs = () if shape.rank == op.root else (0,)

    def build() -> Program:
        return _program(call, choose.broadcast(shape, x.nbytes, op.root), 1)

    return LoweredOp((Broadcast, x.dtype, x.count, op.root), [x], outs, build)


def _barrier(op: Barrier, shape: GroupShape) -> LoweredOp:
    del op
    return LoweredOp(
        (Barrier,), [], (), lambda: _program(CallInfo("barrier"), choose.barrier(shape), 0)
    )


def _all_gather(op: AllGather, shape: GroupShape) -> LoweredOp:
    inp = as_buffer(op.inp)
    outs, places, sizes = _chunks(op.out, shape.size, 1)
    detail = "" if len(set(sizes)) == 1 else f"sizes={sizes}"
    call = CallInfo("all_gather", inp.dtype.label, sum(sizes) // inp.dtype.itemsize, detail=detail)
    key = (AllGather, inp.dtype, len(outs), tuple(sizes))

    def build() -> Program:
        steps = choose.all_gather(shape, sizes, user(0), places)
        return _program(call, steps, 1 + len(outs))

    return LoweredOp(key, [inp, *outs], tuple(range(1, 1 + len(outs))), build)


def _reduce_scatter(op: ReduceScatter, shape: GroupShape) -> LoweredOp:
    out = as_buffer(op.out)
    inps, places, sizes = _chunks(op.inp, shape.size, 1)
    reduction = Reduction(op.op, out.dtype.label, shape.size)
    detail = "" if len(set(sizes)) == 1 else f"sizes={sizes}"
    count = sum(sizes) // out.dtype.itemsize
    call = CallInfo("reduce_scatter", out.dtype.label, count, _reduce_name(op.op), detail=detail)
    key = (ReduceScatter, out.dtype, len(inps), tuple(sizes), op.op)

    def build() -> Program:
        steps = choose.reduce_scatter(shape, sizes, user(0), places, reduction)
        return _program(call, steps, 1 + len(inps))

    return LoweredOp(key, [out, *inps], (0,), build)


def _chunks(arrays: Any, size: int, first: int) -> tuple[list[Buffer], list[At], list[int]]:
    """Return buffers, and the place and bytes of each rank's chunk in them.

    `arrays` is a list with an array per rank, or a single array cut into equal chunks. The program
    numbers the buffers from `first` on.
    """
    if isinstance(arrays, (list, tuple)):
        buffers = [as_buffer(x) for x in arrays]
        places = [user(first + r) for r in range(size)]
        return buffers, places, [b.nbytes for b in buffers]
    flat = as_buffer(arrays)
    nbytes = flat.nbytes // size
    return [flat], [user(first, r * nbytes) for r in range(size)], [nbytes] * size


def _all_to_all(op: AllToAll, shape: GroupShape) -> LoweredOp:
    lists = isinstance(op.inp, (list, tuple))
    if not lists and op.in_splits is None and op.out_splits is None:
        return _even_all_to_all(op, shape)
    sends = _pieces(op.inp, op.in_splits, shape.size)
    recvs = _pieces(op.out, op.out_splits, shape.size)
    return _sized_exchange("all_to_all", shape, sends, recvs, root=-1)


def _even_all_to_all(op: AllToAll, shape: GroupShape) -> LoweredOp:
    inp, out = as_buffer(op.inp), as_buffer(op.out)
    nbytes = inp.nbytes // shape.size
    call = CallInfo("all_to_all", inp.dtype.label, inp.count)

    def build() -> Program:
        sends = [user(0, r * nbytes) for r in range(shape.size)]
        recvs = [user(1, r * nbytes) for r in range(shape.size)]
        return _program(call, choose.even_all_to_all(shape, nbytes, sends, recvs), 2)

    return LoweredOp((AllToAll, inp.dtype, inp.count), [inp, out], (1,), build)


@dataclass(frozen=True, slots=True)
class Pieces:
    """The pieces that a rank sends, or receives: (buffer, offset, bytes) for each peer."""

    buffers: list[Buffer]
    cuts: list[tuple[int, int, int]]
    label: str


def _pieces(arrays: Any, splits: Sequence[int] | None, size: int) -> Pieces:
    if isinstance(arrays, (list, tuple)):
        buffers = [as_buffer(x) for x in arrays]
        cuts = [(r, 0, b.nbytes) for r, b in enumerate(buffers)]
        return Pieces(buffers, cuts, buffers[0].dtype.label)
    flat = as_buffer(arrays)
    rows = flat.shape[0] if flat.shape else 1
    row = flat.nbytes // rows if rows else 0
    lengths = [rows // size] * size if splits is None else list(splits)
    cuts, offset = [], 0
    for length in lengths:
        cuts.append((0, offset, length * row))
        offset += length * row
    return Pieces([flat], cuts, flat.dtype.label)


def _for_one_rank(array: Any, rank: int, size: int) -> Pieces:
    """Return a whole array as the piece of a single rank; the pieces of others are empty."""
    buffer = as_buffer(array)
    cuts = [(0, 0, buffer.nbytes if r == rank else 0) for r in range(size)]
    return Pieces([buffer], cuts, buffer.dtype.label)


def _per_rank(arrays: Any, size: int) -> Pieces:
    """Return a piece for each rank: the arrays of a list, or equal chunks of a single array."""
    if isinstance(arrays, (list, tuple)):
        return _pieces(arrays, None, size)
    buffer = as_buffer(arrays)
    nbytes = buffer.nbytes // size
    return Pieces([buffer], [(0, r * nbytes, nbytes) for r in range(size)], buffer.dtype.label)


def _no_pieces(size: int, label: str) -> Pieces:
    return Pieces([], [(0, 0, 0)] * size, label)


def _gather(op: Gather, shape: GroupShape) -> LoweredOp:
    sends = _for_one_rank(op.inp, op.root, shape.size)
    if shape.rank == op.root:
        recvs = _per_rank(op.out, shape.size)
    else:
        recvs = _no_pieces(shape.size, sends.label)
    return _sized_exchange("gather", shape, sends, recvs, root=op.root)


def _scatter(op: Scatter, shape: GroupShape) -> LoweredOp:
    recvs = _for_one_rank(op.out, op.root, shape.size)
    if shape.rank == op.root:
        sends = _per_rank(op.inp, shape.size)
    else:
        sends = _no_pieces(shape.size, recvs.label)
    return _sized_exchange("scatter", shape, sends, recvs, root=op.root)


def _sized_exchange(
    name: str, shape: GroupShape, sends: Pieces, recvs: Pieces, root: int
) -> LoweredOp:
    """Lower an exchange of pieces whose sizes only their sender and receiver know.

    The senders announce the sizes, and the receivers compare them with their own.
    """
    send_bytes = [nbytes for _, _, nbytes in sends.cuts]
    recv_bytes = [nbytes for _, _, nbytes in recvs.cuts]
    # In a gather, a rank's whole staging slot is for the root; else it is cut into a part per rank.
    shared = name != "gather"
    slot = line_down(shape.staging // shape.size) if shared else shape.staging
    pitch = slot if shared else 0
    first = 2 + len(sends.buffers)

    def build() -> Program:
        route = exchange.Route(
            # An empty piece is never read or written, but needs some valid place.
            [user(2 + index if n else 0, offset) for index, offset, n in sends.cuts],
            send_bytes,
            [user(first + index if n else 0, offset) for index, offset, n in recvs.cuts],
            recv_bytes,
            slot,
            pitch,
        )
        steps = choose.announced(shape, route, 0, 1)
        call = CallInfo(name, sends.label, -1, root=root)
        return _program(call, steps, first + len(recvs.buffers))

    key = (name, sends.label, root, tuple(sends.cuts), tuple(recvs.cuts), len(sends.buffers))
    order = local_first(shape)
    sizes = [np.array(sizes, np.int64)[order] for sizes in (send_bytes, recv_bytes)]
    outs = tuple(range(first, first + len(recvs.buffers)))
    return LoweredOp(key, [*sizes, *sends.buffers, *recvs.buffers], outs, build)


_LOWERINGS: dict[type[Any], Callable[[Any, GroupShape], LoweredOp]] = {
    AllReduce: _all_reduce,
    Reduce: _reduce,
    Broadcast: _broadcast,
    Barrier: _barrier,
    AllGather: _all_gather,
    ReduceScatter: _reduce_scatter,
    AllToAll: _all_to_all,
    Gather: _gather,
    Scatter: _scatter,
}
