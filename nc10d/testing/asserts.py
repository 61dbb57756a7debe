"""Assertions about all ranks' arrays, whose errors name rank, index and values.

`assert_same_bits` compares two arrays on the calling rank. The others are collectives: all ranks in
the group call them in the same order, and all raise the same error. Each takes the default group
unless another is given, and arrays from any library whose arrays become NumPy's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nc10d.api.objects import all_gather_object
from nc10d.arrays.dtypes import ElementKind, dtype_of
from nc10d.base.text import join_words, ranks_text
from nc10d.group.process_group import ProcessGroup
from nc10d.group.world import current_world, group_or_default
from nc10d.ops import SUM, ReduceOp
from nc10d.testing import reference

Array = np.ndarray[Any, np.dtype[Any]]
MOST_RANKS = 4
"""Most ranks whose values an error lists."""


def assert_same_bits(x: object, expected: object) -> None:
    """Raise AssertionError unless `x` has the dtype, shape and bits of `expected`.

    Two NaNs are equal. The error names this rank, the first index that differs, and both values.
    """
    __tracebackhide__ = True
    text = difference(np.asarray(x), np.asarray(expected))
    if text:
        group = current_world().default
        who = "the array" if group is None else f"rank {group.rank}"
        raise AssertionError(f"{who} holds {text}")


def assert_replicated(x: object, group: ProcessGroup | None = None) -> None:
    """Raise AssertionError on all ranks unless they all hold the same bits in `x`.

    The error names the ranks that differ from most others, or from rank 0, and where.
    """
    __tracebackhide__ = True
    arrays = [found for (found,) in _gathered(group, x)]
    alike = [[s for s, y in enumerate(arrays) if reference.same_bits(x, y)] for x in arrays]
    most = max(alike, key=len)
    others = [rank for rank in range(len(arrays)) if rank not in most]
    if others:
        wanted = [arrays[most[0]]] * len(arrays)
        raise AssertionError(_wrong(others, arrays, wanted, f" as on {ranks_text(most, 4)}"))


def assert_reduced(
    x: object, before: object, op: ReduceOp = SUM, group: ProcessGroup | None = None
) -> None:
    """Raise AssertionError on all ranks unless each holds in `x` the reduction of all `before`.

    `before` is this rank's contribution, in the shape of `x`. Sums and products of floats may
    differ by the rounding of another order. The error lists what each rank contributed.
    """
    __tracebackhide__ = True
    both = _gathered(group, x, before)
    arrays, inputs = [x for x, _ in both], [y for _, y in both]
    wanted = reference.all_reduce(inputs, op)
    others = [
        rank
        for rank, (got, want) in enumerate(zip(arrays, wanted, strict=True))
        if not (reference.same_bits(got, want) or _close(got, want, inputs))
    ]
    if others:
        index = first_difference(arrays[others[0]], wanted[others[0]])
        parts = [f"rank {r}: {_at(part, index)}" for r, part in enumerate(inputs[: 2 * MOST_RANKS])]
        told = "" if index is None else f". Contributions there: {', '.join(parts)}"
        raise AssertionError(_wrong(others, arrays, wanted, "") + told)


def assert_gathered(x: object, before: object, group: ProcessGroup | None = None) -> None:
    """Raise AssertionError on all ranks unless each holds in `x` the `before` of all, in order.

    `x` is a list with an array per rank, or an array that begins with rank 0's elements.
    """
    __tracebackhide__ = True
    found = x if not isinstance(x, (list, tuple)) else np.concatenate([np.ravel(y) for y in x])
    both = _gathered(group, found, before)
    wanted = np.concatenate([np.ravel(y) for _, y in both])
    arrays = [np.ravel(x) for x, _ in both]
    others = [rank for rank, x in enumerate(arrays) if not reference.same_bits(x, wanted)]
    if others:
        raise AssertionError(_wrong(others, arrays, [wanted] * len(arrays), ""))


def assert_partition(indices: Sequence[int], count: int, group: ProcessGroup | None = None) -> None:
    """Raise AssertionError on all ranks unless each of range(count) is on exactly one rank.

    `indices` are this rank's, in a data set or among a shard's elements. The error names the first
    indices that are on no rank, on several, or out of range.
    """
    __tracebackhide__ = True
    owners: dict[int, list[int]] = {index: [] for index in range(count)}
    for rank, (own,) in enumerate(_gathered(group, np.asarray(indices, np.int64))):
        for index in own.tolist():
            owners.setdefault(index, []).append(rank)
    problems = [
        f"{index} is on {ranks_text(ranks, MOST_RANKS) if ranks else 'no rank'}"
        + ("" if 0 <= index < count else f", but there are only {count}")
        for index, ranks in owners.items()
        if len(ranks) != 1 or not 0 <= index < count
    ]
    if problems:
        more = f" ({len(problems)} of {count} indices)" if len(problems) > MOST_RANKS else ""
        raise AssertionError(
            f"the ranks do not share range({count}) out: index "
            f"{join_words(problems[:MOST_RANKS])}{more}"
        )


def difference(x: Array, expected: Array, where: str = "") -> str:
    """Return "3.5 at [2], must be 4.0 (1 of 4 elements)"; empty if the bits are the same.

    `where` follows the right value.
    """
    if reference.same_bits(x, expected):
        return ""
    if (x.dtype, x.shape) != (expected.dtype, expected.shape):
        return f"{_form(x)}, must be {_form(expected)}{where}"
    index = first_difference(x, expected)
    wrong = sum(
        not reference.same_bits(a, b) for a, b in zip(_flat(x), _flat(expected), strict=True)
    )
    place = f" at [{', '.join(map(str, index or ()))}]" if x.ndim else ""
    count = f" ({wrong} of {x.size} elements)" if x.size > 1 else ""
    return f"{_at(x, index)}{place}, must be {_at(expected, index)}{where}{count}"


def first_difference(x: Array, expected: Array) -> tuple[int, ...] | None:
    """Return the first index at which two arrays differ; None if their forms do."""
    if (x.dtype, x.shape) != (expected.dtype, expected.shape):
        return None
    pairs = zip(_flat(x), _flat(expected), strict=True)
    place = next(i for i, (a, b) in enumerate(pairs) if not reference.same_bits(a, b))
    return tuple(int(i) for i in np.unravel_index(place, x.shape))


def _gathered(group: ProcessGroup | None, *own: object) -> list[tuple[Array, ...]]:
    whole = group_or_default(group)
    found: list[Any] = [None] * whole.size
    all_gather_object(found, [np.asarray(x) for x in own], whole)
    return [tuple(arrays) for arrays in found]


def _wrong(others: Sequence[int], arrays: list[Array], wanted: list[Array], right: str) -> str:
    first = others[0]
    text = difference(arrays[first], wanted[first], right)
    more = f"; wrong also on {ranks_text(others[1:], MOST_RANKS)}" if others[1:] else ""
    return f"rank {first} holds {text}{more}"


def _close(x: Array, expected: Array, inputs: Sequence[Array]) -> bool:
    """Return whether floats differ by no more than rounding in another order."""
    import ml_dtypes

    family = dtype_of(x.dtype).family
    if family not in (ElementKind.FLOAT, ElementKind.COMPLEX) or x.shape != expected.shape:
        return False
    if x.dtype != expected.dtype:
        return False
    wide = np.complex128 if family is ElementKind.COMPLEX else np.float64
    with np.errstate(all="ignore"):
        sizes = sum(np.abs(y.astype(wide)) for y in inputs) + np.abs(expected.astype(wide))
        bound = 2 * len(inputs) * float(ml_dtypes.finfo(x.dtype).eps) * sizes
        near = np.abs(x.astype(wide) - expected.astype(wide)) <= bound
    same = np.isnan(x) & np.isnan(expected) | (x == expected)
    return bool(np.all(near | same))


def _flat(x: Array) -> list[Array]:
    return [np.asarray(value, x.dtype) for value in np.ravel(x)]


def _at(x: Array, index: tuple[int, ...] | None) -> str:
    if index is None or len(index) != x.ndim:
        return _form(x)
    return str(x[index].item() if x.dtype.kind in "biufc" else x[index])


def _form(x: Array) -> str:
    return f"an array of {x.dtype} and shape {x.shape}"
