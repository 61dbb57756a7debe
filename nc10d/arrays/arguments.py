"""Checks of a call's arguments, under the names of the public API.

Each check raises ValueError or TypeError, which names the call, the argument and the requirement.
The checks read memory's description through `as_buffer` and change nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from nc10d.arrays.buffer import Buffer, as_buffer, overlap
from nc10d.arrays.dtypes import check_reduce, identity, reduced_element
from nc10d.arrays.fields import Fields, parts_of_buffer
from nc10d.arrays.op_advice import advice_for
from nc10d.ops import Recv, ReduceOp, Send

LARGEST_TAG = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Argument:
    """An array in a call, under the argument's name in the public API."""

    call: str
    name: str
    buffer: Buffer
    written: bool


def is_list(x: object) -> bool:
    """Return whether `x` is a list: an array for each rank."""
    return isinstance(x, (list, tuple))


def array(call: str, name: str, x: object, *, written: bool) -> Argument:
    """Return an array that the operation reads, or writes if `written`."""
    try:
        found = Argument(call, name, as_buffer(x), written)
    except TypeError as error:
        error.args = (f"{call}: {name}: {error}",)  # same type: nc10d.torch tells wrappers apart
        raise
    if written and not found.buffer.writable:
        message = f"{call}: {name} is written, so it must not be read-only"
        copies = "np.array(x), or bytearray(x) for bytes"
        raise ValueError(f"{message}: pass a copy, {copies}")
    if written and any(part.repeats for part in parts_of_buffer(found.buffer)):
        message = f"{call}: {name} is written, so its elements must not share memory"
        raise ValueError(f"{message} (it is a broadcast view or a sliding window)")
    if isinstance(x, Fields):
        check_disjoint(_parts(found))
    return found


def arrays(
    call: str, name: str, xs: Sequence[object], size: int, *, written: bool
) -> list[Argument]:
    """Return a list with an array for each rank; see `array`."""
    if len(xs) != size:
        message = f"{call}: {name} must have one array per rank, {size} in this group"
        raise ValueError(f"{message}, got {len(xs)}")
    return [array(call, f"{name}[{index}]", x, written=written) for index, x in enumerate(xs)]


_HAVE_OUT = {"all_reduce", "reduce"}


def check_reducible(x: Argument, op: ReduceOp, neutral: bool = False) -> None:
    """Raise TypeError unless the dtype of `x` supports the reduction `op`.

    With `neutral` the reduction must also have an identity.
    """
    if not isinstance(op, ReduceOp):
        found = f"{op!r}{advice_for(op)}"
        if hasattr(op, "shape"):  # mpi4py's calls have an array for the result there
            into = f"the result replaces {x.name}; to keep that, pass a copy"
            if x.call in _HAVE_OUT:
                into = "the result's array is passed as out="
            found = f"an array ({type(op).__name__}): {into}"
        raise TypeError(f"{x.call}: op must be a ReduceOp such as ReduceOp.SUM, got {found}")
    try:
        row = x.buffer.shape[-1] if x.buffer.shape else 1
        element = reduced_element(x.buffer.dtype, op, row)
        check_reduce(element, op)
        if neutral:
            identity(element, op)
    except TypeError as error:
        raise TypeError(f"{x.call}: {error}") from error


def check_rank(call: str, name: str, rank: object, size: int) -> None:
    """Raise ValueError unless `rank` is a rank of the group."""
    if not 0 <= integer(call, name, rank) < size:
        raise ValueError(f"{call}: {name} must be a rank of the group, 0 to {size - 1}, got {rank}")


def check_peer(call: str, name: str, peer: object, rank: int, size: int) -> None:
    """Raise ValueError unless `peer` is another rank of the group."""
    check_rank(call, name, peer, size)
    if peer == rank:
        raise ValueError(f"{call}: {name} must be another rank, got this rank, {rank}")


def check_tag(call: str, tag: object, name: str = "tag") -> None:
    """Raise ValueError unless `tag` is from 0 to 2**63 - 1."""
    if not 0 <= integer(call, name, tag) <= LARGEST_TAG:
        raise ValueError(f"{call}: {name} must be 0 or more, and below 2**63, got {tag}")


