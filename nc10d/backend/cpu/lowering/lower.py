"""From an operation to a program: its arrays, how to build its steps, and a cache of programs.

`lower(op, shape)` reads the operation's arrays and returns a key, the buffers in the order in which
the program numbers them, and a builder, called only when no program with that key is cached. A key
holds everything that the program depends on, so that operations with equal keys share a program.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nc10d import ops
from nc10d.arrays.buffer import Buffer, as_buffer
from nc10d.arrays.call_info import call_of
from nc10d.arrays.dtypes import ElementType, identity, reduced_element
from nc10d.backend.cpu.algorithms import choose, exchange
from nc10d.backend.cpu.algorithms.group_shape import GroupShape
from nc10d.backend.cpu.algorithms.hosts_exchange import local_first
from nc10d.backend.cpu.algorithms.reduction import Reduction
from nc10d.backend.cpu.algorithms.scan import scan
from nc10d.backend.cpu.native import offsets as at
from nc10d.backend.cpu.program.linker import Linked, Scratch, link
from nc10d.backend.cpu.program.program import At, Kernel, Program, user
from nc10d.kernels.reduce import address
from nc10d.ops import Array, Op
from nc10d.ops.facts import facts_of
from nc10d.ops.operations import Arrays

MOST_PROGRAMS = 4096
"""A cache that has grown to its limit is emptied."""


@dataclass(frozen=True, slots=True)
class StridedArray:
    """A strided array: the numbers of the copy (copied back if `written`), array and shape."""

    copy: int
    strided: int
    shape: int
    written: bool


@dataclass(slots=True)
class LoweredOp:
    """A program's key, arrays in the program's order, and a builder."""

    # Buffers are the user's arrays; other arrays belong to the program (sizes, shapes, copies).
    # `outs` are the numbers of the arrays that are written. `part` is an all_reduce's bytes and
    # reduction, which a batch may join with others. `strided` are the arrays with copies.

    key: tuple[object, ...]
    arrays: list[Buffer | npt.NDArray[Any]]
    outs: tuple[int, ...]
    build: Callable[[], Program]
    part: tuple[int, Reduction] | None = None
    strided: tuple[StridedArray, ...] = ()


def lower(op: Op, shape: GroupShape) -> LoweredOp:
    """Lower a collective, which has been validated, for this rank in a group with this shape."""
    return LOWERINGS[type(op)](op, shape)


def _all_reduce(op: ops.AllReduce | ops.Reduce, shape: GroupShape) -> LoweredOp:
    """Lower a reduction to every rank, or to the root alone."""
    x = as_buffer(op.x)
    root = op.root if isinstance(op, ops.Reduce) else -1
    reduction = _reduction(op, x, shape)
    call = call_of(op)
    key = (type(op), x.dtype, x.count, reduction, root)

    def build() -> Program:
        return Program(call, tuple(choose.all_reduce(shape, x.nbytes, reduction, root)), 1)

    outs = (0,) if root in (-1, shape.rank) else ()
    joins = root < 0 and not (shape.hosts and reduction.in_rank_order)
    return LoweredOp(key, [x], outs, build, (x.nbytes, reduction) if joins else None)


def _reduction(op: Any, x: Buffer, shape: GroupShape) -> Reduction:
    element = reduced_element(x.dtype, op.op, x.shape[-1] if x.shape else 1)
    return Reduction(op.op, element, shape.size)


def _broadcast(op: ops.Broadcast, shape: GroupShape) -> LoweredOp:
    x = as_buffer(op.x)
    call = call_of(op)
    outs = () if shape.rank == op.root else (0,)

    def build() -> Program:
        return Program(call, tuple(choose.broadcast(shape, x.nbytes, op.root)), 1)

    return LoweredOp((ops.Broadcast, x.dtype, x.count, op.root), [x], outs, build)


def _barrier(op: ops.Barrier, shape: GroupShape) -> LoweredOp:
    call = call_of(op)
    return LoweredOp((ops.Barrier,), [], (), lambda: Program(call, tuple(choose.barrier(shape)), 0))


def _scan(op: ops.Scan | ops.ExScan, shape: GroupShape) -> LoweredOp:
    x, exclusive = as_buffer(op.x), isinstance(op, ops.ExScan)
    reduction = _reduction(op, x, shape)
    call, own = call_of(op), list[npt.NDArray[Any]]()
    if isinstance(op, ops.ExScan) and op.identity and shape.rank == 0:
        element = reduction.dtype
        count = min(x.nbytes, shape.slot_bytes) // element.itemsize
        own.append(np.full(count, identity(element, op.op), element.numpy))
    first, at_x = user(0) if own else None, user(len(own))

    def build() -> Program:
        steps = scan(shape, x.nbytes, at_x, reduction, exclusive, first)
        return Program(call, tuple(steps), len(own) + 1)

    key = (type(op), x.dtype, x.count, reduction, bool(own))
    return LoweredOp(key, [*own, x], (len(own),), build)


def _all_gather(op: ops.AllGather, shape: GroupShape) -> LoweredOp:
    inp, outs = as_buffer(op.inp), _per_rank(op.out, shape.size)
    call = call_of(op)
    count = len(outs.buffers)
    key = (ops.AllGather, inp.dtype, count, outs.sizes)

    def build() -> Program:
        steps = choose.all_gather(shape, outs.sizes, user(0), outs.places(1))
        return Program(call, tuple(steps), 1 + count)

    return LoweredOp(key, [inp, *outs.buffers], tuple(range(1, 1 + count)), build)


def _reduce_scatter(op: ops.ReduceScatter, shape: GroupShape) -> LoweredOp:
    out, inps = as_buffer(op.out), _per_rank(op.inp, shape.size)
    reduction = _reduction(op, out, shape)
    call = call_of(op)
    key = (ops.ReduceScatter, out.dtype, len(inps.buffers), inps.sizes, reduction)

    def build() -> Program:
        steps = choose.reduce_scatter(shape, inps.sizes, user(0), inps.places(1), reduction)
        return Program(call, tuple(steps), 1 + len(inps.buffers))

    return LoweredOp(key, [out, *inps.buffers], (0,), build)


def _all_to_all(op: ops.AllToAll, shape: GroupShape) -> LoweredOp:
    if not facts_of(op).own_sizes(op):
        return _even_all_to_all(op, shape)
    sends = _by_rows(op.inp, op.in_splits, shape.size)
    recvs = _by_rows(op.out, op.out_splits, shape.size)
    return _sized_exchange(op, shape, sends, recvs)


def _even_all_to_all(op: ops.AllToAll, shape: GroupShape) -> LoweredOp:
    inp, out = _per_rank(op.inp, shape.size), _per_rank(op.out, shape.size)
    (source,), nbytes = inp.buffers, inp.sizes[0]
    call = call_of(op)

    def build() -> Program:
        steps = choose.even_all_to_all(shape, nbytes, inp.places(0), out.places(1))
        return Program(call, tuple(steps), 2)

    key = (ops.AllToAll, source.dtype, source.count)
    return LoweredOp(key, [source, *out.buffers], (1,), build)


@dataclass(frozen=True, slots=True)
class Pieces:
    """The pieces that a rank sends, or receives: (buffer, offset, bytes) for each peer."""

    buffers: list[Buffer]
    cuts: list[tuple[int, int, int]]
    dtype: ElementType

    @property
    def sizes(self) -> tuple[int, ...]:
        """Each piece's bytes."""
        return tuple(nbytes for _, _, nbytes in self.cuts)

    def places(self, first: int) -> list[At]:
        """Return each piece's place; the program numbers the buffers from `first` on."""
        return [user(first + index, offset) for index, offset, _ in self.cuts]


