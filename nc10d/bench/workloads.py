"""Each collective on arrays with a given size, ready to be called repeatedly and to be checked.

Sizes follow nccl-tests: `nbytes` is a rank's larger buffer (the whole output of all_gather, the
whole input of reduce_scatter). `nc10d.testing.reference` gives the expected results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

import nc10d as dist
from nc10d.arrays.dtypes import DType
from nc10d.group.process_group import ProcessGroup
from nc10d.testing import reference

Array = np.ndarray[Any, np.dtype[Any]]
Call = Callable[[], object]
WINDOW = 64
"""Asynchronous calls that are in flight at a time."""


@dataclass(slots=True)
class Workload:
    """A collective with its arrays: the call, a reset of arrays, and a count of wrong elements.

    `count` is the larger buffer's number of elements; `op` is nccl-tests' redop.
    """

    call: Call
    reset: Call
    wrong: Callable[[], int]
    count: int
    op: str = "none"


def pattern(rank: int, count: int, dtype: DType) -> Array:
    """Return a rank's contribution: 1 to 6, exact in every type, unlike its neighbour's."""
    values = 1 + (np.arange(count) + 3 * rank) % 6
    return (values % 2 if dtype is DType.BOOL else values).astype(dtype.numpy)


def differ(x: Any, y: Array) -> int:
    """Return how many elements of `y` differ in `x`; all, if `x` is no such array."""
    if not isinstance(x, np.ndarray) or (x.shape, x.dtype) != (y.shape, y.dtype):
        return y.size
    return int(np.count_nonzero(x != y))


def _in_place(
    group: ProcessGroup,
    nbytes: int,
    dtype: DType,
    run: Callable[[Array], object],
    expect: Callable[[list[Array]], list[Array]],
    op: str = "none",
) -> Workload:
    count = max(1, nbytes // dtype.itemsize)
    arrays = [pattern(r, count, dtype) for r in range(group.size)]
    x, contribution, expected = np.zeros_like(arrays[0]), arrays[group.rank], expect(arrays)
    return Workload(
        lambda: run(x),
        lambda: np.copyto(x, contribution),
        lambda: differ(x, expected[group.rank]),
        count,
        op,
    )


def all_reduce(group: ProcessGroup, nbytes: int, dtype: DType) -> Workload:
    """Sum in place on every rank."""
    return _in_place(group, nbytes, dtype, group.all_reduce, reference.all_reduce, "sum")


def reduce(group: ProcessGroup, nbytes: int, dtype: DType) -> Workload:
    """Sum in place on rank 0."""
    expect = partial(reference.reduce, root=0)
    return _in_place(group, nbytes, dtype, lambda x: group.reduce(x, 0), expect, "sum")


def scan(group: ProcessGroup, nbytes: int, dtype: DType) -> Workload:
    """Prefix sums in place."""
    return _in_place(group, nbytes, dtype, group.scan, reference.scan, "sum")


def exscan(group: ProcessGroup, nbytes: int, dtype: DType) -> Workload:
    """Prefix sums over the ranks before, in place."""
    return _in_place(group, nbytes, dtype, group.exscan, reference.exscan, "sum")


def broadcast(group: ProcessGroup, nbytes: int, dtype: DType) -> Workload:
    """Rank 0's array to every rank."""
    expect = partial(reference.broadcast, root=0)
    return _in_place(group, nbytes, dtype, lambda x: group.broadcast(x, 0), expect)


