"""Pairs of calls on two ranks: those that differ in one fact that ranks compare, and equal ones.

A call is a function of the rank, since a root's arrays are others than its peers'.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from nc10d import ops as O

Call = Callable[[int], O.Op]
SIZE = 2
half, quarter = O.premul_sum(0.5), O.premul_sum(0.25)


def x(count: int = 4, dtype: str = "f8") -> Any:
    return np.ones(count, dtype)


def xs(*counts: int) -> list[Any]:
    return [x(count) for count in counts]


def all_reduce(count: int = 4, dtype: str = "f8", op: O.ReduceOp = O.SUM) -> Call:
    return lambda rank: O.AllReduce(x(count, dtype), op)


def reduce(count: int = 4, dtype: str = "f8", root: int = 0, op: O.ReduceOp = O.SUM) -> Call:
    return lambda rank: O.Reduce(x(count, dtype), root, op)


def scan(count: int = 4, dtype: str = "f8", op: O.ReduceOp = O.SUM) -> Call:
    return lambda rank: O.Scan(x(count, dtype), op)


def exscan(count: int = 4, dtype: str = "f8", op: O.ReduceOp = O.SUM) -> Call:
    return lambda rank: O.ExScan(x(count, dtype), op, rank == 0)


def broadcast(count: int = 4, dtype: str = "f8", root: int = 0) -> Call:
    return lambda rank: O.Broadcast(x(count, dtype), root)


def all_gather(count: int = 2, dtype: str = "f8") -> Call:
    return lambda rank: O.AllGather(x(SIZE * count, dtype), x(count, dtype))


def all_gather_list(*counts: int) -> Call:
    return lambda rank: O.AllGather(xs(*counts), x(counts[rank]))


def reduce_scatter(count: int = 2, dtype: str = "f8", op: O.ReduceOp = O.SUM) -> Call:
    return lambda rank: O.ReduceScatter(x(count, dtype), x(SIZE * count, dtype), op)


def reduce_scatter_list(*counts: int, op: O.ReduceOp = O.SUM) -> Call:
    return lambda rank: O.ReduceScatter(x(counts[rank]), xs(*counts), op)


def all_to_all(count: int = 4, dtype: str = "f8") -> Call:
    return lambda rank: O.AllToAll(x(count, dtype), x(count, dtype))


def all_to_all_splits(count: int = 4, dtype: str = "f8") -> Call:
    halves = [count // 2] * 2
    return lambda rank: O.AllToAll(x(count, dtype), x(count, dtype), halves, halves)


def all_to_all_list(dtype: str = "f8") -> Call:
    return lambda rank: O.AllToAll([x(2, dtype), x(2, dtype)], [x(2, dtype), x(2, dtype)])


def gather(dtype: str = "f8", root: int = 0) -> Call:
    def make(rank: int) -> O.Op:
        return O.Gather([x(2, dtype), x(2, dtype)] if rank == root else None, x(2, dtype), root)

    return make


def gather_single(count: int = 2, dtype: str = "f8", root: int = 0) -> Call:
    def make(rank: int) -> O.Op:
        whole = x(SIZE * count, dtype) if rank == root else None
        return O.Gather(whole, x(count, dtype), root, True)

    return make


def scatter(dtype: str = "f8", root: int = 0) -> Call:
    def make(rank: int) -> O.Op:
        return O.Scatter(x(2, dtype), [x(2, dtype), x(2, dtype)] if rank == root else None, root)

    return make


def scatter_single(count: int = 2, dtype: str = "f8", root: int = 0) -> Call:
    def make(rank: int) -> O.Op:
        whole = x(SIZE * count, dtype) if rank == root else None
        return O.Scatter(x(count, dtype), whole, root, True)

    return make


def barrier() -> Call:
    return lambda rank: O.Barrier()


KINDS: dict[str, tuple[Call, ...]] = {
    "all_reduce": (
        all_reduce(),
        all_reduce(count=5),
        all_reduce(dtype="i8"),
        all_reduce(op=O.MAX),
        all_reduce(op=O.SUM.meant_for("a test")),
        all_reduce(op=half),
        all_reduce(op=quarter),
    ),
    "reduce": (
        reduce(),
        reduce(count=5),
        reduce(dtype="i8"),
        reduce(root=1),
        reduce(op=O.MAX),
        reduce(op=half),
        reduce(op=quarter),
    ),
    "scan": (scan(), scan(count=5), scan(dtype="i8"), scan(op=O.MAX), scan(op=half)),
    "exscan": (exscan(), exscan(count=5), exscan(dtype="i8"), exscan(op=O.MAX), exscan(op=half)),
    "broadcast": (broadcast(), broadcast(count=5), broadcast(dtype="i8"), broadcast(root=1)),
    "all_gather": (
        all_gather(),
        all_gather(count=3),
        all_gather(dtype="i8"),
        all_gather_list(1, 3),
        all_gather_list(3, 1),
    ),
    "reduce_scatter": (
        reduce_scatter(),
        reduce_scatter(count=3),
        reduce_scatter(dtype="i8"),
        reduce_scatter(op=O.MAX),
        reduce_scatter(op=half),
        reduce_scatter(op=quarter),
        reduce_scatter_list(1, 3),
        reduce_scatter_list(3, 1),
        reduce_scatter_list(3, 1, op=O.MAX),
    ),
    "all_to_all": (
        all_to_all(),
        all_to_all(count=6),
        all_to_all(dtype="i8"),
        all_to_all_splits(),
        all_to_all_splits(dtype="i8"),
    ),
    "gather": (gather(), gather(dtype="i8"), gather(root=1)),
    "gather_single": (
        gather_single(),
        gather_single(count=3),
        gather_single(dtype="i8"),
        gather_single(root=1),
    ),
    "scatter": (scatter(), scatter(dtype="i8"), scatter(root=1)),
    "scatter_single": (
        scatter_single(),
        scatter_single(count=3),
        scatter_single(dtype="i8"),
        scatter_single(root=1),
    ),
    "barrier": (barrier(),),
}
"""Every kind of collective: calls that differ from each other, the first two in one fact."""

EQUAL: dict[str, tuple[Call, Call]] = {
    **{kind: (calls[0], calls[0]) for kind, calls in KINDS.items()},
    "an even all_gather in a list": (all_gather(), all_gather_list(2, 2)),
    "an even reduce_scatter in a list": (reduce_scatter(), reduce_scatter_list(2, 2)),
    "an all_to_all of lists or splits": (all_to_all_list(), all_to_all_splits()),
}
"""Calls that go together, also where ranks give their arrays in other ways."""

ALL = [call for calls in KINDS.values() for call in calls]
PAIRS: dict[str, tuple[Call, Call]] = {
    **{
        f"{kind} {number}": (calls[0], other)
        for kind, calls in KINDS.items()
        for number, other in enumerate(calls[1:], 1)
    },
    "two factors": (all_reduce(op=half), all_reduce(op=quarter)),
    "two factors, reduce": (reduce(op=half), reduce(op=quarter)),
    "two factors, reduce_scatter": (reduce_scatter(op=half), reduce_scatter(op=quarter)),
    "two lists": (all_gather_list(1, 3), all_gather_list(3, 1)),
    "gather or gather_single": (gather(), gather_single()),
    "scatter or scatter_single": (scatter(), scatter_single()),
    "kinds": (all_reduce(), broadcast()),
    "scan or exscan": (scan(), exscan()),
}
"""Calls that ranks must not make together."""
