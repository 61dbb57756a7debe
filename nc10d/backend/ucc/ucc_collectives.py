"""Each collective as steps: a generator that posts UCC's collectives and yields them to wait for.

`steps(team, op, any_order)` begins when all ranks have agreed on the call. The number and order of
UCC's collectives follow from the agreed call, never from a rank's own arrays, because every rank
must post them in the same order. UCC reduces where the order of operands does not matter. For any
other reduction, ranks fold each other's arrays in rank order: all ranks the whole arrays if they
are small, else each rank a chunk, whose result it then sends to all (Rabenseifner 2004).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol

import numpy as np

from nc10d import ops
from nc10d.arrays.buffer import as_buffer
from nc10d.backend.polled.announced_sizes import raise_if_sizes_differ
from nc10d.backend.polled.flat_buffers import (
    FlatBuffer,
    OpBuffers,
    even_counts,
    finish,
    fold,
    prepare,
    row_counts,
)
from nc10d.backend.ucc import requests as ucc
from nc10d.backend.ucc.datatypes import UccReduction, native
from nc10d.backend.ucc.team import UccTeam
from nc10d.ops.facts import facts_of, is_message, name_of

SMALL = 16 * 1024  # bytes of all ranks' arrays, up to which every rank gets all of them


class Waitable(Protocol):
    """Something that ends by itself."""

    def ready(self) -> bool:
        """Return whether it has ended, without blocking; raises its error if it failed."""


Steps = Generator[Sequence[Waitable] | None, None, None]
"""An operation in steps: a generator that yields the requests it waits for (None: resume it at the
next poll)."""


def steps(team: UccTeam, op: ops.Op, any_order: bool) -> Steps:
    """Return the steps of a validated collective on which all ranks have agreed."""
    buffers = OpBuffers()
    yield from STEPS[type(op)](team, op, buffers, any_order)
    buffers.finish()


# Reductions


def _all_reduce(team: UccTeam, op: ops.AllReduce, buffers: OpBuffers, any_order: bool) -> Steps:
    x = buffers.contiguous(op.x, True)
    how = native(op.op, x, team.size, any_order)
    if not x.count:
        return
    if how is not None:
        _scale(x, x, op.op)
        yield [ucc.all_reduce(team, x, how)]
        _average(x, team.size, op.op)
    elif team.size * x.nbytes <= SMALL:
        rows = buffers.scratch(team.size * x.count, x.dtype)
        yield [ucc.all_gather(team, (rows, [x.count] * team.size), x)]
        fold(x, rows, team.size, op.op)
    else:
        counts = even_counts(x.count, team.size)
        own = buffers.scratch(counts[team.rank], x.dtype)
        yield from _fold_chunk(team, x, counts, own, op.op, buffers)
        yield [ucc.all_gather(team, (x, counts), own)]


def _reduce(team: UccTeam, op: ops.Reduce, buffers: OpBuffers, any_order: bool) -> Steps:
    is_root = team.rank == op.root
    x = buffers.contiguous(op.x, is_root)
    how = native(op.op, x, team.size, any_order)
    if not x.count:
        return
    if how is not None:
        own = x if op.op.factor is None or is_root else buffers.scratch(x.count, x.dtype)
        _scale(own, x, op.op)
        yield [ucc.reduce(team, own, how, op.root)]
        if is_root:
            _average(x, team.size, op.op)
        return
    counts = even_counts(x.count, team.size)
    own = buffers.scratch(counts[team.rank], x.dtype)
    yield from _fold_chunk(team, x, counts, own, op.op, buffers)
    yield [ucc.gather_v(team, (x, counts) if is_root else None, own, op.root)]


def _reduce_scatter(
    team: UccTeam, op: ops.ReduceScatter, buffers: OpBuffers, any_order: bool
) -> Steps:
    out = buffers.contiguous(op.out, True)
    inp, counts = buffers.chunks(op.inp, team.size, False)
    how = native(op.op, inp, team.size, any_order)
    if how is None:
        yield from _fold_chunk(team, inp, counts, out, op.op, buffers)
    elif inp.count:
        yield from _reduce_scatter_by_ucc(team, op, out, (inp, counts), how, buffers)


def _reduce_scatter_by_ucc(
    team: UccTeam,
    op: ops.ReduceScatter,
    out: FlatBuffer,
    inp: ucc.Chunks,
    how: UccReduction,
    buffers: OpBuffers,
) -> Steps:
    whole, counts = inp
    if whole.device != "cpu":
        yield [ucc.reduce_scatter(team, out, inp, how)]
        return
    # The output may be a chunk of the input: UCC's own form in place changes the rest of it.
    operand, result = whole, buffers.scratch(out.count, out.dtype)
    if op.op.factor is not None:
        operand = buffers.scratch(whole.count, whole.dtype)
        _scale(operand, whole, op.op)
    yield [ucc.reduce_scatter(team, result, (operand, counts), how)]
    prepare(out, result, ops.SUM)
    _average(out, team.size, op.op)


def _fold_chunk(
    team: UccTeam,
    x: FlatBuffer,
    counts: Sequence[int],
    own: FlatBuffer,
    op: ops.ReduceOp,
    buffers: OpBuffers,
) -> Steps:
    """own := op over all ranks of this rank's chunk of x"""
    rows = buffers.scratch(team.size * own.count, own.dtype)
    yield [ucc.all_to_all_v(team, (rows, [own.count] * team.size), (x, counts))]
    fold(own, rows, team.size, op)