def check_exchange(send: Send, recv: Recv, rank: int, size: int) -> None:
    """Check the arguments of sendrecv, whose arrays must not share memory.

    The ranks are other ranks, or both this rank; then the arrays must be alike, and the tags equal.
    """
    call = "sendrecv"
    check_tag(call, send.tag)
    check_tag(call, recv.tag, "recv_tag")
    x = array(call, "tensor", send.x, written=False)
    y = array(call, "output", recv.x, written=True)
    if send.peer == recv.peer == rank:
        check_same_type([x, y])
        check_count(y, x.buffer.count, f"as many as {x.name}")
        if send.tag != recv.tag:
            tags = f"{send.tag} and {recv.tag}"
            raise ValueError(f"{call}: a rank that sends to itself gives one tag, got {tags}")
    else:
        check_peer(call, "dst", send.peer, rank, size)
        if recv.peer is not None:
            check_peer(call, "src", recv.peer, rank, size)
    check_disjoint([x, y])


def check_output(call: str, out: object, x: object, op: ReduceOp) -> None:
    """Check an output and the array that is reduced into it; they must not share memory."""
    tensor, output = array(call, "tensor", x, written=False), array(call, "out", out, written=True)
    check_same_type([tensor, output])
    if tensor.buffer.shape != output.buffer.shape:
        shapes = f"{tensor.buffer.shape}, got {output.buffer.shape}"
        raise ValueError(f"{call}: out must have the shape of tensor, {shapes}")
    check_reducible(tensor, op)
    check_disjoint([tensor, output])


def check_probe(src: object, tag: object, rank: int, size: int) -> None:
    """Check a probe's arguments; None stands for any source, and any tag."""
    if src is not None:
        check_peer("probe", "src", src, rank, size)
    if tag is not None:
        check_tag("probe", tag)


def integer(call: str, name: str, value: Any) -> int:
    """Return any integer (NumPy's too) as an int; TypeError if `value` is none."""
    try:
        return operator.index(value)
    except TypeError as error:
        raise TypeError(f"{call}: {name} must be an integer, got {value!r}") from error


def check_given(call: str, name: str, xs: object, role: str, rank: int, root: int) -> None:
    """Raise ValueError unless a list is given on the root, and None on other ranks."""
    if (xs is not None) == (rank == root):
        return
    where = "must be given on" if rank == root else "must be None on ranks other than"
    raise ValueError(f"{call}: {name} {where} {role}, which is rank {root}; this is rank {rank}")


def check_same_type(arguments: Sequence[Argument]) -> None:
    """Raise TypeError or ValueError unless all arrays have the same dtype and device."""
    first = arguments[0]
    for other in arguments[1:]:
        for property_name, expected, found in (
            ("dtype", first.buffer.dtype.label, other.buffer.dtype.label),
            ("device", first.buffer.device, other.buffer.device),
        ):
            if expected != found:
                must = f"{other.name} must have the {property_name} of {first.name}"
                kind = TypeError if property_name == "dtype" else ValueError
                raise kind(f"{first.call}: {must}, {expected}, got {found}")


def check_count(x: Argument, count: int, why: str) -> None:
    """Raise ValueError unless `x` has `count` elements; `why` explains the number."""
    if x.buffer.count != count:
        message = f"{x.call}: {x.name} must have {count} elements, {why}"
        raise ValueError(f"{message}, got {x.buffer.count}")


def check_whole(
    name: str, xs: Any, piece: Argument, rank: int, size: int, *, lists: bool = True
) -> None:
    """Check a list with an array for each rank, or a flat array, against this rank's `piece`.

    The operation writes `xs` if `piece` is read, and the other way round. Without `lists` a list
    is a TypeError.
    """
    written = not piece.written
    if lists and is_list(xs):
        check_chunks(arrays(piece.call, name, xs, size, written=written), piece, rank, size)
    else:
        check_flat(array(piece.call, name, xs, written=written), piece, rank, size)


def check_flat(whole: Argument, piece: Argument, rank: int, size: int) -> None:
    """Check a flat array, the `whole` of all ranks, against this rank's `piece`."""
    check_same_type([piece, whole])
    count = piece.buffer.count
    check_count(whole, size * count, f"the {count} of {piece.name} times the group's size, {size}")
    chunk = whole.buffer.address + rank * piece.buffer.nbytes
    dense = piece.buffer.contiguous and whole.buffer.contiguous
    if not dense or piece.buffer.address != chunk:
        check_disjoint([whole, piece])


def check_chunks(chunks: Sequence[Argument], piece: Argument, rank: int, size: int) -> None:
    """Check a list with an array for each rank against this rank's `piece`."""
    check_same_type([piece, *chunks])
    own = chunks[rank]
    check_count(own, piece.buffer.count, f"as many as {piece.name}")
    if _same_elements(own.buffer, piece.buffer):
        check_disjoint([own if own.written else piece, *chunks[:rank], *chunks[rank + 1 :]])
    else:
        check_disjoint([piece, *chunks])


