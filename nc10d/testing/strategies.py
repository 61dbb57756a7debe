"""Hypothesis strategies for collectives' arguments, from element types to whole programs.

Contract: every strategy shrinks to small worlds, few elements and plain layouts. Array contents
follow from a drawn seed: a mix of special values, ordinary values and random bits. A
`CollectiveCall` is a collective on all ranks. It makes each rank's operation on new memory, so that
a test can run it any number of times, and gets the expected outputs from the reference.

    @given(worlds().flatmap(lambda size: st.tuples(st.just(size), programs(size))))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from hypothesis import strategies as st

from nc10d import ops as O
from nc10d.arrays import access
from nc10d.arrays.dtypes import DType, ElementKind, allows
from nc10d.ops import Op
from nc10d.ops.facts import COLLECTIVE_KINDS, FACTS, facts_of
from nc10d.ops.operations import Arrays
from nc10d.ops.reductions import REDUCE_OPS
from nc10d.testing.layouts import lay
from nc10d.testing.programs.draw import mixed_programs as mixed_programs
from nc10d.testing.reference import compute
from nc10d.testing.simulated.faults import FAULTS, Fault, faults_from

Array = np.ndarray[Any, np.dtype[Any]]
COUNTS = (0, 1, 2, 3, 7, 8, 15, 16, 17, 64, 65, 255, 1000, 4099)
# A whole number, to be a factor for ints as well.
OPS = (*REDUCE_OPS, O.premul_sum(3.0))


def worlds(largest: int = 5) -> st.SearchStrategy[int]:
    """Draw a number of ranks."""
    return st.integers(1, largest)


def dtypes() -> st.SearchStrategy[DType]:
    """Draw an element type; shrinks to the common types."""
    first = [DType.FLOAT32, DType.INT64]
    return st.sampled_from(first + [d for d in DType if d not in first])


def reduce_ops(dtype: DType) -> st.SearchStrategy[O.ReduceOp]:
    """Draw a reduction that `dtype` allows."""
    return st.sampled_from([op for op in OPS if allows(dtype, op)])


# Arrays


def counts(largest: int = 4099) -> st.SearchStrategy[int]:
    """Draw a number of elements: none, few, and around the widths of vector code."""
    return st.sampled_from([n for n in COUNTS if n <= largest])


def shapes(largest: int = 4099) -> st.SearchStrategy[tuple[int, ...]]:
    """Draw a shape with 0 to 3 dimensions, perhaps without elements."""
    flat = counts(largest).map(lambda n: (n,))
    return flat | st.just(()) | st.tuples(st.integers(0, 4), st.integers(1, 5), st.integers(1, 3))


def special_values(dtype: DType) -> Array:
    """Return the values where mistakes hide: zeros, extremes, infinities, NaN."""
    if dtype.family is ElementKind.BOOL:
        return np.array([False, True])
    if dtype.family in (ElementKind.INT, ElementKind.UINT):
        info = np.iinfo(dtype.numpy)
        return np.array([0, 1, 2, 3, info.max, info.min, info.max // 2], dtype.numpy)
    real = [0.0, -0.0, 1.0, -1.0, 1.5, 3.0, np.nan, np.inf, -np.inf, 1e-7, 448.0, 6e4, 1e38]
    with np.errstate(all="ignore"):
        return np.array(real).astype(dtype.numpy)


def mixed_values(dtype: DType, shape: Sequence[int] | int, seed: int) -> Array:
    """Return a random mix of special values, ordinary values and random bits (so subnormals)."""
    rng = np.random.default_rng(seed)
    if dtype.family is ElementKind.BOOL:
        return rng.integers(0, 2, shape).astype(bool)
    count = int(np.prod(shape))
    bits = np.frombuffer(rng.bytes(count * dtype.itemsize), dtype.numpy)
    special = rng.choice(special_values(dtype), count)
    kind = rng.integers(0, 3, count)
    with np.errstate(all="ignore"):
        ordinary = (rng.standard_normal(count) * 100).astype(np.float32).astype(dtype.numpy)
        mixture = np.where(kind == 0, special, np.where(kind == 1, ordinary, bits))
        return mixture.astype(dtype.numpy).reshape(shape)


@st.composite
def arrays(draw: st.DrawFn, dtype: DType, shape: Sequence[int]) -> Array:
    """Draw the contents of an array with this type and shape."""
    return mixed_values(dtype, tuple(shape), draw(st.integers(0, 2**32)))


@st.composite
def same_shape_per_rank(draw: st.DrawFn, size: int, dtype: DType | None = None) -> list[Array]:
    """Draw an array per rank, all with the same type and shape."""
    dtype = dtype or draw(dtypes())
    shape = draw(shapes())
    return [draw(arrays(dtype, shape)) for _ in range(size)]


@st.composite
def ragged_per_rank(draw: st.DrawFn, size: int, dtype: DType | None = None) -> list[Array]:
    """Draw a flat array per rank, all with the same type, in different sizes."""
    dtype = dtype or draw(dtypes())
    return [draw(arrays(dtype, (draw(counts()),))) for _ in range(size)]


# Collectives, and programs with them


@dataclass(frozen=True, eq=False)
class CollectiveCall:
    """A collective on all ranks.

    `inputs[r]` is rank r's input: an array, or a list with an array per rank. `flat` packs such
    lists into a single array. `layout` is one of `LAYOUTS`.
    """

    kind: type[Any]
    inputs: list[Any]
    op: O.ReduceOp = O.SUM
    root: int = 0
    flat: bool = False
    layout: str = "plain"

    def make(self, rank: int) -> Any:
        """Return rank's operation, on fresh memory; outputs hold zeros."""
        facts = FACTS[self.kind]
        made = {name: self._array(name, rank) for name in facts.arrays}
        made |= {"op": self.op, "root": self.root, "even": self.flat}
        made |= {"out_splits": None, "in_splits": None}
        if facts.is_cut_by_rows and self.flat:
            made["out_splits"] = [len(x) for x in self.column(rank)]
            made["in_splits"] = [len(x) for x in self.inputs[rank]]
        return self.kind(**{name: made[name] for name in facts.fields if name in made})

    def _array(self, name: str, rank: int) -> object:
        """Return an argument on fresh memory; None where only the root has the argument."""
        facts = FACTS[self.kind]
        of_chunks = "inp" in facts.per_rank
        chunks = self.inputs[self.root if facts.has_root else rank]
        if name in facts.per_rank and facts.has_root and rank != self.root:
            return None
        if name != "out":
            return self.pack(chunks) if name in facts.per_rank else self.lay(self.inputs[rank])
        if name in facts.per_rank:
            return self.pack(_zeros(self.column(rank) if of_chunks else self.inputs))
        return self.lay(np.zeros_like(chunks[rank]))

    def expected(self) -> list[list[Array]]:
        """Return each rank's expected `outputs`."""
        ops = [self.make(rank) for rank in range(len(self.inputs))]
        compute(ops)
        return [outputs(op) for op in ops]

    def lay(self, x: Array) -> Array:
        """Return a copy of `x` in this call's layout."""
        return lay(x, self.layout)

    def pack(self, chunks: Sequence[Array]) -> Arrays:
        """Return copies of the chunks, as a list or as a flat array."""
        if self.flat:
            return self.lay(np.concatenate([np.ravel(x) for x in chunks]))
        return [self.lay(x) for x in chunks]

    def column(self, rank: int) -> list[Array]:
        """Return every rank's chunk for `rank`."""
        return [chunks[rank] for chunks in self.inputs]


