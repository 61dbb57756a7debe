"""Reductions as data: all that backends, kernels and the reference look up.

| part | meaning |
|---|---|
| `Pairwise` | the step that combines two elements: a known step, or a Python function |
| `ReductionKind` | a name, a pairwise step, and the work on operands before and on results after |
| `ReduceOp` | a kind, PREMUL_SUM's factor, whether ranks fold in order, and a call's purpose |

A reduction of `n` arrays is finish(prepare(x_0) step prepare(x_1) step ... prepare(x_n-1)), in rank
order. SCALE multiplies an operand by the factor; DIVIDE divides the result by `n`. Nothing outside
this file names a kind to find out how that kind differs from others: the facts are here.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakValueDictionary

from nc10d.ops.own_reductions import OwnReduction

_NO_RECORDS = {"RECORD": "records are combined by a reduction of one's own: nc10d.reduction"}
_NOT_BITWISE = _NO_RECORDS | {
    "FLOAT": "bitwise operations are for ints and bool",
    "COMPLEX": "bitwise operations are for ints and bool",
}
_NO_ORDER = _NO_RECORDS | {"COMPLEX": "complex numbers have no order"}


@dataclass(frozen=True, slots=True, eq=False)
class Pairwise:
    """A reduction's step, which combines two elements of the same type.

    `of_truth` names the step that gives the same bits on truth values. `identity` is the element
    that changes no other, None, or a word: "zero", "one", "largest", "smallest" or "ones"
    (`nc10d.arrays.dtypes.identity`). `rounds` are the families of element types, by an
    ElementKind's name, for which operand order may change a bit of a result. `bitwise` steps treat
    an element as bits. `own` has the functions of a reduction of one's own.
    """

    name: str
    of_truth: str
    identity: Any
    rounds: Collection[str] = ()
    bitwise: bool = False
    own: OwnReduction | None = None

    @property
    def exact(self) -> bool:
        """Whether no operand order changes a bit of a result."""
        return not self.rounds


_ROUNDED = "FLOAT", "COMPLEX"
_ANY = "BOOL", "UINT", "INT", *_ROUNDED, "RECORD"
PAIRWISE = {
    step.name: step
    for step in (
        Pairwise("SUM", "BOR", "zero", _ROUNDED),
        Pairwise("PRODUCT", "BAND", "one", _ROUNDED),
        Pairwise("MIN", "BAND", "largest"),
        Pairwise("MAX", "BOR", "smallest"),
        Pairwise("BAND", "BAND", "ones", bitwise=True),
        Pairwise("BOR", "BOR", "zero", bitwise=True),
        Pairwise("BXOR", "BXOR", "zero", bitwise=True),
    )
}


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class ReductionKind:
    """A kind of reduction: equal only to itself.

    `number` is c10d's, -1 if c10d has none. `prepares` is "SCALE" or "", `finishes` is "DIVIDE" or
    ""; a reduction of one's own has the names of its maps there. `refuses` has the reason for each
    family of element types, by an ElementKind's name, that the kind is not for. `synonyms` are
    other libraries' names. `compared` is the name that ranks compare, `where` what errors add.
    """

    name: str
    number: int
    pairwise: Pairwise
    synonyms: str
    prepares: str = ""
    finishes: str = ""
    refuses: Mapping[str, str] = field(default_factory=lambda: _NO_RECORDS)
    compared: str = ""
    where: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "compared", self.compared or self.name)

    def __repr__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[Any, ...]:
        made = self.pairwise.own.made if self.pairwise.own else None
        return (kind_named, (self.compared,)) if made is None else (_kind_made, made)

    @property
    def finishes_one(self) -> bool:
        """Whether the last step may change a single operand; an average of one does not."""
        return self.finishes not in ("", "DIVIDE")


def kind_named(name: str) -> ReductionKind:
    """Return the kind with this name, as c10d spells it; KeyError if there is none.

    A kind of one's own has the name that ranks compare, such as "best#3fa2b1c0d4e5".
    """
    found = _BY_NAME.get(name) or _own_kinds.get(name)
    if found is None:
        raise KeyError(f"no reduction {name} in this process: import the module that makes it")
    return found


def _kind_made(module: str, name: str, arguments: tuple[Any, ...]) -> ReductionKind:
    """Return the kind of a ready-made reduction, by its name in a module."""
    found = getattr(importlib.import_module(module), name)
    made: ReductionKind = (found(*arguments) if arguments else found).kind
    return made


def own_kind(name: str) -> ReductionKind | None:
    """Return the kind of one's own with this name, while it is in use."""
    return _own_kinds.get(name)