def _same_elements(a: Buffer, b: Buffer) -> bool:
    return (a.address, a.shape, a.strides) == (b.address, b.shape, b.strides) or (
        a.address == b.address and a.contiguous and b.contiguous
    )


def check_disjoint(arguments: Sequence[Argument], elements: Sequence[int] = ()) -> None:
    """Raise ValueError if an output shares memory with another argument.

    `elements` has a number for each argument; arguments with the same number are not compared.
    """
    # Sorted by address, so that only arguments whose spans overlap are compared exactly.
    both = zip(arguments, elements or range(len(arguments)), strict=True)
    each = [(part, element) for x, element in both for part in _parts(x)]
    given = [pair for pair in each if pair[0].buffer.count]
    ordered = sorted(given, key=lambda pair: pair[0].buffer.span)
    for index, (x, element) in enumerate(ordered):
        end = x.buffer.span[1]
        for y, other in ordered[index + 1 :]:
            if y.buffer.span[0] >= end:
                break
            if element != other and (x.written or y.written) and overlap(x.buffer, y.buffer):
                raise ValueError(f"{x.call}: {x.name} and {y.name} must not share memory")


def _parts(x: Argument) -> list[Argument]:
    parts = parts_of_buffer(x.buffer)
    return [x] if parts[0] is x.buffer else [replace(x, buffer=part) for part in parts]


def each_once(call: str, name: str, xs: Sequence[object]) -> list[Any]:
    """Return the arrays of a list that a call changes in place, each memory once.

    ValueError if two of them share memory.
    """
    found: dict[Any, tuple[Any, Argument]] = {}
    for index, x in enumerate(xs):
        argument = array(call, f"{name}[{index}]", x, written=True)
        memory = argument.buffer
        form = memory.count if memory.contiguous else (memory.shape, memory.strides)
        # Empty arrays share nothing: peers have them at any addresses.
        place = (memory.address, memory.dtype, form) if memory.count else index
        found.setdefault(place, (x, argument))
    check_disjoint([argument for _, argument in found.values()])
    return [x for x, _ in found.values()]


def check_elements(
    call: str, outputs: Sequence[Sequence[object]], inputs: Sequence[object]
) -> None:
    """Check a call on lists that writes `outputs[i]` from `inputs[i]`, for every i at once.

    ValueError if an output shares memory with an array of another i.
    """
    found, elements = [], []
    for index, (outs, x) in enumerate(zip(outputs, inputs, strict=True)):
        found += [array(call, f"outputs[{index}]", out, written=True) for out in outs]
        found.append(array(call, f"inputs[{index}]", x, written=False))
        elements += [index] * (1 + len(outs))
    check_disjoint(found, elements)


def split_counts(x: Argument, name: str, splits: Sequence[int] | None, size: int) -> list[int]:
    """Return the number of elements of `x` that go to, or come from, each rank."""
    shape = x.buffer.shape
    if not shape:
        raise ValueError(f"{x.call}: {x.name} must have a dimension to split, got a 0-d array")
    if splits is None:
        if shape[0] % size:
            message = f"{x.call}: without {name}, {x.name} must have rows for {size} equal parts"
            raise ValueError(f"{message}, got {shape[0]}")
        return [x.buffer.count // size] * size
    rows = [integer(x.call, name, count) for count in splits]
    if len(rows) != size or min(rows) < 0 or sum(rows) != shape[0]:
        message = f"{x.call}: {name} must be {size} numbers, 0 or more, whose sum is the rows"
        raise ValueError(f"{message} of {x.name}, {shape[0]}, got {rows}")
    return [n * prod(shape[1:]) for n in rows]


def split_lists(split_ranks: Sequence[Sequence[int]] | None, size: int) -> list[tuple[int, ...]]:
    """Return disjoint lists of ranks below `size`, each sorted, as tuples of ints."""
    lists = [
        tuple(sorted(integer("split_group", "ranks", rank) for rank in ranks))
        for ranks in (() if split_ranks is None else split_ranks)
    ]
    if not lists:
        raise ValueError("split_ranks must be a list of lists of ranks, and not empty")
    if not all(lists):
        raise ValueError("split_ranks must not contain an empty list")
    check_distinct_ranks(lists)
    for ranks in lists:
        for rank in ranks:
            check_rank("split_group", "split_ranks", rank, size)
    return lists


def check_distinct_ranks(lists: Sequence[Sequence[int]]) -> None:
    """Raise ValueError if a rank occurs twice, in the same list or in several."""
    seen: set[int] = set()
    for ranks in lists:
        for rank in ranks:
            if rank in seen:
                raise ValueError(f"rank {rank} is in the lists twice: {[list(r) for r in lists]}")
            seen.add(rank)
