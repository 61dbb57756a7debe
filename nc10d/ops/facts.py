"""Facts about operations as data: a record for each kind, which all layers look up.

    facts_of(op).name                              # "all_reduce"
    FACTS[AllGather].per_rank                      # ("out",)
    FACTS[Send].split(op), FACTS[Send].make(...)   # an operation as (extra, x, y), and again

Some facts are read off a class's fields: an operation with `op` reduces, with `root` has a root,
with `peer` is a message. The other facts stand in the table at the end of this file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from operator import index
from typing import Any

import numpy as np

from nc10d.ops.operations import (
    AllGather,
    AllReduce,
    AllToAll,
    Arrays,
    Barrier,
    Broadcast,
    ExScan,
    Gather,
    Op,
    Recv,
    Reduce,
    ReduceScatter,
    Scan,
    Scatter,
    Send,
)

NOTHING = np.empty(0, np.uint8)
"""Stands for a barrier's array, which has none."""
LISTS = "lists"
"""The `extra` of a call on lists, beside its other arguments."""
Parts = tuple[Any, Any, Any]
"""An operation as (extra, x, y).

`extra` has the arguments besides arrays: reduction, root, (root, reduction), (root, even), peer,
split sizes; and LISTS where the same call also has a form without lists. x and y are the arrays in
the order in which backend/cpu/lowering numbers them. Each is an array, a tuple of arrays, or None;
y is a message's tag.
"""

EVERYWHERE, AT_ROOT, ELSEWHERE = "on every rank", "on the root", "on all ranks but the root"
_ARRAYS = ("x", "out", "inp")


@dataclass(frozen=True, slots=True, eq=False)
class OperationFacts:
    """The facts about a kind of operation.

    | field | meaning |
    |---|---|
    | `split`, `make` | an operation as Parts, and Parts as an operation |
    | `reads`, `writes` | the ranks on which each array is read and written |
    | `per_rank` | the arrays with a chunk for each rank: lists, or flat arrays |
    | `flat_name` | the public call for flat arrays, where that is another call |
    | `compared` | the array whose type and count all ranks must give alike |
    | `optional` | whether a backend may refuse the call, by a TypeError on all ranks |
    | `own_sizes` | whether only a sender and its receiver know the sizes of an operation |
    | `fields`, `arrays` | the names of all fields, and the arrays' names |
    | `reduces`, `has_root`, `is_message`, `on_one_array` | read off the fields |
    | `in_place_piece` | one array has chunks, and the other may be this rank's chunk |
    | `is_cut_by_rows` | flat arrays are cut along dimension 0 |
    """

    kind: type[Any]
    name: str
    split: Callable[[Any], Parts]
    make: Callable[[Any, Any, Any], Op]
    reads: Mapping[str, str] = field(default_factory=dict)
    writes: Mapping[str, str] = field(default_factory=dict)
    per_rank: tuple[str, ...] = ()
    flat_name: str = ""
    compared: str = "x"
    optional: bool = False
    own_sizes: Callable[[Any], bool] = lambda op: False

    # Read off the class and the fields above:
    fields: tuple[str, ...] = ()
    arrays: tuple[str, ...] = ()
    reduces: bool = False
    has_root: bool = False
    is_message: bool = False
    on_one_array: bool = False
    in_place_piece: bool = False
    is_cut_by_rows: bool = False

    def __post_init__(self) -> None:
        names = tuple(each.name for each in fields(self.kind))
        found = {
            "fields": names,
            "arrays": tuple(name for name in _ARRAYS if name in names),
            "reduces": "op" in names,
            "has_root": "root" in names,
            "is_message": "peer" in names,
            "on_one_array": "x" in names,
            "in_place_piece": len(self.per_rank) == 1,
            "is_cut_by_rows": "in_splits" in names,
        }
        for name, value in found.items():
            object.__setattr__(self, name, value)

    def replace(self, op: Op, **arrays: Arrays | None) -> Op:
        """Return the operation on other arrays."""
        made: Op = self.kind(*[arrays.get(name, getattr(op, name)) for name in self.fields])
        return made


def facts_of(op: Op) -> OperationFacts:
    """Return the facts about an operation's kind."""
    return FACTS[type(op)]


def name_of(op: Op) -> str:
    """Return an operation's name in errors, traces and records."""
    return FACTS[type(op)].name


def is_message(op: Op) -> bool:
    """Return whether an operation is a send or a receive; the others are called by all ranks."""
    return type(op) is Send or type(op) is Recv


def rank_is_in(ranks: str, op: Any, rank: int) -> bool:
    """Return whether `rank` is among EVERYWHERE, AT_ROOT or ELSEWHERE for an operation."""
    return ranks is EVERYWHERE or (rank == op.root) == (ranks is AT_ROOT)


def settled(arrays: Arrays) -> Arrays:
    """Return an argument as prepared calls take it: a list as a tuple, which cannot change."""
    return tuple(arrays) if type(arrays) is list else arrays


def _split_all_gather(op: AllGather) -> Parts:
    out = settled(op.out)
    return LISTS if type(out) is tuple else None, op.inp, out


def _split_reduce_scatter(op: ReduceScatter) -> Parts:
    inp = settled(op.inp)
    return (op.op, LISTS) if type(inp) is tuple else op.op, op.out, inp


