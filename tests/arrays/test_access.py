"""The arrays of operations: those that a rank reads or writes, and those any rank writes."""

from typing import Any

import numpy as np

from nc10d.arrays.access import access, arrays_of, first_array, outputs, touched
from nc10d.arrays.interop import map_arrays
from nc10d.ops import (
    SUM,
    AllGather,
    AllReduce,
    AllReduces,
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


def names(op: Any, rank: int) -> tuple[str, str]:
    """Return the names of the fields of `op` that are read, and of those that are written."""
    fields = {id(getattr(op, name)): name for name in ("x", "out", "inp") if hasattr(op, name)}
    reads, writes = access(op, rank)
    return " ".join(fields[id(x)] for x in reads), " ".join(fields[id(x)] for x in writes)


def test_a_root_and_the_others_use_their_arrays_differently() -> None:
    x, y = np.zeros(3), np.zeros(6)
    assert names(AllReduce(x), 0) == ("x", "x")
    assert [names(Reduce(x, root=1), rank) for rank in (0, 1)] == [("x", ""), ("x", "x")]
    assert [names(Broadcast(x, root=1), rank) for rank in (0, 1)] == [("", "x"), ("x", "")]
    assert names(AllGather(y, x), 0) == ("inp", "out")
    assert names(Gather(None, x, root=1), 0) == ("inp", "")
    assert (names(Send(x, 1), 0), names(Recv(x, 1), 0)) == (("x", ""), ("", "x"))


def test_an_operation_keeps_all_but_its_arrays() -> None:
    x, parts = np.zeros(3), [np.zeros(1), np.zeros(2)]
    changed = map_arrays(Gather(parts, x, root=7), lambda array: array.size)
    assert (changed.out, changed.inp, changed.root) == ([1, 2], 3, 7)  # type: ignore[union-attr]
    assert len(arrays_of(Gather(parts, x, root=7))) == 3
    elsewhere = map_arrays(Gather(None, x, root=7), lambda array: array.size)
    assert (elsewhere.out, elsewhere.inp) == (None, 3)  # type: ignore[union-attr]


X, Y, PARTS = np.zeros(3), np.zeros(6), [np.zeros(3), np.zeros(3)]
ALL: list[Op] = [
    AllReduce(X),
    Reduce(X, root=0),
    Broadcast(X, root=1),
    AllGather(Y, X),
    AllGather(PARTS, X),
    ReduceScatter(X, Y),
    AllToAll(PARTS, [Y[:3], Y[3:]]),
    Gather(PARTS, X, root=1),
    Scatter(X, PARTS, root=0),
    Send(X, 1),
    Recv(X, 1),
    Barrier(),
]


def ids(arrays: Any) -> set[int]:
    return {id(x) for x in arrays}


def test_touched_and_outputs_agree_with_the_access_of_each_rank() -> None:
    for op in ALL:
        ranks = [access(op, rank) for rank in (0, 1)]
        written = {x for _, writes in ranks for x in ids(writes)}
        read = {x for reads, _ in ranks for x in ids(reads)}
        assert written == ids(outputs([op])) == ids(x for x, written in touched(op) if written)
        assert written | read == ids(arrays_of(op)) == ids(x for x, _ in touched(op))


def test_the_first_array_of_a_launch_is_found_whatever_comes_before_it() -> None:
    assert first_array([Barrier(), Gather(None, X, root=1), Send(Y, 1)]) is X
    assert first_array([AllGather(PARTS, X)]) is PARTS[0]
    assert first_array([Barrier()]) is None
    same = AllReduces([Y, X], SUM)
    assert first_array(same) is Y
