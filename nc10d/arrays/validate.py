"""Check the arguments of an operation before anything is sent.

`validate(op, rank, size)` raises ValueError or TypeError, which names the call, the argument and
the requirement in the words of the public API. Only this rank's arguments are checked, and nothing
is changed. The returned operation is the one to run, on arrays whose memory has been looked up
once and for all. The fingerprint, not this module, detects disagreement between ranks.

Outputs must be writable, must not repeat an element, and must not share memory with other
arguments. One overlap is allowed, c10d's in-place form: in all_gather the input may be this
rank's chunk of the output, in reduce_scatter the output this rank's chunk of the input (and so in
gather and scatter, on the root).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nc10d import ops
from nc10d.arrays import arguments as args
from nc10d.arrays.interop import map_to_numpy
from nc10d.ops.facts import FACTS, name_of


def validate(op: ops.Op, rank: int, size: int) -> ops.Op:
    """Return `op` on its arrays' memory; ValueError or TypeError if this rank cannot launch it."""
    rule = RULES.get(type(op))
    if rule is None:
        raise TypeError(f"unknown operation {op!r}: expected one of those in nc10d.ops")
    settled = map_to_numpy(op)
    rule(settled, rank, size)
    return settled


def _in_place(op: Any, rank: int, size: int) -> None:
    """Check an in-place reduction over every rank's array."""
    x = args.array(name_of(op), "tensor", op.x, written=True)
    args.check_reducible(x, op.op, getattr(op, "identity", False))


def _reduce(op: ops.Reduce, rank: int, size: int) -> None:
    args.check_rank("reduce", "dst", op.root, size)
    args.check_reducible(args.array("reduce", "tensor", op.x, written=op.root == rank), op.op)


def _broadcast(op: ops.Broadcast, rank: int, size: int) -> None:
    args.check_rank("broadcast", "src", op.root, size)
    args.array("broadcast", "tensor", op.x, written=op.root != rank)


def _all_gather(op: ops.AllGather, rank: int, size: int) -> None:
    call, own, whole = "all_gather", "tensor", "tensor_list"
    if not args.is_list(op.out):
        call, own, whole = "all_gather_into_tensor", "input_tensor", "output_tensor"
    args.check_whole(whole, op.out, args.array(call, own, op.inp, written=False), rank, size)


def _reduce_scatter(op: ops.ReduceScatter, rank: int, size: int) -> None:
    call, whole = "reduce_scatter", "input_list"
    if not args.is_list(op.inp):
        call, whole = "reduce_scatter_tensor", "input"
    piece = args.array(call, "output", op.out, written=True)
    args.check_whole(whole, op.inp, piece, rank, size)
    args.check_reducible(piece, op.op)


def _all_to_all(op: ops.AllToAll, rank: int, size: int) -> None:
    if args.is_list(op.out) != args.is_list(op.inp):
        raise TypeError("all_to_all: output and input must both be lists, or both be arrays")
    if not args.is_list(op.out):
        return _all_to_all_single(op, rank, size)
    if op.out_splits is not None or op.in_splits is not None:
        raise ValueError("all_to_all: split sizes are for arrays, the lists have their own sizes")
    outs = args.arrays("all_to_all", "output_tensor_list", op.out, size, written=True)
    ins = args.arrays("all_to_all", "input_tensor_list", op.inp, size, written=False)
    args.check_same_type([*outs, *ins])
    args.check_count(outs[rank], ins[rank].buffer.count, f"as many as {ins[rank].name}")
    return args.check_disjoint([*outs, *ins])


def _all_to_all_single(op: ops.AllToAll, rank: int, size: int) -> None:
    out = args.array("all_to_all_single", "output", op.out, written=True)
    inp = args.array("all_to_all_single", "input", op.inp, written=False)
    args.check_same_type([out, inp])
    given = args.split_counts(out, "output_split_sizes", op.out_splits, size)[rank]
    taken = args.split_counts(inp, "input_split_sizes", op.in_splits, size)[rank]
    if given != taken:
        message = "all_to_all_single: what this rank sends itself must have the size of what it"
        raise ValueError(f"{message} receives from itself, got {taken} and {given} elements")
    args.check_disjoint([out, inp])


def _gather(op: ops.Gather, rank: int, size: int) -> None:
    call, own, whole = "gather", "tensor", "gather_list"
    if op.even:
        call, own, whole = "gather_single", "tensor", "gather_tensor"
    args.check_rank(call, "dst", op.root, size)
    piece = args.array(call, own, op.inp, written=False)
    args.check_given(call, whole, op.out, "dst", rank, op.root)
    if op.out is not None:
        args.check_whole(whole, op.out, piece, rank, size, lists=not op.even)


def _scatter(op: ops.Scatter, rank: int, size: int) -> None:
    call, own, whole = "scatter", "tensor", "scatter_list"
    if op.even:
        call, own, whole = "scatter_single", "output", "input"
    args.check_rank(call, "src", op.root, size)
    piece = args.array(call, own, op.out, written=True)
    args.check_given(call, whole, op.inp, "src", rank, op.root)
    if op.inp is not None:
        args.check_whole(whole, op.inp, piece, rank, size, lists=not op.even)


def _send(op: ops.Send, rank: int, size: int) -> None:
    args.check_peer("send", "dst", op.peer, rank, size)
    args.check_tag("send", op.tag)
    args.array("send", "tensor", op.x, written=False)


def _recv(op: ops.Recv, rank: int, size: int) -> None:
    if op.peer is not None:
        args.check_peer("recv", "src", op.peer, rank, size)
    args.check_tag("recv", op.tag)
    args.array("recv", "tensor", op.x, written=True)


def _barrier(op: ops.Barrier, rank: int, size: int) -> None:
    """Accept: a barrier has no arguments."""


RULES: dict[type[Any], Callable[[Any, int, int], None]] = {
    **dict.fromkeys(
        (kind for kind, facts in FACTS.items() if facts.on_one_array and facts.reduces), _in_place
    ),
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
