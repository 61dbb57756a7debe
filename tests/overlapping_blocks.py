"""Calls on overlapping arrays: blocks beside the same calls made alone, and gathers in place.

A rank runs each function with its group, of three ranks. Calls are drawn on views of a small matrix
(rows, columns, reversed, strided, nested), so that nearly all of them overlap.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

import nc10d as dist
from nc10d.group.process_group import ProcessGroup
from nc10d.ops import AVG, MAX, SUM

Array = np.ndarray[Any, np.dtype[Any]]
Call = tuple[str, int, int]
SIDE = 12

VIEWS = (
    np.s_[:, :],
    np.s_[:6],
    np.s_[3],
    np.s_[:, 2],
    np.s_[::2, 1::3],
    np.s_[::-1, 4:9],
    np.s_[5, ::-2],
    np.s_[8:8],
)
COLLECTIVES = ("sum", "avg", "max", "broadcast", "reduce", "barrier")


def matrix(rank: int, dtype: str, order: str) -> Array:
    values = np.arange(SIDE * SIDE).reshape(SIDE, SIDE) % 7 + rank
    return np.array(values, dtype, order=order)  # type: ignore[call-overload, no-any-return]


def make(group: ProcessGroup, x: Array, call: Call) -> None:
    """Make a call on a view."""
    name, view, root = call
    part = x[VIEWS[view]]
    if name == "message":
        ring(group, part)
    elif name == "barrier":
        group.barrier()
    elif name == "broadcast":
        group.broadcast(part, root)
    elif name == "reduce":
        group.reduce(part, root)
    else:
        group.all_reduce(part, {"sum": SUM, "avg": AVG, "max": MAX}[name])


def ring(group: ProcessGroup, part: Array) -> None:
    """Send around the ring; rank 0 sends first, so that no rank waits for ever."""
    following, previous = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    if group.rank == 0:
        group.send(part, following)
        group.recv(part, previous)
    else:
        group.recv(part, previous)
        group.send(part, following)


def every_way(group: ProcessGroup, calls: Sequence[Call], dtype: str, order: str) -> None:
    alone, block, later = (matrix(group.rank, dtype, order) for _ in range(3))
    for call in calls:
        make(group, alone, call)
    with dist.coalescing_manager(group):
        for call in calls:
            make(group, block, call)
    assert np.array_equal(block, alone), (group.rank, calls)
    with dist.coalescing_manager(group, async_ops=True) as works:
        for call in calls:
            make(group, later, call)
    works.wait()
    assert np.array_equal(later, alone), (group.rank, calls)


CALLS = st.lists(
    st.tuples(
        st.sampled_from((*COLLECTIVES, "message")),
        st.integers(0, len(VIEWS) - 1),
        st.integers(0, 2),
    ),
    min_size=1,
    max_size=8,
)


def shares_alone(group: ProcessGroup) -> None:
    """Only rank 1's arrays overlap: all ranks must run the calls in order with it."""
    base = np.full(100, group.rank + 1.0)
    arrays = [base[:60], base[30:90], base] if group.rank == 1 else [base[:60].copy()]
    arrays += [np.full(n, group.rank + 1.0) for n in (60, 60, 100)[len(arrays) :]]
    with dist.coalescing_manager(group):
        for x in arrays:
            group.all_reduce(x)
    # Rank 1's second call reduces the result of its first, its third the results of both.
    twice = 1.0 + 6.0 + 3.0
    assert group.rank == 1 or (arrays[1][:30] == twice).all()
    assert (arrays[2][:30] == twice).all()
    assert (arrays[2][30:60] == 1 + twice + 3).all()
    assert (arrays[2][90:] == 6).all()


def early(group: ProcessGroup, src: int | None) -> None:
    """Receive a message that came before the block, at its place in the block's order."""
    x = np.full(5, group.rank + 1.0)
    if group.rank == 1:
        group.send(np.full(5, 10.0), 0, tag=1)
        group.send(np.zeros(1), 0, tag=2)
    if group.rank == 0:
        group.recv(np.zeros(1), 1, tag=2)
    for async_ops in (False, True):
        with dist.coalescing_manager(group, async_ops=async_ops) as block:
            group.all_reduce(x)
            if group.rank == 0:
                group.recv(x, src, tag=1)
            group.all_reduce(x[::2])
        if async_ops:
            block.wait()
        else:
            if group.rank == 1:
                group.send(np.full(5, 10.0), 0, tag=1)
            x[...] = group.rank + 1.0
    assert np.array_equal(x[::2], np.full(3, 22.0))
    assert np.array_equal(x[1::2], np.full(2, 10.0 if group.rank == 0 else 6.0))


def at_root(group: ProcessGroup, root: int, value: Any) -> Any:
    return value if group.rank == root else None


IN_PLACE = {
    "all_gather_into_tensor": lambda g, root, whole, own: g.all_gather_into_tensor(whole, own),
    "all_gather": lambda g, root, whole, own: g.all_gather(np.split(whole, g.size), own),
    "gather_single": lambda g, root, whole, own: g.gather_single(
        own, at_root(g, root, whole), root
    ),
    "gather": lambda g, root, whole, own: g.gather(
        own, at_root(g, root, np.split(whole, g.size)), root
    ),
}


def gathers_in_place(group: ProcessGroup, form: str) -> None:
    """Gather into an array whose chunk of this rank is the input, on each root."""
    for root in range(group.size):
        whole = np.zeros((group.size, 4))
        whole[group.rank] = group.rank + 1
        flat = whole.reshape(-1)
        IN_PLACE[form](group, root, flat, flat[4 * group.rank : 4 * group.rank + 4])
        if form.startswith("all_") or group.rank == root:
            assert whole.tolist() == [[rank + 1] * 4 for rank in range(group.size)], (root, whole)