def _by_rows(arrays: Arrays, splits: Sequence[int] | None, size: int) -> Pieces:
    """Return pieces as `_per_rank`, but a single array is cut along dimension 0 by `splits`."""
    if splits is None or isinstance(arrays, (list, tuple)):
        return _per_rank(arrays, size)
    flat = as_buffer(arrays)
    rows = flat.shape[0] if flat.shape else 1
    row = flat.nbytes // rows if rows else 0
    ends = itertools.accumulate(splits, initial=0)
    cuts = [(0, offset * row, n * row) for offset, n in zip(ends, splits, strict=False)]
    return Pieces([flat], cuts, flat.dtype)


def _for_one_rank(array: Array, rank: int, size: int) -> Pieces:
    """Return a whole array as a single rank's piece; the other ranks' pieces are empty."""
    buffer = as_buffer(array)
    cuts = [(0, 0, buffer.nbytes if r == rank else 0) for r in range(size)]
    return Pieces([buffer], cuts, buffer.dtype)


def _per_rank(arrays: Arrays, size: int) -> Pieces:
    """Return a piece for each rank: a list's arrays, or equal chunks of a single array."""
    if isinstance(arrays, (list, tuple)):
        buffers = [as_buffer(x) for x in arrays]
        cuts = [(r, 0, buffer.nbytes) for r, buffer in enumerate(buffers)]
        return Pieces(buffers, cuts, buffers[0].dtype)
    buffer = as_buffer(arrays)
    nbytes = buffer.nbytes // size
    return Pieces([buffer], [(0, r * nbytes, nbytes) for r in range(size)], buffer.dtype)