def step_named(name: str) -> Pairwise:
    """Return the pairwise step with this name; KeyError if there is none."""
    return PAIRWISE.get(name) or _own_kinds[name].pairwise


def kind_of_own(own: OwnReduction, exact: bool = False) -> ReductionKind:
    """Return the kind of a reduction of one's own; the same for equal functions, while in use."""
    name = f"{own.name}#{own.digest}"
    step = Pairwise(name, name, own.identity, () if exact else _ANY, own=own)
    prepares, finishes = (
        f"{name}/{part}" if part in own.functions else "" for part in ("map", "finish")
    )
    made = ReductionKind(own.name, -1, step, "", prepares, finishes, {}, name, own.where)
    with _interning:
        return _own_kinds.setdefault(name, made)


KINDS = (
    ReductionKind("SUM", 0, PAIRWISE["SUM"], "sum add"),
    ReductionKind(
        "AVG",
        1,
        PAIRWISE["SUM"],
        "avg mean average",
        finishes="DIVIDE",
        refuses=_NO_RECORDS | {"BOOL": "the average of truth values is not one"},
    ),
    ReductionKind("PRODUCT", 2, PAIRWISE["PRODUCT"], "product prod multiply mul"),
    ReductionKind("MIN", 3, PAIRWISE["MIN"], "min minimum fmin amin", refuses=_NO_ORDER),
    ReductionKind("MAX", 4, PAIRWISE["MAX"], "max maximum fmax amax", refuses=_NO_ORDER),
    ReductionKind("BAND", 5, PAIRWISE["BAND"], "band bitwise_and and_", refuses=_NOT_BITWISE),
    ReductionKind("BOR", 6, PAIRWISE["BOR"], "bor bitwise_or or_", refuses=_NOT_BITWISE),
    ReductionKind("BXOR", 7, PAIRWISE["BXOR"], "bxor bitwise_xor xor", refuses=_NOT_BITWISE),
    ReductionKind(
        "PREMUL_SUM",
        8,
        PAIRWISE["SUM"],
        "",
        prepares="SCALE",
        refuses=_NO_RECORDS | {"BOOL": "a truth value can't be scaled"},
    ),
)
"""All kinds; a kind's number is its place."""
_BY_NAME = {kind.name: kind for kind in KINDS}


