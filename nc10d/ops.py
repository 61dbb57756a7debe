"""Operations as data: the request of a rank to its group, before anything is sent.

A collective is a small slotted object. The API makes it, the group launches it, a backend runs
it; tracing, fingerprints, coalescing and tests all look at the same object. Arrays are carried
as the user gave them; a backend resolves them to memory once, when it runs the operation.

An `Arrays` field is either a flat array (equal chunks, rank after rank) or a list or tuple with an
array for each rank (sizes may differ). `root` and `peer` are ranks in the group. `even` is True on
every rank of a Gather or Scatter whose root has a flat array, also on ranks that have no such
array.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, overload
from weakref import WeakValueDictionary

Array = Any
Arrays = Any


class RedOp(enum.IntEnum):
    """The kinds of reduction; the numbers are c10d's."""

    SUM = 0
    AVG = 1
    PRODUCT = 2
    MIN = 3
    MAX = 4
    BAND = 5
    BOR = 6
    BXOR = 7
    PREMUL_SUM = 8


class ReduceOp:
    """A reduction of two elements: its kind and, for PREMUL_SUM, its factor.

    `purpose` describes the use of a call in a few words, and changes no element. Ranks compare it
    like the other arguments of a call: equal calls for different purposes are a
    CollectiveMismatch, whose message shows both purposes.

    Each (kind, factor, purpose) has a single instance, so `is` and `==` mean the same and the hash
    is that of the object: a reduce operation is a key on the fast path.
    """

    __slots__ = ("__weakref__", "factor", "kind", "purpose")
    kind: RedOp
    factor: float | None
    purpose: str
    SUM: ReduceOp
    AVG: ReduceOp
    PRODUCT: ReduceOp
    MIN: ReduceOp
    MAX: ReduceOp
    BAND: ReduceOp
    BOR: ReduceOp
    BXOR: ReduceOp

    def __new__(cls, kind: RedOp, factor: float | None = None, purpose: str = "") -> ReduceOp:
        """Return the instance for `kind`, `purpose` and, for PREMUL_SUM, `factor`."""
        if (kind is RedOp.PREMUL_SUM) != (factor is not None):
            raise ValueError("a factor belongs to PREMUL_SUM, and only to it")
        factor = None if factor is None else float(factor)
        # As text: -0.0 equals 0.0, and NaN does not equal itself.
        key = (kind, "" if factor is None else factor.hex(), purpose)
        with _interning:
            found = _reduce_ops.get(key)
            if found is None:
                found = object.__new__(cls)
                found.kind, found.factor, found.purpose = kind, factor, purpose
                _reduce_ops[key] = found
            return found

    @property
    def name(self) -> str:
        """The kind's name, as c10d spells it, and the purpose if there is any."""
        return f"{self.kind.name} for {self.purpose}" if self.purpose else self.kind.name

    def meant_for(self, purpose: str) -> ReduceOp:
        """Return the same reduction with a purpose, in a few words; "" for none."""
        return ReduceOp(self.kind, self.factor, purpose)

    def __repr__(self) -> str:
        inner = self.name if self.factor is None else f"{self.name}, factor={self.factor}"
        return f"ReduceOp({inner})"

    def __reduce__(self) -> tuple[Any, ...]:
        return ReduceOp, (self.kind, self.factor, self.purpose)


_interning = threading.RLock()
_reduce_ops: WeakValueDictionary[tuple[RedOp, str, str], ReduceOp] = WeakValueDictionary()

SUM = ReduceOp.SUM = ReduceOp(RedOp.SUM)
AVG = ReduceOp.AVG = ReduceOp(RedOp.AVG)
PRODUCT = ReduceOp.PRODUCT = ReduceOp(RedOp.PRODUCT)
MIN = ReduceOp.MIN = ReduceOp(RedOp.MIN)
MAX = ReduceOp.MAX = ReduceOp(RedOp.MAX)
BAND = ReduceOp.BAND = ReduceOp(RedOp.BAND)
BOR = ReduceOp.BOR = ReduceOp(RedOp.BOR)
BXOR = ReduceOp.BXOR = ReduceOp(RedOp.BXOR)


def premul_sum(factor: float) -> ReduceOp:
    """Return the reduction that multiplies every contribution by `factor` before summing."""
    return ReduceOp(RedOp.PREMUL_SUM, factor)


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
    """Send x to `peer`; messages of the same tag arrive in the order of launch."""

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
    """A message that has come and is not received yet: its sender, its tag, and its bytes.

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
    | Send
    | Recv
    | Barrier
)


class AllReduces(Sequence[Op]):
    """AllReduces of several arrays by the same reduction; the operations are made on demand.

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


OP_NAMES: dict[type[Any], str] = {
    AllReduce: "all_reduce",
    Reduce: "reduce",
    Broadcast: "broadcast",
    AllGather: "all_gather",
    ReduceScatter: "reduce_scatter",
    AllToAll: "all_to_all",
    Gather: "gather",
    Scatter: "scatter",
    Send: "send",
    Recv: "recv",
    Barrier: "barrier",
}
"""The name of each operation in errors, traces and records."""
