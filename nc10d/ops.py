"""Operations as data: what a rank asks of its group, before anything is sent.

A collective is one small slotted object. The API makes it, the group launches it, a backend runs
it; tracing, fingerprints, coalescing and tests all look at the same object. Arrays are carried
as the user gave them; a backend resolves them to memory once, when it runs the operation.

An `Arrays` field is either one flat array (equal chunks, rank after rank) or a list with one
array per rank (sizes may differ). `root` and `peer` are ranks in the group. `even` says on every
rank of a Gather or Scatter, also where there is no such field, that it is flat on the root.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload
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
    """How two elements become one: a kind and, for PREMUL_SUM, the factor.

    `purpose` says what a call is for, in a few words, and changes no element. Ranks compare it
    like everything else of a call: equal calls for different purposes are a CollectiveMismatch,
    whose words show both.

    There is one instance for each (kind, factor, purpose), so that `is`, `==` and the hash of the
    object itself all mean the same: a reduce operation is a key on the fast path.
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
        key = (kind, None if factor is None else float(factor), purpose)
        with _interning:
            found = _reduce_ops.get(key)
            if found is None:
                found = object.__new__(cls)
                found.kind, found.factor, found.purpose = key
                _reduce_ops[key] = found
            return found

    @property
    def name(self) -> str:
        """The kind's name, as c10d spells it, and the purpose if there is one."""
        return f"{self.kind.name} for {self.purpose}" if self.purpose else self.kind.name

    def meant_for(self, purpose: str) -> ReduceOp:
        """Return the same reduction for a purpose, in a few words; "" for none."""
        return ReduceOp(self.kind, self.factor, purpose)

    def __repr__(self) -> str:
        inner = self.name if self.factor is None else f"{self.name}, factor={self.factor}"
        return f"ReduceOp({inner})"

    def __reduce__(self) -> tuple[Any, ...]:
        return ReduceOp, (self.kind, self.factor, self.purpose)


_interning = threading.RLock()
_reduce_ops: WeakValueDictionary[tuple[RedOp, float | None, str], ReduceOp] = WeakValueDictionary()

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

    Both are lists of `size` arrays, or both flat; flat arrays are cut along dimension 0 by the
    splits (one int per rank), or evenly where a split is None.
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
    """Send x to `peer`; messages of one tag arrive in the order of launch."""

    x: Array
    peer: int
    tag: int = 0


@dataclass(slots=True, eq=False)
class Recv:
    """Receive x from `peer` (None: from anyone)."""

    x: Array
    peer: int | None
    tag: int = 0


@dataclass(slots=True, eq=False)
class Barrier:
    """Nobody leaves before everybody has come."""


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
    """AllReduces of several arrays by one reduction; each is an object once it is looked at.

    Most blocks are that, and a backend that looks at `arrays` and `op` alone needs no more.
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


class Kept(tuple[Op, ...]):
    """Operations that are launched again and again; a backend may note in `known` how."""

    known: Any = None


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
"""What each operation is called in errors, traces and records."""
