"""The operations as data: a rank's request to a group, before anything is sent.

A collective is a small slotted object. The API makes the object, the group launches it, a backend
runs it; tracing, fingerprints, coalescing and tests all look at the same object. Arrays are carried
as the user gave them; a backend resolves them to memory once, when the operation is run.

An `Arrays` field is either a flat array (equal chunks, rank after rank) or a list or tuple with an
array for each rank (sizes may differ). `root` and `peer` are ranks in the group. `even` is True on
every rank of a Gather or Scatter whose root has a flat array, also on ranks that have no such
array.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, overload

from nc10d.ops.reductions import SUM, ReduceOp

Array = Any
Arrays = Any


@dataclass(slots=True, eq=False)
class AllReduce:
    """x := op over ranks of x, on every rank."""

    x: Array
    op: ReduceOp = SUM


@dataclass(slots=True, eq=False)
class Reduce:
    """x := op over ranks of x, on the root; other ranks' x keeps its values."""

    x: Array
    root: int
    op: ReduceOp = SUM


@dataclass(slots=True, eq=False)
class Broadcast:
    """x := the root's x."""

    x: Array
    root: int


@dataclass(slots=True, eq=False)
class AllGather:
    """out[r] := rank r's inp, on every rank. `out` is flat or a list of `size` arrays."""

    out: Arrays
    inp: Array


@dataclass(slots=True, eq=False)
class ReduceScatter:
    """out := op over ranks of their inp[my rank]. `inp` is flat or a list of `size` arrays."""

    out: Array
    inp: Arrays
    op: ReduceOp = SUM


@dataclass(slots=True, eq=False)
class AllToAll:
    """out[r] := rank r's inp[my rank].

    Both are lists of `size` arrays, or both are flat. Flat arrays are cut along dimension 0 by the
    splits (rows for each rank), or evenly if a split is None.
    """

    out: Arrays
    inp: Arrays
    out_splits: Sequence[int] | None = None
    in_splits: Sequence[int] | None = None


@dataclass(slots=True, eq=False)
class Scan:
    """x := op over the ranks 0 to my rank of x."""

    x: Array
    op: ReduceOp = SUM


@dataclass(slots=True, eq=False)
class ExScan:
    """x := op over the ranks before mine of x; on rank 0 x stays, or becomes op's identity."""

    x: Array
    op: ReduceOp = SUM
    identity: bool = False


@dataclass(slots=True, eq=False)
class Gather:
    """On the root: out[r] := rank r's inp. `out` is a list (or flat) there and None elsewhere."""

    out: Arrays | None
    inp: Array
    root: int
    even: bool = False


@dataclass(slots=True, eq=False)
class Scatter:
    """out := the root's inp[my rank]. `inp` is a list (or flat) on the root, None elsewhere."""

    out: Array
    inp: Arrays | None
    root: int
    even: bool = False


@dataclass(slots=True, eq=False)
class Send:
    """Send x to `peer`; messages with the same tag arrive in launch order."""

    x: Array
    peer: int
    tag: int = 0


@dataclass(slots=True, eq=False)
class Recv:
    """Receive x from `peer` (None: from any rank)."""

    x: Array
    peer: int | None
    tag: int = 0


@dataclass(slots=True, eq=False)
class Barrier:
    """No rank leaves before every rank has come."""


class MessageInfo(NamedTuple):
    """A message that has come and is not received yet: sender, tag, and bytes.

    `src` is the sender's rank: in the group from a group's method, else the global rank.
    """

    src: int
    tag: int
    nbytes: int


Op = (
    AllReduce
    | Reduce
    | Broadcast
    | AllGather
    | ReduceScatter
    | AllToAll
    | Gather
    | Scatter
    | Scan
    | ExScan
    | Send
    | Recv
    | Barrier
)


class AllReduces(Sequence[Op]):
    """AllReduces on several arrays by the same reduction; the operations are made on demand.

    Most coalescing blocks are such a sequence, and a backend may need only `arrays` and `op`.
    """

    __slots__ = ("_made", "arrays", "op")

    def __init__(self, arrays: Sequence[Array], op: ReduceOp) -> None:
        self.arrays = arrays
        self.op = op
        self._made: tuple[Op, ...] = ()

    def _ops(self) -> tuple[Op, ...]:
        if not self._made:
            self._made = tuple([AllReduce(x, self.op) for x in self.arrays])
        return self._made

    def __len__(self) -> int:
        return len(self.arrays)

    def __iter__(self) -> Iterator[Op]:
        return iter(self._ops())

    @overload
    def __getitem__(self, index: int) -> Op: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Op]: ...

    def __getitem__(self, index: int | slice) -> Op | Sequence[Op]:
        return self._ops()[index]


class RepeatedOps(tuple[Op, ...]):
    """Operations to be launched many times; a backend may keep its prepared call in `prepared`."""

    prepared: Any = None