def _gather(op: ops.Gather, shape: GroupShape) -> LoweredOp:
    sends = _for_one_rank(op.inp, op.root, shape.size)
    recvs = _at_root(op.out, op.root, shape, sends.dtype)
    return _sized_exchange(op, shape, sends, recvs)


def _scatter(op: ops.Scatter, shape: GroupShape) -> LoweredOp:
    recvs = _for_one_rank(op.out, op.root, shape.size)
    sends = _at_root(op.inp, op.root, shape, recvs.dtype)
    return _sized_exchange(op, shape, sends, recvs)


def _at_root(arrays: Arrays, root: int, shape: GroupShape, dtype: ElementType) -> Pieces:
    """Return a piece for each rank on the root, empty pieces on other ranks."""
    if shape.rank == root:
        return _per_rank(arrays, shape.size)
    return Pieces([], [(0, 0, 0)] * shape.size, dtype)


def _sized_exchange(op: Op, shape: GroupShape, sends: Pieces, recvs: Pieces) -> LoweredOp:
    """Lower an exchange whose senders announce sizes that their receivers compare."""
    # x's arrays come first, see Parts in ops.facts: in a scatter those are received.
    call, scatters = call_of(op), isinstance(op, ops.Scatter)
    pair = [recvs, sends] if scatters else [sends, recvs]
    second = 1 + len(pair[0].buffers)
    first_out, first_in = (second, 1) if scatters else (1, second)

    def build() -> Program:
        route = exchange.Route(
            # An empty piece is never read or written, but needs some valid place.
            [user(first_out + index if n else 0, offset) for index, offset, n in sends.cuts],
            sends.sizes,
            [user(first_in + index if n else 0, offset) for index, offset, n in recvs.cuts],
            recvs.sizes,
            to_one=isinstance(op, ops.Gather),
        )
        steps = choose.announced(shape, route)
        return Program(call, tuple(steps), second + len(pair[1].buffers))

    key = (call, tuple(sends.cuts), tuple(recvs.cuts), len(sends.buffers))
    sizes = np.array([(sends.sizes[r], recvs.sizes[r]) for r in local_first(shape)], np.int64)
    outs = tuple(range(first_in, first_in + len(recvs.buffers)))
    return LoweredOp(key, [sizes, *pair[0].buffers, *pair[1].buffers], outs, build)


LOWERINGS: dict[type[Any], Callable[[Any, GroupShape], LoweredOp]] = {
    ops.AllReduce: _all_reduce,
    ops.Reduce: _all_reduce,
    ops.Broadcast: _broadcast,
    ops.Barrier: _barrier,
    ops.AllGather: _all_gather,
    ops.ReduceScatter: _reduce_scatter,
    ops.AllToAll: _all_to_all,
    ops.Scan: _scan,
    ops.ExScan: _scan,
    ops.Gather: _gather,
    ops.Scatter: _scatter,
}


class ProgramCache:
    """The programs for a group with this shape."""

    def __init__(self, shape: GroupShape) -> None:
        self.shape = shape
        self._scratch = Scratch()
        self._linked: dict[tuple[object, ...], Linked] = {}

    def linked(self, lowered: LoweredOp) -> Linked:
        """Return the program of a lowered operation; a new program may block to compile kernels."""
        found = self._linked.get(lowered.key)
        if found is None:
            if len(self._linked) >= MOST_PROGRAMS:
                self._linked.clear()
            program = lowered.build()
            size, room = self.shape.local.size, self._scratch.room
            found = link(program, size, at.C_TABLES, resolve, room)
            self._linked[lowered.key] = found
        return found


def resolve(kernel: Kernel) -> int:
    """Return a kernel's address; may block to compile."""
    return address(kernel.kind, kernel.dtype)