class ReduceOp:
    """A reduction: its kind and, for PREMUL_SUM, its factor.

    `purpose` describes a call's use in a few words, and changes no element. Ranks compare it like a
    call's other arguments: equal calls for different purposes are a CollectiveMismatch, whose
    message shows both purposes.

    `by_rank` is True for reductions that fold rank 0, 1, 2, ... in turn on every backend, whatever
    the size or the hosts: those made by `ordered`, and one's own.

    Each (kind, factor, purpose, by_rank) has a single instance, so `is` and `==` mean the same and
    the hash is the object's: a reduce operation is a key on the fast path.
    """

    __slots__ = ("__weakref__", "by_rank", "factor", "kind", "purpose")
    kind: ReductionKind
    factor: float | None
    purpose: str
    by_rank: bool
    SUM: ReduceOp
    AVG: ReduceOp
    PRODUCT: ReduceOp
    MIN: ReduceOp
    MAX: ReduceOp
    BAND: ReduceOp
    BOR: ReduceOp
    BXOR: ReduceOp

    def __new__(
        cls,
        kind: ReductionKind,
        factor: float | None = None,
        purpose: str = "",
        by_rank: bool = False,
    ) -> ReduceOp:
        """Return the instance for `kind`, `purpose`, order and, for PREMUL_SUM, `factor`."""
        if (kind.prepares == "SCALE") != (factor is not None):
            raise ValueError("a factor belongs to PREMUL_SUM, and only to it")
        factor = None if factor is None else float(factor)
        by_rank = by_rank or kind.pairwise.own is not None
        # As text: -0.0 equals 0.0, and NaN does not equal itself.
        key = (kind, "" if factor is None else factor.hex(), purpose, by_rank)
        with _interning:
            found = _reduce_ops.get(key)
            if found is None:
                found = object.__new__(cls)
                found.kind, found.factor, found.purpose = kind, factor, purpose
                found.by_rank = by_rank
                _reduce_ops[key] = found
            return found

    @property
    def name(self) -> str:
        """The kind's name, as c10d spells it, and order and purpose if there are any."""
        return self._named(self.kind.name)

    @property
    def compared(self) -> str:
        """Name, purpose and factor as text, which ranks compare."""
        name = self._named(self.kind.compared)
        return name if self.factor is None else f"{name}({self.factor})"

    @property
    def spelled(self) -> str:
        """The name that functional calls take: "sum", "premul_sum(0.5)", "sum.ordered"."""
        factor = "" if self.factor is None else f"({self.factor!r})"
        kind = self.kind.name.lower() if self.pairwise.own is None else self.kind.compared
        return f"{kind}{factor}{self._order}"

    @property
    def _order(self) -> str:
        return ".ordered" if self.by_rank and self.pairwise.own is None else ""

    def _named(self, kind: str) -> str:
        return f"{kind}{self._order}" + (f" for {self.purpose}" if self.purpose else "")

    @property
    def ordered(self) -> ReduceOp:
        """The same reduction, which folds rank 0, 1, 2, ... in turn on every backend.

            dist.all_reduce(x, op=dist.SUM.ordered)

        The same ranks get the same bits, whatever the size, the algorithm and the hosts. A
        reduction without rounding (MAX, or ints) runs as without it.
        """
        return ReduceOp(self.kind, self.factor, self.purpose, True)

    @property
    def pairwise(self) -> Pairwise:
        """The step that combines two operands."""
        return self.kind.pairwise

    @property
    def unfinished(self) -> ReduceOp:
        """The same reduction without its last step: an average becomes a sum."""
        if not self.kind.finishes:
            return self
        return ReduceOp(_unfinished(self.kind), None, "", self.by_rank)

    def meant_for(self, purpose: str) -> ReduceOp:
        """Return the same reduction with a purpose, in a few words; "" for none."""
        return ReduceOp(self.kind, self.factor, purpose, self.by_rank)

    def __repr__(self) -> str:
        inner = self.name if self.factor is None else f"{self.name}, factor={self.factor}"
        return f"ReduceOp({inner})"

    def __reduce__(self) -> tuple[Any, ...]:
        return ReduceOp, (self.kind, self.factor, self.purpose, self.by_rank)


def _unfinished(kind: ReductionKind) -> ReductionKind:
    if kind.pairwise.own is None:
        return kind_named(kind.pairwise.name)
    name = f"{kind.compared}/unfinished"
    with _interning:
        return _own_kinds.setdefault(name, replace(kind, finishes="", compared=name))


_interning = threading.RLock()
_own_kinds: WeakValueDictionary[str, ReductionKind] = WeakValueDictionary()
_reduce_ops: WeakValueDictionary[tuple[object, ...], ReduceOp] = WeakValueDictionary()

SUM = ReduceOp.SUM = ReduceOp(kind_named("SUM"))
AVG = ReduceOp.AVG = ReduceOp(kind_named("AVG"))
PRODUCT = ReduceOp.PRODUCT = ReduceOp(kind_named("PRODUCT"))
MIN = ReduceOp.MIN = ReduceOp(kind_named("MIN"))
MAX = ReduceOp.MAX = ReduceOp(kind_named("MAX"))
BAND = ReduceOp.BAND = ReduceOp(kind_named("BAND"))
BOR = ReduceOp.BOR = ReduceOp(kind_named("BOR"))
BXOR = ReduceOp.BXOR = ReduceOp(kind_named("BXOR"))
REDUCE_OPS = (SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR)
"""All reductions without a factor; a reduction's number is its place."""


def premul_sum(factor: float) -> ReduceOp:
    """Return the reduction that multiplies every contribution by `factor` before summing."""
    return ReduceOp(kind_named("PREMUL_SUM"), factor)


EXAMPLES = (*REDUCE_OPS, premul_sum(1.0))
"""A reduction of each kind."""
