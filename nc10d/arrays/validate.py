"""What a caller can get wrong, found before anything is sent.

`validate(op, rank, size)` raises ValueError or TypeError and names the call, the argument and what
was expected, in the words of the public API; it looks at this rank's arguments only and changes
nothing. What ranks disagree about is found by the fingerprint, not here.

Outputs must be writable, must not repeat an element, and must not share memory with other
arguments. One overlap is allowed, c10d's in-place form: in all_gather the input may be this
rank's chunk of the output, in reduce_scatter the output this rank's chunk of the input (and so in
gather and scatter, on the root).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nc10d.arrays.arguments import (
    check_alike,
    check_chunks,
    check_count,
    check_disjoint,
    check_flat,
    check_given,
    check_peer,
    check_rank,
    check_reducible,
    check_tag,
    is_list,
    read,
    read_list,
    row_length,
    split_rows,
    written,
    written_list,
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
    """Raise what is wrong with `op` as launched by `rank` of a group of `size`, if anything is."""
    rule = _RULES.get(type(op))
    if rule is None:
        raise TypeError(f"unknown operation {op!r}: expected one of those in nc10d.ops")
    rule(op, rank, size)


def _all_reduce(op: AllReduce, rank: int, size: int) -> None:
    check_reducible(written("all_reduce", "tensor", op.x), op.op)


def _reduce(op: Reduce, rank: int, size: int) -> None:
    check_rank("reduce", "dst", op.root, size)
    read_or_write = written if op.root == rank else read
    check_reducible(read_or_write("reduce", "tensor", op.x), op.op)


def _broadcast(op: Broadcast, rank: int, size: int) -> None:
    check_rank("broadcast", "src", op.root, size)
    read_or_write = read if op.root == rank else written
    read_or_write("broadcast", "tensor", op.x)


def _all_gather(op: AllGather, rank: int, size: int) -> None:
    if is_list(op.out):
        piece = read("all_gather", "tensor", op.inp)
        check_chunks(written_list("all_gather", "tensor_list", op.out, size), piece, rank, size)
    else:
        piece = read("all_gather_into_tensor", "input_tensor", op.inp)
        whole = written("all_gather_into_tensor", "output_tensor", op.out)
        check_flat(whole, piece, rank, size)


def _reduce_scatter(op: ReduceScatter, rank: int, size: int) -> None:
    if is_list(op.inp):
        piece = written("reduce_scatter", "output", op.out)
        check_chunks(read_list("reduce_scatter", "input_list", op.inp, size), piece, rank, size)
    else:
        piece = written("reduce_scatter_tensor", "output", op.out)
        whole = read("reduce_scatter_tensor", "input", op.inp)
        check_flat(whole, piece, rank, size)
    check_reducible(piece, op.op)


def _all_to_all(op: AllToAll, rank: int, size: int) -> None:
    if is_list(op.out) != is_list(op.inp):
        raise TypeError("all_to_all: output and input must both be lists, or both be arrays")
    if not is_list(op.out):
        return _all_to_all_single(op, rank, size)
    if op.out_splits is not None or op.in_splits is not None:
        raise ValueError("all_to_all: split sizes are for arrays, the lists have their own sizes")
    outs = written_list("all_to_all", "output_tensor_list", op.out, size)
    ins = read_list("all_to_all", "input_tensor_list", op.inp, size)
    check_alike([*outs, *ins])
    check_count(outs[rank], ins[rank].buffer.count, f"as many as {ins[rank].name}")
    return check_disjoint([*outs, *ins])


def _all_to_all_single(op: AllToAll, rank: int, size: int) -> None:
    out = written("all_to_all_single", "output", op.out)
    inp = read("all_to_all_single", "input", op.inp)
    check_alike([out, inp])
    given = split_rows(out, "output_split_sizes", op.out_splits, size)[rank] * row_length(out)
    taken = split_rows(inp, "input_split_sizes", op.in_splits, size)[rank] * row_length(inp)
    if given != taken:
        message = "all_to_all_single: what this rank sends itself must have the size of what it"
        raise ValueError(f"{message} receives from itself, got {taken} and {given} elements")
    check_disjoint([out, inp])


def _gather(op: Gather, rank: int, size: int) -> None:
    call = "gather_single" if op.even else "gather"
    mine, all_of_them = ("input", "output") if op.even else ("tensor", "gather_list")
    check_rank(call, "dst", op.root, size)
    piece = read(call, mine, op.inp)
    check_given(call, all_of_them, op.out, "dst", rank, op.root)
    if is_list(op.out) and not op.even:
        check_chunks(written_list(call, all_of_them, op.out, size), piece, rank, size)
    elif op.out is not None:
        check_flat(written(call, all_of_them, op.out), piece, rank, size)


def _scatter(op: Scatter, rank: int, size: int) -> None:
    call = "scatter_single" if op.even else "scatter"
    mine, all_of_them = ("output", "input") if op.even else ("tensor", "scatter_list")
    check_rank(call, "src", op.root, size)
    piece = written(call, mine, op.out)
    check_given(call, all_of_them, op.inp, "src", rank, op.root)
    if is_list(op.inp) and not op.even:
        check_chunks(read_list(call, all_of_them, op.inp, size), piece, rank, size)
    elif op.inp is not None:
        check_flat(read(call, all_of_them, op.inp), piece, rank, size)


def _send(op: Send, rank: int, size: int) -> None:
    check_peer("send", "dst", op.peer, rank, size)
    check_tag("send", op.tag)
    read("send", "tensor", op.x)


def _recv(op: Recv, rank: int, size: int) -> None:
    if op.peer is not None:
        check_peer("recv", "src", op.peer, rank, size)
    check_tag("recv", op.tag)
    written("recv", "tensor", op.x)


def _barrier(op: Barrier, rank: int, size: int) -> None:
    """Find nothing: a barrier has no arguments."""


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
