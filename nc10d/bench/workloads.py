"""Each collective on arrays of one size, ready to be called again and again, and to be checked.

Sizes follow nccl-tests: `nbytes` is the larger buffer of a rank (the whole output of all_gather,
the whole input of reduce_scatter). What must come out is the word of `nc10d.testing.reference`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from nc10d.arrays.dtypes import DType
from nc10d.group.process_group import ProcessGroup
from nc10d.testing import reference

Array = np.ndarray[Any, np.dtype[Any]]
Call = Callable[[], object]


@dataclass(slots=True)
class Workload:
    """A collective ready to run: the call, how to fill its arrays, how to count mistakes.

    `count` is the number of elements of the larger buffer; `op` what nccl-tests calls redop.
    """

    call: Call
    reset: Call
    wrong: Callable[[], int]
    count: int
    op: str = "none"


def pattern(rank: int, count: int, dtype: DType) -> Array:
    """Return what a rank contributes: 1 to 6, exact in every type, other than its neighbour's."""
    values = 1 + (np.arange(count) + 3 * rank) % 6
    return (values % 2 if dtype is DType.BOOL else values).astype(dtype.numpy)


def differ(x: Array, y: Array) -> int:
    """Return how many elements differ."""
    return int(np.count_nonzero(x != y))


def _in_place(
    group: ProcessGroup,
    nbytes: int,
    dtype: DType,
    run: Callable[[Array], object],
    want: Callable[[list[Array]], list[Array]],
    op: str = "none",
) -> Workload:
    count = max(1, nbytes // dtype.itemsize)
    arrays = [pattern(r, count, dtype) for r in range(group.size)]
    x, mine, expected = np.zeros_like(arrays[0]), arrays[group.rank], want(arrays)[group.rank]
    return Workload(
        lambda: run(x), lambda: np.copyto(x, mine), lambda: differ(x, expected), count, op
    )


def all_reduce(group: ProcessGroup, nbytes: int, dtype: DType) -> Workload:
    """Sum in place on every rank."""
    return _in_place(group, nbytes, dtype, group.all_reduce, reference.all_reduce, "sum")


def reduce(group: ProcessGroup, nbytes: int, dtype: DType) -> Workload:
    """Sum in place on rank 0."""

    def want(arrays: list[Array]) -> list[Array]:
        return reference.reduce(arrays, 0)

    return _in_place(group, nbytes, dtype, lambda x: group.reduce(x, 0), want, "sum")


def broadcast(group: ProcessGroup, nbytes: int, dtype: DType) -> Workload:
    """Rank 0's array to everyone."""

    def want(arrays: list[Array]) -> list[Array]:
        return reference.broadcast(arrays, 0)

    return _in_place(group, nbytes, dtype, lambda x: group.broadcast(x, 0), want)


def _chunks(group: ProcessGroup, nbytes: int, dtype: DType) -> list[list[Array]]:
    """Return every rank's array, cut into a chunk for each rank."""
    count = max(1, nbytes // dtype.itemsize // group.size)
    whole = [pattern(r, count * group.size, dtype) for r in range(group.size)]
    return [np.split(x, group.size) for x in whole]


def _into(out: Array, call: Call, want: Array, count: int, op: str = "none") -> Workload:
    return Workload(call, lambda: out.fill(0), lambda: differ(out, want), count, op)


def all_gather(group: ProcessGroup, nbytes: int, dtype: DType) -> Workload:
    """Everyone's chunk to everyone."""
    first = [chunks[0] for chunks in _chunks(group, nbytes, dtype)]
    want = np.concatenate(reference.all_gather(first)[group.rank])
    out, mine = np.zeros_like(want), first[group.rank]
    return _into(out, lambda: group.all_gather_into_tensor(out, mine), want, out.size)


def reduce_scatter(group: ProcessGroup, nbytes: int, dtype: DType) -> Workload:
    """Sum of everyone's chunks for me."""
    chunks = _chunks(group, nbytes, dtype)
    want = reference.reduce_scatter(chunks)[group.rank]
    out, mine = np.zeros_like(want), np.concatenate(chunks[group.rank])
    return _into(out, lambda: group.reduce_scatter_tensor(out, mine), want, mine.size, "sum")


def all_to_all(group: ProcessGroup, nbytes: int, dtype: DType) -> Workload:
    """A chunk from everyone to everyone."""
    chunks = _chunks(group, nbytes, dtype)
    want = np.concatenate(reference.all_to_all(chunks)[group.rank])
    out, mine = np.zeros_like(want), np.concatenate(chunks[group.rank])
    return _into(out, lambda: group.all_to_all_single(out, mine), want, out.size)


def gather(group: ProcessGroup, nbytes: int, dtype: DType) -> Workload:
    """Everyone's chunk to rank 0."""
    first = [chunks[0] for chunks in _chunks(group, nbytes, dtype)]
    mine, want = first[group.rank], reference.gather(first, 0)[group.rank] or []
    outs = [np.zeros_like(x) for x in want]

    def reset() -> None:
        for out in outs:
            out.fill(0)

    def wrong() -> int:
        return sum(map(differ, outs, want))

    return Workload(
        lambda: group.gather(mine, outs or None, 0), reset, wrong, mine.size * group.size
    )


def scatter(group: ProcessGroup, nbytes: int, dtype: DType) -> Workload:
    """A chunk from rank 0 to everyone."""
    chunks = _chunks(group, nbytes, dtype)[0]
    want = reference.scatter(chunks)[group.rank]
    out, mine = np.zeros_like(want), chunks if group.rank == 0 else None
    return _into(out, lambda: group.scatter(out, mine, 0), want, want.size * group.size)


def send_recv(group: ProcessGroup, nbytes: int, dtype: DType) -> Workload:
    """A message to the neighbour and one back; a last rank without a neighbour does nothing."""
    count = max(1, nbytes // dtype.itemsize)
    peer = group.rank ^ 1
    x, want = pattern(group.rank, count, dtype), pattern(peer, count, dtype)
    y = np.zeros_like(x)

    def first() -> None:
        group.send(x, peer)
        group.recv(y, peer)

    def second() -> None:
        group.recv(y, peer)
        group.send(x, peer)

    if peer >= group.size:
        return Workload(lambda: None, lambda: None, lambda: 0, count)
    return _into(y, first if group.rank < peer else second, want, count)


def barrier(group: ProcessGroup, nbytes: int, dtype: DType) -> Workload:
    """Nobody leaves before everybody has come."""
    del nbytes, dtype
    return Workload(group.barrier, lambda: None, lambda: 0, 0)


COLLECTIVES: dict[str, Callable[[ProcessGroup, int, DType], Workload]] = {
    "all_reduce": all_reduce,
    "reduce": reduce,
    "broadcast": broadcast,
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_to_all": all_to_all,
    "gather": gather,
    "scatter": scatter,
    "send_recv": send_recv,
    "barrier": barrier,
}
