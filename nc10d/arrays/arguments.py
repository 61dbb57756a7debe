"""The arguments of a call, under the names that the caller knows, and what must hold for them.

Each check raises ValueError or TypeError with the call, the argument and what was expected. They
look at memory through `as_buffer` and change nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from nc10d.arrays.buffer import Buffer, as_buffer, overlap
from nc10d.arrays.dtypes import check_reduce
from nc10d.ops import ReduceOp

LARGEST_TAG = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Argument:
    """One array of a call, under the name by which the caller knows it."""

    call: str
    name: str
    buffer: Buffer
    written: bool


def is_list(x: Any) -> bool:
    """Say whether `x` stands for one array per rank."""
    return isinstance(x, (list, tuple))


def _argument(call: str, name: str, x: Any, written: bool) -> Argument:
    try:
        return Argument(call, name, as_buffer(x), written)
    except TypeError as error:
        raise TypeError(f"{call}: {name}: {error}") from error


def read(call: str, name: str, x: Any) -> Argument:
    """Take an array that the operation only reads."""
    return _argument(call, name, x, written=False)


def written(call: str, name: str, x: Any) -> Argument:
    """Take an array that the operation writes: writable, every element on its own."""
    found = _argument(call, name, x, written=True)
    if not found.buffer.writable:
        raise ValueError(f"{call}: {name} is written, so it must not be read-only")
    if found.buffer.repeats:
        message = f"{call}: {name} is written, so its elements must not share memory"
        raise ValueError(f"{message} (it is a broadcast view or a sliding window)")
    return found


_Taker = Callable[[str, str, Any], Argument]


def _take_list(take: _Taker, call: str, name: str, xs: Sequence[Any], size: int) -> list[Argument]:
    if len(xs) != size:
        message = f"{call}: {name} must have one array per rank, {size} in this group"
        raise ValueError(f"{message}, got {len(xs)}")
    return [take(call, f"{name}[{index}]", x) for index, x in enumerate(xs)]


def read_list(call: str, name: str, xs: Any, size: int) -> list[Argument]:
    """Take a list with one array per rank, only read."""
    return _take_list(read, call, name, xs, size)


def written_list(call: str, name: str, xs: Any, size: int) -> list[Argument]:
    """Take a list with one array per rank, written."""
    return _take_list(written, call, name, xs, size)


def check_reducible(x: Argument, op: ReduceOp) -> None:
    """Demand a reduction that the dtype of `x` allows."""
    if not isinstance(op, ReduceOp):
        raise TypeError(f"{x.call}: op must be a ReduceOp such as ReduceOp.SUM, got {op!r}")
    try:
        check_reduce(x.buffer.dtype, op)
    except TypeError as error:
        raise TypeError(f"{x.call}: {error}") from error


def check_rank(call: str, name: str, rank: Any, size: int) -> None:
    """Demand a rank of the group."""
    if not 0 <= integer(call, name, rank) < size:
        raise ValueError(f"{call}: {name} must be a rank of the group, 0 to {size - 1}, got {rank}")


def check_peer(call: str, name: str, peer: Any, rank: int, size: int) -> None:
    """Demand a rank of the group other than this one."""
    check_rank(call, name, peer, size)
    if peer == rank:
        raise ValueError(f"{call}: {name} must be another rank, got this rank, {rank}")


def check_tag(call: str, tag: Any) -> None:
    """Demand a tag: an integer, 0 or more, of 63 bits."""
    if not 0 <= integer(call, "tag", tag) <= LARGEST_TAG:
        raise ValueError(f"{call}: tag must be 0 or more, and below 2**63, got {tag}")


def integer(call: str, name: str, value: Any) -> int:
    """Return a plain int for any integer (NumPy's too); TypeError for what is none."""
    try:
        return operator.index(value)
    except TypeError as error:
        raise TypeError(f"{call}: {name} must be an integer, got {value!r}") from error


def check_given(call: str, name: str, xs: Any, role: str, rank: int, root: int) -> None:
    """Demand a list on the root, and none elsewhere."""
    if (xs is not None) == (rank == root):
        return
    where = "must be given on" if rank == root else "must be None on ranks other than"
    raise ValueError(f"{call}: {name} {where} {role}, which is rank {root}; this is rank {rank}")


def check_alike(arguments: Sequence[Argument]) -> None:
    """Demand one dtype and one device of all."""
    first = arguments[0]
    for other in arguments[1:]:
        for what, mine, theirs in (
            ("dtype", first.buffer.dtype.label, other.buffer.dtype.label),
            ("device", first.buffer.device, other.buffer.device),
        ):
            if mine != theirs:
                message = f"{first.call}: {other.name} must have the {what} of {first.name}"
                kind = TypeError if what == "dtype" else ValueError
                raise kind(f"{message}, {mine}, got {theirs}")


def check_count(x: Argument, count: int, why: str) -> None:
    """Demand `count` elements; `why` says where the number comes from."""
    if x.buffer.count != count:
        message = f"{x.call}: {x.name} must have {count} elements, {why}"
        raise ValueError(f"{message}, got {x.buffer.count}")


def check_flat(whole: Argument, piece: Argument, rank: int, size: int) -> None:
    """Check one flat array against the piece that is this rank's."""
    check_alike([piece, whole])
    check_count(whole, size * piece.buffer.count, f"{size} ranks times those of {piece.name}")
    if not _is_chunk(piece.buffer, whole.buffer, rank):
        check_disjoint([whole, piece])


def _is_chunk(piece: Buffer, whole: Buffer, rank: int) -> bool:
    here = whole.address + rank * piece.nbytes
    return piece.contiguous and whole.contiguous and piece.address == here


def check_chunks(chunks: Sequence[Argument], piece: Argument, rank: int, size: int) -> None:
    """Check a list with one array per rank against the piece that is this rank's."""
    check_alike([piece, *chunks])
    mine = chunks[rank]
    check_count(mine, piece.buffer.count, f"as many as {piece.name}")
    if _same(mine.buffer, piece.buffer):
        check_disjoint([mine if mine.written else piece, *chunks[:rank], *chunks[rank + 1 :]])
    else:
        check_disjoint([piece, *chunks])


def _same(a: Buffer, b: Buffer) -> bool:
    return (a.address, a.shape, a.strides) == (b.address, b.shape, b.strides) or (
        a.address == b.address and a.contiguous and b.contiguous
    )


def check_disjoint(arguments: Sequence[Argument]) -> None:
    """Demand that no output shares memory with another argument.

    Sorted by address, only neighbours whose spans touch are compared closely.
    """
    ordered = sorted((x for x in arguments if x.buffer.count), key=lambda x: x.buffer.span)
    for index, x in enumerate(ordered):
        end = x.buffer.span[1]
        for y in ordered[index + 1 :]:
            if y.buffer.span[0] >= end:
                break
            if (x.written or y.written) and overlap(x.buffer, y.buffer):
                raise ValueError(f"{x.call}: {x.name} and {y.name} must not share memory")


def split_rows(x: Argument, name: str, splits: Sequence[int] | None, size: int) -> list[int]:
    """Return how many rows of `x` go to, or come from, each rank."""
    shape = x.buffer.shape
    if not shape:
        raise ValueError(f"{x.call}: {x.name} must have a dimension to split, got a 0-d array")
    if splits is None:
        if shape[0] % size:
            message = f"{x.call}: without {name}, {x.name} must have rows for {size} equal parts"
            raise ValueError(f"{message}, got {shape[0]}")
        return [shape[0] // size] * size
    counts = [integer(x.call, name, count) for count in splits]
    if len(counts) != size or min(counts) < 0 or sum(counts) != shape[0]:
        message = f"{x.call}: {name} must be {size} numbers, 0 or more, whose sum is the rows"
        raise ValueError(f"{message} of {x.name}, {shape[0]}, got {counts}")
    return counts


def row_length(x: Argument) -> int:
    """Return how many elements a row of `x` has."""
    return prod(x.buffer.shape[1:])


def split_lists(split_ranks: Sequence[Sequence[int]] | None, size: int) -> list[tuple[int, ...]]:
    """Return lists of ranks in order and as plain ints.

    ValueError unless they are disjoint and all are ranks of a group of `size`.
    """
    lists = [
        tuple(sorted(integer("split_group", "ranks", rank) for rank in ranks))
        for ranks in (() if split_ranks is None else split_ranks)
    ]
    if not lists:
        raise ValueError("split_ranks must be a list of lists of ranks, and not empty")
    if not all(lists):
        raise ValueError("split_ranks must not contain an empty list")
    check_apart(lists)
    for ranks in lists:
        for rank in ranks:
            check_rank("split_group", "split_ranks", rank, size)
    return lists


def check_apart(lists: Sequence[Sequence[int]]) -> None:
    """Raise ValueError if a rank is in several of the lists, or in one twice."""
    seen: set[int] = set()
    for ranks in lists:
        for rank in ranks:
            if rank in seen:
                raise ValueError(f"rank {rank} is in the lists twice: {[list(r) for r in lists]}")
            seen.add(rank)