def _scale(into: FlatBuffer, x: FlatBuffer, op: ops.ReduceOp) -> None:
    if x.device == "cpu":
        prepare(into, x, op)


def _average(total: FlatBuffer, size: int, op: ops.ReduceOp) -> None:
    if total.device == "cpu":
        finish(total, size, op)


# Moving


def _broadcast(team: UccTeam, op: ops.Broadcast, buffers: OpBuffers, any_order: bool) -> Steps:
    x = buffers.contiguous(op.x, team.rank != op.root)
    if x.count:
        yield [ucc.broadcast(team, x, op.root)]


def _all_gather(team: UccTeam, op: ops.AllGather, buffers: OpBuffers, any_order: bool) -> Steps:
    inp = buffers.contiguous(op.inp, False)
    out, counts = buffers.chunks(op.out, team.size, True)
    if out.count:
        yield [ucc.all_gather(team, (out, counts), inp)]


def _all_to_all(team: UccTeam, op: ops.AllToAll, buffers: OpBuffers, any_order: bool) -> Steps:
    inp, sends = buffers.chunks(op.inp, team.size, False)
    out, takes = buffers.chunks(op.out, team.size, True)
    if facts_of(op).own_sizes(op):
        sends = row_counts(inp.count, op.in_splits, sends)
        takes = row_counts(out.count, op.out_splits, takes)
        yield from _announce(team, op, sends, takes)
        yield [ucc.all_to_all_v(team, (out, takes), (inp, sends))]
    elif inp.count:
        yield [ucc.all_to_all(team, out, inp)]


def _gather(team: UccTeam, op: ops.Gather, buffers: OpBuffers, any_order: bool) -> Steps:
    inp = buffers.contiguous(op.inp, False)
    is_root = team.rank == op.root
    whole, counts = buffers.chunks(op.out, team.size, True) if is_root else (None, [0] * team.size)
    sends = [inp.count if rank == op.root else 0 for rank in range(team.size)]
    yield from _announce(team, op, sends, counts)
    if not op.even:
        out = None if whole is None else (whole, counts)
        yield [ucc.gather_v(team, out, inp, op.root)]
    elif inp.count:
        yield [ucc.gather(team, whole, inp, op.root)]


def _scatter(team: UccTeam, op: ops.Scatter, buffers: OpBuffers, any_order: bool) -> Steps:
    out = buffers.contiguous(op.out, True)
    is_root = team.rank == op.root
    whole, counts = buffers.chunks(op.inp, team.size, False) if is_root else (None, [0] * team.size)
    takes = [out.count if rank == op.root else 0 for rank in range(team.size)]
    yield from _announce(team, op, counts, takes)
    if not op.even:
        inp = None if whole is None else (whole, counts)
        yield [ucc.scatter_v(team, out, inp, op.root)]
    elif out.count:
        yield [ucc.scatter_even(team, out, whole, op.root)]


def _barrier(team: UccTeam, op: ops.Barrier, buffers: OpBuffers, any_order: bool) -> Steps:
    yield [ucc.barrier(team)]


def _announce(team: UccTeam, op: ops.Op, sends: Sequence[int], takes: Sequence[int]) -> Steps:
    """Compare the sizes that ranks send with those their peers expect; all raise if any differ."""
    # UCC reads and writes them after the post.
    sent, coming = np.array(sends, np.int64), np.empty(team.size, np.int64)
    first = np.empty(1, np.int64)
    yield [ucc.all_to_all(team, _flat(coming), _flat(sent))]
    first[0] = team.size if coming.tolist() == list(takes) else team.rank
    flat = _flat(first)
    least = native(ops.MIN, flat, team.size, False)
    assert least is not None, "UCC finds the minimum of ints"
    yield [ucc.all_reduce(team, flat, least)]
    sizes = sends, takes, coming.tolist()
    raise_if_sizes_differ(op, int(first[0]), team.rank, sizes, team.size)


def _flat(x: np.ndarray[Any, Any]) -> FlatBuffer:
    return OpBuffers().contiguous(x, False)


# What UCC takes of device arrays


def check_devices(batch: Sequence[ops.Op], size: int) -> None:
    """Raise TypeError where an operation's device arrays are not for UCC."""
    for op in batch:
        for array in filter(_given, (getattr(op, name) for name in facts_of(op).arrays)):
            first = array[0] if isinstance(array, (list, tuple)) else array
            buffer = as_buffer(first)
            if buffer.device != "cpu":
                _check_device_array(op, array is not first, buffer, size)


def _given(array: Any) -> bool:
    return array is not None and not (isinstance(array, (list, tuple)) and not array)


def _check_device_array(op: ops.Op, listed: bool, buffer: Any, size: int) -> None:
    name = name_of(op)
    if is_message(op):
        text = f'the ucc backend has no messages on {buffer.device}: use "gloo" or "nccl"'
        raise TypeError(f"{name}: {text}")
    if listed or not buffer.contiguous:
        text = f"ucc takes arrays on {buffer.device} as a flat array, and contiguous, only"
        raise TypeError(f"{name}: {text}")
    how = getattr(op, "op", None)
    if how is None:
        return
    flat = FlatBuffer(buffer.address, buffer.count, buffer.dtype, buffer.device, None)
    if how.kind.prepares:
        raise TypeError(f"{name}: UCC has no {how.name}: multiply the array before the call")
    native(how, flat, size, True)


STEPS: dict[type[Any], Callable[[UccTeam, Any, OpBuffers, bool], Steps]] = {
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