def _chunks(group: ProcessGroup, nbytes: int, dtype: DType) -> list[list[Array]]:
    """Return every rank's array, cut into a chunk for each rank."""
    count = max(1, nbytes // dtype.itemsize // group.size)
    whole = [pattern(r, count * group.size, dtype) for r in range(group.size)]
    return [np.split(x, group.size) for x in whole]


def _into(
    outs: Sequence[Array], call: Call, expected: Sequence[Array], count: int, op: str = "none"
) -> Workload:
    def reset() -> None:
        for out in outs:
            out.fill(0)

    return Workload(call, reset, lambda: sum(map(differ, outs, expected)), count, op)


def all_gather(group: ProcessGroup, nbytes: int, dtype: DType, *, listed: bool = False) -> Workload:
    """Every rank's chunk to every rank."""
    chunk = [chunks[0] for chunks in _chunks(group, nbytes, dtype)]
    expected = reference.all_gather(chunk)[group.rank]
    out = np.zeros_like(np.concatenate(expected))
    outs, x = np.split(out, group.size), chunk[group.rank]
    single = partial(group.all_gather_into_tensor, out, x)
    return _into(outs, partial(group.all_gather, outs, x) if listed else single, expected, out.size)


def reduce_scatter(
    group: ProcessGroup, nbytes: int, dtype: DType, *, listed: bool = False
) -> Workload:
    """To each rank, the sum of all ranks' chunks for it."""
    chunks = _chunks(group, nbytes, dtype)
    expected = reference.reduce_scatter(chunks)[group.rank]
    out, x = np.zeros_like(expected), np.concatenate(chunks[group.rank])
    single = partial(group.reduce_scatter_tensor, out, x)
    call = partial(group.reduce_scatter, out, np.split(x, group.size)) if listed else single
    return _into([out], call, [expected], x.size, "sum")


def all_to_all(group: ProcessGroup, nbytes: int, dtype: DType, *, listed: bool = False) -> Workload:
    """A chunk from every rank to every rank."""
    chunks = _chunks(group, nbytes, dtype)
    expected = reference.all_to_all(chunks)[group.rank]
    out, x = np.zeros_like(np.concatenate(expected)), np.concatenate(chunks[group.rank])
    outs, inputs = np.split(out, group.size), np.split(x, group.size)
    single = partial(group.all_to_all_single, out, x)
    call = partial(group.all_to_all, outs, inputs) if listed else single
    return _into(outs, call, expected, out.size)


def gather(group: ProcessGroup, nbytes: int, dtype: DType) -> Workload:
    """Every rank's chunk to rank 0."""
    chunk = [chunks[0] for chunks in _chunks(group, nbytes, dtype)]
    x, expected = chunk[group.rank], reference.gather(chunk, 0)[group.rank] or []
    outs = [np.zeros_like(y) for y in expected]
    return _into(outs, lambda: group.gather(x, outs or None, 0), expected, x.size * group.size)


def scatter(group: ProcessGroup, nbytes: int, dtype: DType) -> Workload:
    """A chunk from rank 0 to every rank."""
    chunks = _chunks(group, nbytes, dtype)[0]
    expected = reference.scatter(chunks)[group.rank]
    out, inputs = np.zeros_like(expected), chunks if group.rank == 0 else None
    return _into([out], lambda: group.scatter(out, inputs, 0), [expected], out.size * group.size)


def send_recv(group: ProcessGroup, nbytes: int, dtype: DType) -> Workload:
    """A message to the neighbour and back; a last rank without a neighbour does nothing."""
    count = max(1, nbytes // dtype.itemsize)
    peer = group.rank ^ 1
    x, expected = pattern(group.rank, count, dtype), pattern(peer, count, dtype)
    y = np.zeros_like(x)

    def first() -> None:
        group.send(x, peer)
        group.recv(y, peer)

    def second() -> None:
        group.recv(y, peer)
        group.send(x, peer)

    if peer >= group.size:
        return Workload(lambda: None, lambda: None, lambda: 0, count)
    return _into([y], first if group.rank < peer else second, [expected], count)


def sendrecv(group: ProcessGroup, nbytes: int, dtype: DType) -> Workload:
    """A message to the next rank and from the previous rank, in a single call."""
    count, size = max(1, nbytes // dtype.itemsize), group.size
    following, previous = (group.rank + 1) % size, (group.rank - 1) % size
    x, expected = pattern(group.rank, count, dtype), pattern(previous, count, dtype)
    y = np.zeros_like(x)
    return _into([y], lambda: group.sendrecv(x, following, y, previous), [expected], count)


def window(group: ProcessGroup, nbytes: int, dtype: DType) -> Workload:
    """In-place sums of WINDOW arrays, `nbytes` each, launched at once and then waited for."""
    count, size = max(1, nbytes // dtype.itemsize), group.size
    contributions = [pattern(r, count, dtype) for r in range(size)]
    expected = reference.all_reduce(contributions)[group.rank]
    arrays = [np.zeros_like(expected) for _ in range(WINDOW)]

    def reset() -> None:
        for x in arrays:
            np.copyto(x, contributions[group.rank])

    def call() -> None:
        for work in [group.all_reduce(x, async_op=True) for x in arrays]:
            assert work is not None, "no block is open"
            work.wait()

    return Workload(call, reset, lambda: sum(differ(x, expected) for x in arrays), count, "sum")


def barrier(group: ProcessGroup, nbytes: int, dtype: DType) -> Workload:
    """No rank leaves before all have arrived."""
    del nbytes, dtype
    return Workload(group.barrier, lambda: None, lambda: 0, 0)


def _objects(places: list[Any], call: Call, expected: Sequence[Array], count: int) -> Workload:
    """Return the workload of a call that puts an array into each place in a list."""
    before = list(places)

    def reset() -> None:
        places[:] = before

    return Workload(call, reset, lambda: sum(map(differ, places, expected)), count)


def broadcast_object_list(group: ProcessGroup, nbytes: int, dtype: DType) -> Workload:
    """A list with rank 0's array, as an object, to every rank."""
    x = pattern(0, max(1, nbytes // dtype.itemsize), dtype)
    places: list[Any] = [x if group.rank == 0 else None]
    call = partial(dist.broadcast_object_list, places, 0, group)
    return _objects(places, call, [x], x.size)


def all_gather_object(group: ProcessGroup, nbytes: int, dtype: DType) -> Workload:
    """Every rank's chunk, as an object, to every rank."""
    chunk = [chunks[0] for chunks in _chunks(group, nbytes, dtype)]
    places: list[Any] = [None] * group.size
    call = partial(dist.all_gather_object, places, chunk[group.rank], group)
    return _objects(places, call, chunk, chunk[0].size * group.size)


def gather_object(group: ProcessGroup, nbytes: int, dtype: DType) -> Workload:
    """Every rank's chunk, as an object, to rank 0."""
    chunk = [chunks[0] for chunks in _chunks(group, nbytes, dtype)]
    places: list[Any] = [None] * group.size if group.rank == 0 else []
    call = partial(dist.gather_object, chunk[group.rank], places or None, 0, group)
    return _objects(places, call, chunk[: len(places)], chunk[0].size * group.size)


COLLECTIVES: dict[str, Callable[[ProcessGroup, int, DType], Workload]] = {
    "all_reduce": all_reduce,
    "reduce": reduce,
    "scan": scan,
    "exscan": exscan,
    "broadcast": broadcast,
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_to_all": all_to_all,
    "gather": gather,
    "scatter": scatter,
    "send_recv": send_recv,
    "sendrecv": sendrecv,
    "window": window,
    "barrier": barrier,
    "all_gather_list": partial(all_gather, listed=True),
    "reduce_scatter_list": partial(reduce_scatter, listed=True),
    "all_to_all_list": partial(all_to_all, listed=True),
    "broadcast_object_list": broadcast_object_list,
    "all_gather_object": all_gather_object,
    "gather_object": gather_object,
}
"""Workloads by name; `_list` is c10d's form with lists of chunks."""
_EXCHANGES = (
    *("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"),
    *("all_gather_list", "reduce_scatter_list", "all_to_all_list"),
    *("all_gather_object", "gather_object"),
)
_WHOLE = ("reduce", "scan", "exscan", "broadcast", "send_recv", "broadcast_object_list")
FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "window": lambda n: 2 * (n - 1) / n,
    **dict.fromkeys(_WHOLE, lambda n: 1.0),
    "sendrecv": lambda n: 1.0,
    **dict.fromkeys(_EXCHANGES, lambda n: (n - 1) / n),
    "barrier": lambda n: 0.0,
}
"""Factor from GB/s for the caller's data to GB/s in memory or network, by the number of ranks."""