def _split_all_to_all(op: AllToAll) -> Parts:
    inp, out = settled(op.inp), settled(op.out)
    if op.in_splits is None and op.out_splits is None:
        return LISTS if type(inp) is tuple else None, inp, out
    if type(inp) is tuple:  # the checks refuse a tuple
        return None, None, None
    try:
        return (_plain(op.in_splits), _plain(op.out_splits)), inp, out
    except TypeError:  # no ints: the checks say what is wrong
        return None, None, None


def _make_all_to_all(extra: Any, x: Arrays, y: Arrays) -> AllToAll:
    in_splits, out_splits = extra if type(extra) is tuple else (None, None)
    return AllToAll(y, x, out_splits, in_splits)


def _plain(sizes: Sequence[int] | None) -> tuple[int, ...] | None:
    # Plain ints, since 1.0 equals 1 as a key.
    return None if sizes is None else tuple(map(index, sizes))


def _has_splits(op: AllToAll) -> bool:
    return isinstance(op.inp, (list, tuple)) or (op.in_splits, op.out_splits) != (None, None)


def _split_message(op: Send | Recv) -> Parts:
    return op.peer, op.x, op.tag


_FROM_INP_TO_OUT: Any = {"reads": {"inp": EVERYWHERE}, "writes": {"out": EVERYWHERE}}
_FACTS = (
    OperationFacts(
        AllReduce,
        "all_reduce",
        lambda op: (op.op, op.x, op.x),
        lambda extra, x, y: AllReduce(x, extra),
        reads={"x": EVERYWHERE},
        writes={"x": EVERYWHERE},
    ),
    OperationFacts(
        Reduce,
        "reduce",
        lambda op: ((op.root, op.op), op.x, op.x),
        lambda extra, x, y: Reduce(x, *extra),
        reads={"x": EVERYWHERE},
        writes={"x": AT_ROOT},
    ),
    OperationFacts(
        Broadcast,
        "broadcast",
        lambda op: (op.root, op.x, op.x),
        lambda extra, x, y: Broadcast(x, extra),
        reads={"x": AT_ROOT},
        writes={"x": ELSEWHERE},
    ),
    OperationFacts(
        AllGather,
        "all_gather",
        _split_all_gather,
        lambda extra, x, y: AllGather(y, x),
        **_FROM_INP_TO_OUT,
        flat_name="all_gather_into_tensor",
        per_rank=("out",),
        compared="out",
    ),
    OperationFacts(
        ReduceScatter,
        "reduce_scatter",
        _split_reduce_scatter,
        lambda extra, x, y: ReduceScatter(x, y, extra[0] if type(extra) is tuple else extra),
        **_FROM_INP_TO_OUT,
        flat_name="reduce_scatter_tensor",
        per_rank=("inp",),
        compared="inp",
    ),
    OperationFacts(
        AllToAll,
        "all_to_all",
        _split_all_to_all,
        _make_all_to_all,
        **_FROM_INP_TO_OUT,
        flat_name="all_to_all_single",
        per_rank=("out", "inp"),
        compared="inp",
        own_sizes=_has_splits,
    ),
    OperationFacts(
        Gather,
        "gather",
        lambda op: ((op.root, op.even), op.inp, settled(op.out)),
        lambda extra, x, y: Gather(y, x, *extra),
        **_FROM_INP_TO_OUT,
        flat_name="gather_single",
        per_rank=("out",),
        compared="inp",
        own_sizes=lambda op: not op.even,
    ),
    OperationFacts(
        Scatter,
        "scatter",
        lambda op: ((op.root, op.even), op.out, settled(op.inp)),
        lambda extra, x, y: Scatter(x, y, *extra),
        **_FROM_INP_TO_OUT,
        flat_name="scatter_single",
        per_rank=("inp",),
        compared="out",
        own_sizes=lambda op: not op.even,
    ),
    OperationFacts(
        Scan,
        "scan",
        lambda op: (op.op, op.x, op.x),
        lambda extra, x, y: Scan(x, extra),
        reads={"x": EVERYWHERE},
        writes={"x": EVERYWHERE},
        optional=True,
    ),
    OperationFacts(
        ExScan,
        "exscan",
        lambda op: ((op.op, op.identity), op.x, op.x),
        lambda extra, x, y: ExScan(x, *extra),
        reads={"x": EVERYWHERE},
        writes={"x": EVERYWHERE},
        optional=True,
    ),
    OperationFacts(
        Barrier,
        "barrier",
        lambda op: (None, NOTHING, NOTHING),
        lambda extra, x, y: Barrier(),
        compared="",
    ),
    OperationFacts(
        Send,
        "send",
        _split_message,
        lambda extra, x, tag: Send(x, extra, tag),
        reads={"x": EVERYWHERE},
    ),
    OperationFacts(
        Recv,
        "recv",
        _split_message,
        lambda extra, x, tag: Recv(x, extra, tag),
        writes={"x": EVERYWHERE},
    ),
)
FACTS: dict[type[Any], OperationFacts] = {facts.kind: facts for facts in _FACTS}
"""The facts by operation class."""
COLLECTIVE_KINDS = tuple(kind for kind, facts in FACTS.items() if not facts.is_message)
"""The kinds that all ranks call, in the facts' order."""
