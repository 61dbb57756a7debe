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

from nc10d.arrays.arguments import (
    check_chunks,
    check_count,
    check_disjoint,
    check_flat,
    check_given,
    check_peer,
    check_rank,
    check_reducible,
    check_same_type,
    check_tag,
    input_array,
    input_list,
    is_list,
    output_array,
    output_list,
    row_length,
    split_rows,
)
from nc10d.ops import (
    AllGather,
    AllReduce,
    AllToAll,
    Barrier,
    Broadcast,
    Gather,
    Op,
    Recv,
    Reduce,
    ReduceScatter,
    Scatter,
    Send,
)


def validate(op: Op, rank: int, size: int) -> None:
    """Raise ValueError or TypeError if `rank` of a group of `size` cannot launch `op`."""
    rule = _RULES.get(type(op))
    if rule is None:
        raise TypeError(f"unknown operation {op!r}: expected one of those in nc10d.ops")
    rule(op, rank, size)


def _all_reduce(op: AllReduce, rank: int, size: int) -> None:
    check_reducible(output_array("all_reduce", "tensor", op.x), op.op)


def _reduce(op: Reduce, rank: int, size: int) -> None:
    check_rank("reduce", "dst", op.root, size)
    read_or_write = output_array if op.root == rank else input_array
    check_reducible(read_or_write("reduce", "tensor", op.x), op.op)


def _broadcast(op: Broadcast, rank: int, size: int) -> None:
    check_rank("broadcast", "src", op.root, size)
    read_or_write = input_array if op.root == rank else output_array
    read_or_write("broadcast", "tensor", op.x)


def _all_gather(op: AllGather, rank: int, size: int) -> None:
    if is_list(op.out):
        piece = input_array("all_gather", "tensor", op.inp)
        check_chunks(output_list("all_gather", "tensor_list", op.out, size), piece, rank, size)
    else:
        piece = input_array("all_gather_into_tensor", "input_tensor", op.inp)
        whole = output_array("all_gather_into_tensor", "output_tensor", op.out)
        check_flat(whole, piece, rank, size)


def _reduce_scatter(op: ReduceScatter, rank: int, size: int) -> None:
    if is_list(op.inp):
        piece = output_array("reduce_scatter", "output", op.out)
        check_chunks(input_list("reduce_scatter", "input_list", op.inp, size), piece, rank, size)
    else:
        piece = output_array("reduce_scatter_tensor", "output", op.out)
        whole = input_array("reduce_scatter_tensor", "input", op.inp)
        check_flat(whole, piece, rank, size)
    check_reducible(piece, op.op)


def _all_to_all(op: AllToAll, rank: int, size: int) -> None:
    if is_list(op.out) != is_list(op.inp):
        raise TypeError("all_to_all: output and input must both be lists, or both be arrays")
    if not is_list(op.out):
        return _all_to_all_single(op, rank, size)
    if op.out_splits is not None or op.in_splits is not None:
        raise ValueError("all_to_all: split sizes are for arrays, the lists have their own sizes")
    outs = output_list("all_to_all", "output_tensor_list", op.out, size)
    ins = input_list("all_to_all", "input_tensor_list", op.inp, size)
    check_same_type([*outs, *ins])
    check_count(outs[rank], ins[rank].buffer.count, f"as many as {ins[rank].name}")
    return check_disjoint([*outs, *ins])


def _all_to_all_single(op: AllToAll, rank: int, size: int) -> None:
    out = output_array("all_to_all_single", "output", op.out)
    inp = input_array("all_to_all_single", "input", op.inp)
    check_same_type([out, inp])
    given = split_rows(out, "output_split_sizes", op.out_splits, size)[rank] * row_length(out)
    taken = split_rows(inp, "input_split_sizes", op.in_splits, size)[rank] * row_length(inp)
    if given != taken:
        message = "all_to_all_single: what this rank sends itself must have the size of what it"
        raise ValueError(f"{message} receives from itself, got {taken} and {given} elements")
    check_disjoint([out, inp])


def _gather(op: Gather, rank: int, size: int) -> None:
    call = "gather_single" if op.even else "gather"
    own, whole = ("input", "output") if op.even else ("tensor", "gather_list")
    check_rank(call, "dst", op.root, size)
    piece = input_array(call, own, op.inp)
    check_given(call, whole, op.out, "dst", rank, op.root)
    if is_list(op.out) and not op.even:
        check_chunks(output_list(call, whole, op.out, size), piece, rank, size)
    elif op.out is not None:
        check_flat(output_array(call, whole, op.out), piece, rank, size)


def _scatter(op: Scatter, rank: int, size: int) -> None:
    call = "scatter_single" if op.even else "scatter"
    own, whole = ("output", "input") if op.even else ("tensor", "scatter_list")
    check_rank(call, "src", op.root, size)
    piece = output_array(call, own, op.out)
    check_given(call, whole, op.inp, "src", rank, op.root)
    if is_list(op.inp) and not op.even:
        check_chunks(input_list(call, whole, op.inp, size), piece, rank, size)
    elif op.inp is not None:
        check_flat(input_array(call, whole, op.inp), piece, rank, size)


def _send(op: Send, rank: int, size: int) -> None:
    check_peer("send", "dst", op.peer, rank, size)
    check_tag("send", op.tag)
    input_array("send", "tensor", op.x)


def _recv(op: Recv, rank: int, size: int) -> None:
    if op.peer is not None:
        check_peer("recv", "src", op.peer, rank, size)
    check_tag("recv", op.tag)
    output_array("recv", "tensor", op.x)


def _barrier(op: Barrier, rank: int, size: int) -> None:
    """Accept: a barrier has no arguments."""


_RULES: dict[type[Any], Callable[[Any, int, int], None]] = {
    AllReduce: _all_reduce,
    Reduce: _reduce,
    Broadcast: _broadcast,
    AllGather: _all_gather,
    ReduceScatter: _reduce_scatter,
    AllToAll: _all_to_all,
    Gather: _gather,
    Scatter: _scatter,
    Send: _send,
    Recv: _recv,
    Barrier: _barrier,
}
