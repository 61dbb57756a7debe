"""The cases that a backend is checked with: a cover of all pairs, each case built from a seed.

A `CollectiveCase` is small and the same on every rank. `build()` makes the call. The arrays' sizes
and contents follow from the case alone, and the arrays lie in guarded memory (see `layouts`).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nc10d import ops as O
from nc10d.arrays.dtypes import DType, ElementKind, allows
from nc10d.ops.facts import COLLECTIVE_KINDS, FACTS, OperationFacts
from nc10d.ops.reductions import KINDS, kind_named
from nc10d.testing.layouts import LAYOUTS
from nc10d.testing.modes import MODES
from nc10d.testing.pair_cover import pairwise
from nc10d.testing.strategies import CollectiveCall, mixed_values

CALLS: dict[str, tuple[OperationFacts, bool]] = {
    name: (facts, flat)
    for flat in (False, True)
    for kind in COLLECTIVE_KINDS
    if (facts := FACTS[kind]).arrays and (name := facts.flat_name if flat else facts.name)
}
"""The public calls by name: the operation's facts, and whether the arrays are flat."""
NO_OP = "-"
OPS = (*(kind.name for kind in KINDS), NO_OP)
SHAPES = ("empty", "0-d", "one", "small", "large", "ragged", *LAYOUTS[1:])
LARGE_BYTES = 300 * 1024  # more than half the CPU engine's staging buffer, which is 256 KiB


@dataclass(frozen=True)
class CollectiveCase:
    """A collective in a mode, on arrays of a dtype; the same on every rank for a `seed`."""

    call: str
    dtype: DType
    op: str
    size: int
    shape: str
    mode: str
    seed: int

    def __str__(self) -> str:
        op = "" if self.op == NO_OP else f" {self.op}"
        call = f"{self.call}{op} of {self.dtype.label}, {self.shape}, {self.mode}"
        return f"{call}, {self.size} ranks (seed {self.seed})"

    def build(self) -> CollectiveCall:
        """Make the call: the arrays' contents follow from the case alone."""
        facts, flat = CALLS[self.call]
        op = O.SUM if self.op == NO_OP else reduction(self.op, self.dtype)
        root = self.seed % self.size
        layout = self.shape if self.shape in LAYOUTS else "plain"
        return CollectiveCall(facts.kind, self._inputs(), op, root, flat, layout)

    def _inputs(self) -> list[Any]:
        facts, _ = CALLS[self.call]
        seeds = itertools.count(1000 * self.seed)
        make = functools.partial(mixed_values, self.dtype)
        if "inp" in facts.per_rank:
            return [
                [make(self._shape_of(r, c), next(seeds)) for c in range(self.size)]
                for r in range(self.size)
            ]
        return [make(self._shape_of(r, r), next(seeds)) for r in range(self.size)]

    def _shape_of(self, rank: int, chunk: int) -> tuple[int, ...]:
        if self.shape == "ragged":
            # In all_to_all every pair of ranks exchanges another size.
            place = chunk + rank if CALLS[self.call][0].is_cut_by_rows else chunk
            return (_SIZES[(place + self.seed) % len(_SIZES)],)
        if self.shape == "large":
            return (LARGE_BYTES // self.dtype.itemsize + 3,)
        if self.shape in LAYOUTS:
            return (35,) if CALLS[self.call][1] else (5, 7)
        return {"empty": (0,), "0-d": (), "one": (1,), "small": (13,)}[self.shape]


_SIZES = (5, 0, 4099, 1, 70_001, 64)


def reduction(name: str, dtype: DType) -> O.ReduceOp:
    """Return the reduction called `name`; PREMUL_SUM's factor is whole for ints."""
    kind, whole = kind_named(name), dtype.family in (ElementKind.INT, ElementKind.UINT)
    return O.ReduceOp(kind, (3.0 if whole else 0.7) if kind.prepares else None)


def cover(
    world_sizes: Sequence[int] = (1, 2, 3, 4, 5),
    dtypes: Sequence[DType] = tuple(DType),
    seed: int = 0,
) -> list[CollectiveCase]:
    """Return cases in which any two of call, dtype, op, size, shape and mode meet, if they can."""
    parameters = {
        "call": tuple(CALLS),
        "dtype": tuple(dtypes),
        "op": OPS,
        "size": tuple(world_sizes),
        "shape": SHAPES,
        "mode": tuple(MODES),
    }
    rows = pairwise(parameters, _fits, seed)
    return [CollectiveCase(**row, seed=number) for number, row in enumerate(rows, seed)]


def _fits(one: str, a: Any, other: str, b: Any) -> bool:
    if (one, other) == ("call", "op"):
        return bool(CALLS[a][0].reduces == (b != NO_OP))
    if (one, other) == ("dtype", "op"):
        return b == NO_OP or allowed(a, b)
    if (one, other) == ("call", "shape"):
        return (
            _may_be_ragged(*CALLS[a]) if b == "ragged" else (a, b) != ("all_to_all_single", "0-d")
        )
    return True


def _may_be_ragged(facts: OperationFacts, flat: bool) -> bool:
    return bool(facts.per_rank) and (not flat or facts.is_cut_by_rows)


def allowed(dtype: DType, op: str) -> bool:
    """Return whether `dtype` allows this reduction."""
    return allows(dtype, reduction(op, dtype))
