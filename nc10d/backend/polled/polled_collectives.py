"""Each collective as steps: a generator that posts a library's requests and yields them.

`steps(library, op, count)` begins when all ranks have agreed on the call. The number and order of
requests follow from the agreed call, never from a rank's own arrays, because every rank must post
the same requests in the same order. A library reduces where the operands' order does not matter.
For any other reduction, ranks fold each other's arrays in rank order: all ranks the whole arrays if
these are small, else each rank a chunk, whose result is then sent to all (Rabenseifner 2004).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from nc10d import ops
from nc10d.arrays.dtypes import identity
from nc10d.backend.polled.flat_buffers import (
    Chunks,
    FlatBuffer,
    OpBuffers,
    copy,
    even_counts,
    finish,
    fold,
    kernel,
    prepare,
    row_counts,
)
from nc10d.backend.polled.launches import Steps
from nc10d.errors import CollectiveMismatch
from nc10d.kernels.reduce import address
from nc10d.ops.facts import facts_of, name_of

SMALL = 16 * 1024  # bytes in all ranks' arrays, up to which every rank gets all of them


class CollectiveLibrary(Protocol):
    """A library's collectives on a group's ranks: each call posts one, and returns the request.

    Calls never block. `how` is a reduction that `reduction` has returned. Only the root has chunks
    to gather or to scatter, elsewhere they are None. A piece may be this rank's chunk of the other
    array. `even` is True if all ranks' chunks have the same size.
    """

    rank: int
    size: int

    def reduction(self, op: ops.ReduceOp, x: FlatBuffer, scattered: bool = False) -> Any:
        """Return the library's own reduction of x, None if nc10d's kernels must fold x.

        For host arrays AVG is a sum, and PREMUL_SUM a sum of scaled operands. `scattered` is True
        for a reduce_scatter.
        """

    def all_reduce(self, x: FlatBuffer, how: Any) -> object:
        """x := the reduction over all ranks of x"""

    def reduce(self, x: FlatBuffer, how: Any, root: int) -> object:
        """x := the reduction over all ranks of x, on the root"""

    def reduce_scatter(self, out: FlatBuffer, inp: Chunks, how: Any) -> object:
        """out := the reduction over all ranks of this rank's chunk of inp"""

    def scan(self, x: FlatBuffer, how: Any, exclusive: bool) -> object:
        """x := the reduction of x over the ranks up to this rank, or before this rank

        None, and nothing is posted, where the library has no such call.
        """
        return None

    def broadcast(self, x: FlatBuffer, root: int) -> object:
        """x := the root's x"""

    def all_gather(self, out: Chunks, inp: FlatBuffer) -> object:
        """out := all ranks' inp; every rank knows all counts"""

    def all_to_all(self, out: Chunks, inp: Chunks, even: bool) -> object:
        """out[r] := rank r's inp[this rank]"""

    def gather(self, out: Chunks | None, inp: FlatBuffer, root: int, even: bool) -> object:
        """out := all ranks' inp, on the root"""

    def scatter(self, out: FlatBuffer, inp: Chunks | None, root: int, even: bool) -> object:
        """out := this rank's chunk of the root's inp"""


def steps(library: CollectiveLibrary, op: ops.Op, count: int) -> Steps:
    """Return the steps of a validated collective on which all ranks have agreed.

    `count` is the agreed element count, -1 if each rank has its own size.
    """
    if count == 0:  # a barrier, for which the agreement needed every rank, or empty arrays
        return
    buffers = OpBuffers()
    yield from STEPS[type(op)](library, op, buffers)
    buffers.finish()


# Reductions


def _all_reduce(library: CollectiveLibrary, op: ops.AllReduce, buffers: OpBuffers) -> Steps:
    x, size = buffers.contiguous(op.x, True, op.op), library.size
    how = library.reduction(op.op, x)
    if how is not None:
        prepare(x, x, op.op)
        yield [library.all_reduce(x, how)]
        _average(x, size, op.op)
    elif size * x.nbytes <= SMALL:
        rows = buffers.scratch(size * x.count, x.dtype)
        yield [library.all_gather((rows, [x.count] * size), x)]
        fold(x, rows, size, op.op)
    else:
        counts = even_counts(x.count, size)
        own = buffers.scratch(counts[library.rank], x.dtype)
        yield from _fold_chunk(library, (x, counts), own, op.op, buffers)
        yield [library.all_gather((x, counts), own)]


