"""Check the arguments of an operation before anything is sent.

`validate(op, rank, size)` raises ValueError or TypeError, which names the call, the argument and
the requirement in the words of the public API. It checks this rank's arguments only and changes
nothing. The fingerprint, not this module, detects disagreement between ranks.

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


def validate(op: ops.Op, rank: int, size: int) -> None:
    """Raise ValueError or TypeError if `rank` of a group of `size` cannot launch `op`."""
    rule = _RULES.get(type(op))
    if rule is None:
        raise TypeError(f"unknown operation {op!r}: expected one of those in nc10d.ops")
    rule(op, rank, size)


def _all_reduce(op: ops.AllReduce, rank: int, size: int) -> None:
    args.check_reducible(args.output_array("all_reduce", "tensor", op.x), op.op)


def _reduce(op: ops.Reduce, rank: int, size: int) -> None:
    args.check_rank("reduce", "dst", op.root, size)
    read_or_write = args.output_array if op.root == rank else args.input_array
    args.check_reducible(read_or_write("reduce", "tensor", op.x), op.op)


def _broadcast(op: ops.Broadcast, rank: int, size: int) -> None:
    args.check_rank("broadcast", "src", op.root, size)
    read_or_write = args.input_array if op.root == rank else args.output_array
    read_or_write("broadcast", "tensor", op.x)


def _all_gather(op: ops.AllGather, rank: int, size: int) -> None:
    if args.is_list(op.out):
        piece = args.input_array("all_gather", "tensor", op.inp)
        args.check_chunks(
            args.output_list("all_gather", "tensor_list", op.out, size), piece, rank, size
        )
    else:
        piece = args.input_array("all_gather_into_tensor", "input_tensor", op.inp)
        whole = args.output_array("all_gather_into_tensor", "output_tensor", op.out)
        args.check_flat(whole, piece, rank, size)


def _reduce_scatter(op: ops.ReduceScatter, rank: int, size: int) -> None:
    if args.is_list(op.inp):
        piece = args.output_array("reduce_scatter", "output", op.out)
        args.check_chunks(
            args.input_list("reduce_scatter", "input_list", op.inp, size), piece, rank, size
        )
    else:
        piece = args.output_array("reduce_scatter_tensor", "output", op.out)
        whole = args.input_array("reduce_scatter_tensor", "input", op.inp)
        args.check_flat(whole, piece, rank, size)
    args.check_reducible(piece, op.op)


def _all_to_all(op: ops.AllToAll, rank: int, size: int) -> None:
    if args.is_list(op.out) != args.is_list(op.inp):
        raise TypeError("all_to_all: output and input must both be lists, or both be arrays")
    if not args.is_list(op.out):
        return _all_to_all_single(op, rank, size)
    if op.out_splits is not None or op.in_splits is not None:
        raise ValueError("all_to_all: split sizes are for arrays, the lists have their own sizes")
    outs = args.output_list("all_to_all", "output_tensor_list", op.out, size)
    ins = args.input_list("all_to_all", "input_tensor_list", op.inp, size)
    args.check_same_type([*outs, *ins])
    args.check_count(outs[rank], ins[rank].buffer.count, f"as many as {ins[rank].name}")
    return args.check_disjoint([*outs, *ins])


def _all_to_all_single(op: ops.AllToAll, rank: int, size: int) -> None:
    out = args.output_array("all_to_all_single", "output", op.out)
    inp = args.input_array("all_to_all_single", "input", op.inp)
    args.check_same_type([out, inp])
    given = args.split_counts(out, "output_split_sizes", op.out_splits, size)[rank]
    taken = args.split_counts(inp, "input_split_sizes", op.in_splits, size)[rank]
    if given != taken:
        message = "all_to_all_single: what this rank sends itself must have the size of what it"
        raise ValueError(f"{message} receives from itself, got {taken} and {given} elements")
    args.check_disjoint([out, inp])


def _gather(op: ops.Gather, rank: int, size: int) -> None:
    call = "gather_single" if op.even else "gather"
    own, whole = ("input", "output") if op.even else ("tensor", "gather_list")
    args.check_rank(call, "dst", op.root, size)
    piece = args.input_array(call, own, op.inp)
    args.check_given(call, whole, op.out, "dst", rank, op.root)
    if args.is_list(op.out) and not op.even:
        args.check_chunks(args.output_list(call, whole, op.out, size), piece, rank, size)
    elif op.out is not None:
        args.check_flat(args.output_array(call, whole, op.out), piece, rank, size)


def _scatter(op: ops.Scatter, rank: int, size: int) -> None:
    call = "scatter_single" if op.even else "scatter"
    own, whole = ("output", "input") if op.even else ("tensor", "scatter_list")
    args.check_rank(call, "src", op.root, size)
    piece = args.output_array(call, own, op.out)
    args.check_given(call, whole, op.inp, "src", rank, op.root)
    if args.is_list(op.inp) and not op.even:
        args.check_chunks(args.input_list(call, whole, op.inp, size), piece, rank, size)
    elif op.inp is not None:
        args.check_flat(args.input_array(call, whole, op.inp), piece, rank, size)


def _send(op: ops.Send, rank: int, size: int) -> None:
    args.check_peer("send", "dst", op.peer, rank, size)
    args.check_tag("send", op.tag)
    args.input_array("send", "tensor", op.x)


def _recv(op: ops.Recv, rank: int, size: int) -> None:
    if op.peer is not None:
        args.check_peer("recv", "src", op.peer, rank, size)
    args.check_tag("recv", op.tag)
    args.output_array("recv", "tensor", op.x)


def _barrier(op: ops.Barrier, rank: int, size: int) -> None:
    """Accept: a barrier has no arguments."""


_RULES: dict[type[Any], Callable[[Any, int, int], None]] = {
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