def outputs(op: Any) -> list[Array]:
    """Return the arrays that an operation may write to, in order."""
    return access.outputs([op])


def issue(group: object, op: Any, async_op: bool = False) -> Any:
    """Make the call on `group` for an operation; return the call's result."""
    facts = facts_of(op)
    flat = _is_flat(op)
    names = [*_ORDER.get(type(op), facts.arrays), "root", "op"]
    names += ["out_splits", "in_splits"] if flat else []
    given = [getattr(op, name) for name in names if name in facts.fields]
    return getattr(group, facts.flat_name if flat else facts.name)(*given, async_op=async_op)


_ORDER: dict[type[Op], tuple[str, ...]] = {O.Gather: ("inp", "out")}
"""The order of a public call's arrays where it differs from the fields' order."""


def _is_flat(op: Any) -> bool:
    facts = facts_of(op)
    if hasattr(op, "even"):  # only the root has the array
        return bool(op.even)
    return any(not isinstance(getattr(op, name), list) for name in facts.per_rank)


def _zeros(chunks: Sequence[Array]) -> list[Array]:
    return [np.zeros_like(x) for x in chunks]


KINDS = COLLECTIVE_KINDS


@st.composite
def calls(draw: st.DrawFn, size: int, kinds: Sequence[type[Op]] = KINDS) -> CollectiveCall:
    """Draw a collective on `size` ranks."""
    kind, dtype = draw(st.sampled_from(kinds)), draw(dtypes())
    facts = FACTS[kind]
    flat = bool(facts.flat_name) and draw(st.booleans())
    return CollectiveCall(
        kind=kind,
        inputs=draw(_inputs(kind, size, dtype, flat)),
        op=draw(reduce_ops(dtype)) if facts.reduces else O.SUM,
        root=draw(st.integers(0, size - 1)),
        flat=flat,
        layout=draw(st.sampled_from(["plain", "strided"])),
    )


@st.composite
def _inputs(draw: st.DrawFn, kind: type[object], size: int, dtype: DType, flat: bool) -> list[Any]:
    """Draw each rank's input; sizes agree where the collective requires it."""
    facts = FACTS[kind]
    if not facts.arrays:
        return [None] * size
    if facts.on_one_array:
        return draw(same_shape_per_rank(size, dtype))
    sizes = draw(st.lists(counts(255), min_size=size, max_size=size))
    if flat and not facts.is_cut_by_rows:
        sizes = sizes[:1] * size
    if "inp" not in facts.per_rank:
        return [draw(arrays(dtype, (n,))) for n in sizes]
    rows = _rotations(sizes) if facts.is_cut_by_rows else [sizes] * size
    return [[draw(arrays(dtype, (n,))) for n in row] for row in rows]


def _rotations(sizes: list[int]) -> list[list[int]]:
    """Give each rank the same sizes in another order: every pair exchanges another size."""
    return list(accumulate(sizes[1:], lambda row, _: row[1:] + row[:1], initial=sizes))


def programs(size: int, longest: int = 6) -> st.SearchStrategy[list[CollectiveCall]]:
    """Draw collectives that `size` ranks make in sequence."""
    return st.lists(calls(size), min_size=1, max_size=longest)


@st.composite
def fault_plans(draw: st.DrawFn, size: int, seconds: float) -> list[Fault]:
    """Draw faults for simulated ranks, as `draw_faults` does; shrinks to few and early faults."""
    return faults_from(size, seconds, FAULTS, lambda low, high: draw(st.integers(low, high)))