def _reduce(library: CollectiveLibrary, op: ops.Reduce, buffers: OpBuffers) -> Steps:
    is_root = library.rank == op.root
    x = buffers.contiguous(op.x, is_root, op.op)
    how = library.reduction(op.op, x)
    if how is not None:
        own = x if is_root or not op.op.kind.prepares else buffers.scratch(x.count, x.dtype)
        prepare(own, x, op.op)
        yield [library.reduce(own, how, op.root)]
        if is_root:
            _average(x, library.size, op.op)
        return
    counts = even_counts(x.count, library.size)
    own = buffers.scratch(counts[library.rank], x.dtype)
    yield from _fold_chunk(library, (x, counts), own, op.op, buffers)
    yield [library.gather((x, counts) if is_root else None, own, op.root, even=False)]


def _reduce_scatter(library: CollectiveLibrary, op: ops.ReduceScatter, buffers: OpBuffers) -> Steps:
    out = buffers.contiguous(op.out, True, op.op)
    inp, counts = buffers.chunks(op.inp, library.size, False, op.op)
    how = library.reduction(op.op, inp, scattered=True)
    if how is None:
        yield from _fold_chunk(library, (inp, counts), out, op.op, buffers)
    elif inp.device != "cpu":
        yield [library.reduce_scatter(out, (inp, counts), how)]
    else:
        # The output may be a chunk of the input: UCC's own form in place changes the other chunks.
        operand, result = inp, buffers.scratch(out.count, out.dtype)
        if op.op.kind.prepares:
            operand = buffers.scratch(inp.count, inp.dtype)
            prepare(operand, inp, op.op)
        yield [library.reduce_scatter(result, (operand, counts), how)]
        copy(out, result)
        _average(out, library.size, op.op)


def _scan(library: CollectiveLibrary, op: ops.Scan | ops.ExScan, buffers: OpBuffers) -> Steps:
    x = buffers.contiguous(op.x, True, op.op)
    rank, exclusive = library.rank, isinstance(op, ops.ExScan)
    how = None if op.op.kind.prepares else library.reduction(op.op, x)
    posted = None if how is None else library.scan(x, how, exclusive)
    if posted is not None:
        yield [posted]
        if operands := rank if exclusive else rank + 1:
            _average(x, operands, op.op)
    elif x.device != "cpu":
        raise TypeError(f"{name_of(op)}: the library has none: copy the array to host memory")
    else:
        yield from _prefixes(library, x, exclusive, op.op, buffers)
    if isinstance(op, ops.ExScan) and op.identity and rank == 0:
        copy(x, _flat(np.full(x.count, identity(x.dtype, op.op))))


def _prefixes(
    library: CollectiveLibrary, x: FlatBuffer, exclusive: bool, op: ops.ReduceOp, buffers: OpBuffers
) -> Steps:
    """x := op over the ranks up to this rank, or before this rank; rank 0 then keeps its own"""
    # Each rank computes all prefixes of its chunk. Row 0 is rank 0's unchanged contribution; row r
    # + 1 begins as rank r's contribution, and becomes the prefix up to rank r.
    size, counts = library.size, even_counts(x.count, library.size)
    own = counts[library.rank]
    rows, each = buffers.scratch((size + 1) * own, x.dtype), [own] * size
    row = [rows.slice(number * own, own) for number in range(size + 1)]
    came = rows.slice(own, size * own)
    yield [library.all_to_all((came, each), (x, counts), even=False)]
    copy(row[0], row[1])
    prepare(came, came, op)
    combine = kernel(address(op.pairwise.name, x.dtype))
    for before, mine in pairwise(row[1:]):
        combine(mine.address, before.address, mine.address, mine.nbytes)
    for operands, total in enumerate(row[1:], 1):
        finish(total, operands, op)
    sent = rows.slice(0, size * own) if exclusive else came
    yield [library.all_to_all((x, counts), (sent, each), even=False)]


def _fold_chunk(
    library: CollectiveLibrary, x: Chunks, own: FlatBuffer, op: ops.ReduceOp, buffers: OpBuffers
) -> Steps:
    """own := op over all ranks of this rank's chunk of x"""
    rows = buffers.scratch(library.size * own.count, own.dtype)
    yield [library.all_to_all((rows, [own.count] * library.size), x, even=False)]
    fold(own, rows, library.size, op)


def _average(total: FlatBuffer, size: int, op: ops.ReduceOp) -> None:
    if total.device == "cpu":  # on a device the library itself divides
        finish(total, size, op)


# Moving


def _broadcast(library: CollectiveLibrary, op: ops.Broadcast, buffers: OpBuffers) -> Steps:
    yield [library.broadcast(buffers.contiguous(op.x, library.rank != op.root), op.root)]


def _all_gather(library: CollectiveLibrary, op: ops.AllGather, buffers: OpBuffers) -> Steps:
    inp = buffers.contiguous(op.inp, False)
    yield [library.all_gather(buffers.chunks(op.out, library.size, True), inp)]


def _all_to_all(library: CollectiveLibrary, op: ops.AllToAll, buffers: OpBuffers) -> Steps:
    inp, sends = buffers.chunks(op.inp, library.size, False)
    out, takes = buffers.chunks(op.out, library.size, True)
    even = not facts_of(op).own_sizes(op)
    if not even:
        sends = row_counts(inp.count, op.in_splits, sends)
        takes = row_counts(out.count, op.out_splits, takes)
        yield from _announce(library, op, sends, takes)
    yield [library.all_to_all((out, takes), (inp, sends), even)]


def _gather(library: CollectiveLibrary, op: ops.Gather, buffers: OpBuffers) -> Steps:
    inp = buffers.contiguous(op.inp, False)
    out = buffers.chunks(op.out, library.size, True) if library.rank == op.root else None
    if not op.even:
        takes = [0] * library.size if out is None else out[1]
        yield from _announce(library, op, _to_root(library, op, inp), takes)
    yield [library.gather(out, inp, op.root, op.even)]


def _scatter(library: CollectiveLibrary, op: ops.Scatter, buffers: OpBuffers) -> Steps:
    out = buffers.contiguous(op.out, True)
    inp = buffers.chunks(op.inp, library.size, False) if library.rank == op.root else None
    if not op.even:
        sends = [0] * library.size if inp is None else inp[1]
        yield from _announce(library, op, sends, _to_root(library, op, out))
    yield [library.scatter(out, inp, op.root, op.even)]


# Sizes that only sender and receiver know


def _to_root(
    library: CollectiveLibrary, op: ops.Gather | ops.Scatter, piece: FlatBuffer
) -> list[int]:
    """Return the counts that this rank exchanges with each rank: nothing but with the root."""
    return [piece.count if rank == op.root else 0 for rank in range(library.size)]


def _announce(
    library: CollectiveLibrary, op: ops.Op, sends: Sequence[int], takes: Sequence[int]
) -> Steps:
    """Compare the sizes that ranks send with those their peers expect; all raise if any differ."""
    rank, size = library.rank, library.size
    # The library reads and writes these arrays after the post.
    sent, coming, first = np.array(sends, np.int64), np.empty(size, np.int64), np.empty(1, np.int64)
    each = [1] * size
    yield [library.all_to_all((_flat(coming), each), (_flat(sent), each), even=True)]
    # The lowest rank that expects other sizes:
    first[0] = size if coming.tolist() == list(takes) else rank
    yield [library.all_reduce(_flat(first), library.reduction(ops.MIN, _flat(first)))]
    if first[0] < size:
        name, found = name_of(op), int(first[0])
        text = f"{name}: rank {found} expects other sizes than its peers send"
        sizes = list(sends), list(takes), coming.tolist()
        detail = " (it sends {}, takes {}, and is sent {})".format(*sizes) * (found == rank)
        raise CollectiveMismatch(text + detail, rank=found, op=name)


def _flat(x: np.ndarray[Any, Any]) -> FlatBuffer:
    return OpBuffers().contiguous(x, False)


STEPS: dict[type[Any], Callable[[CollectiveLibrary, Any, OpBuffers], Steps]] = {
    ops.AllReduce: _all_reduce,
    ops.Reduce: _reduce,
    ops.Broadcast: _broadcast,
    ops.AllGather: _all_gather,
    ops.ReduceScatter: _reduce_scatter,
    ops.AllToAll: _all_to_all,
    ops.Scan: _scan,
    ops.ExScan: _scan,
    ops.Gather: _gather,
    ops.Scatter: _scatter,
}
"""The steps for each kind but the barrier, which posts nothing."""
