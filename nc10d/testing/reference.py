"""Collectives' reference results, in a few lines of NumPy, for tests to compare with.

Contract: `arrays[r]` is rank r's input. Item r of the result is the array that rank r must hold
afterwards, bit for bit (NaNs may differ in payload). Reductions fold in rank order, pairwise,
rounding once each time. Nothing here uses nc10d's kernels. Only `compute` and `assign` change
arrays: the outputs that they get.

>>> import numpy as np
>>> ranks = [np.array([1.0, 2.0]), np.array([10.0, 20.0])]
>>> all_reduce(ranks)
[array([11., 22.]), array([11., 22.])]
>>> reduce_scatter([[np.array([1]), np.array([2])], [np.array([3]), np.array([4])]])
[array([4]), array([6])]
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from nc10d.arrays.dtypes import (
    NARROW,
    ElementKind,
    RecordType,
    check_reduce,
    element_of,
    reduced_element,
    widened,
)
from nc10d.arrays.dtypes import identity as neutral
from nc10d.arrays.fields import Fields
from nc10d.ops import SUM, Op, ReduceOp
from nc10d.ops.facts import facts_of, rank_is_in
from nc10d.ops.operations import Arrays
from nc10d.ops.reductions import Pairwise

Array = np.ndarray[Any, np.dtype[Any]]


# The collectives


def all_reduce(arrays: Sequence[Array], op: ReduceOp = SUM) -> list[Array]:
    """Every rank ends with the reduction of all ranks' arrays."""
    total = fold(arrays, op)
    return [total.copy() for _ in arrays]


def reduce(arrays: Sequence[Array], root: int, op: ReduceOp = SUM) -> list[Array]:
    """The root ends with the reduction, the other ranks with their own arrays."""
    return [fold(arrays, op) if r == root else x.copy() for r, x in enumerate(arrays)]


def broadcast(arrays: Sequence[Array], root: int) -> list[Array]:
    """Every rank ends with the root's array."""
    return [arrays[root].copy() for _ in arrays]


def all_gather(arrays: Sequence[Array]) -> list[list[Array]]:
    """Every rank ends with a list of all ranks' arrays (sizes may differ)."""
    return [[x.copy() for x in arrays] for _ in arrays]


def gather(arrays: Sequence[Array], root: int) -> list[list[Array] | None]:
    """The root ends with a list of all ranks' arrays, the others with None."""
    return [[x.copy() for x in arrays] if r == root else None for r in range(len(arrays))]


def scatter(chunks: Sequence[Array]) -> list[Array]:
    """Rank r ends with the root's chunk r."""
    return [x.copy() for x in chunks]


def reduce_scatter(lists: Sequence[Sequence[Array]], op: ReduceOp = SUM) -> list[Array]:
    """Rank r ends with the reduction of every rank's chunk r."""
    return [fold([chunks[r] for chunks in lists], op) for r in range(len(lists))]


def all_to_all(lists: Sequence[Sequence[Array]]) -> list[list[Array]]:
    """Rank r ends with a list of every rank's chunk r."""
    return [[chunks[r].copy() for chunks in lists] for r in range(len(lists))]


def scan(arrays: Sequence[Array], op: ReduceOp = SUM) -> list[Array]:
    """Rank r ends with the reduction of the arrays on ranks 0 to r."""
    return [fold(arrays[: r + 1], op) for r in range(len(arrays))]


def exscan(arrays: Sequence[Array], op: ReduceOp = SUM, identity: bool = False) -> list[Array]:
    """Rank r ends with the earlier ranks' reduction; rank 0 with its own, or the identity."""
    first = _identities(arrays[0], op) if identity else arrays[0].copy()
    before = [fold(arrays[:r], op) for r in range(1, len(arrays))]
    return [first, *before]


def _identities(x: Array, op: ReduceOp) -> Array:
    element = reduced_element(element_of(x.dtype), op, x.shape[-1] if x.shape else 1)
    count = x.nbytes // element.itemsize
    return np.full(count, neutral(element, op), element.numpy).view(x.dtype).reshape(x.shape)


@np.errstate(invalid="ignore")
def same_bits(x: Array, y: Array) -> bool:
    """Say whether two arrays agree in dtype, shape and every bit (NaN payloads aside)."""
    if x.dtype != y.dtype or x.shape != y.shape:
        return False
    if np.iscomplexobj(x):
        return same_bits(x.real, y.real) and same_bits(x.imag, y.imag)
    if x.dtype.names:
        return all(same_bits(x[name], y[name]) for name in x.dtype.names)
    bits = f"u{x.dtype.itemsize}"
    equal = np.ascontiguousarray(x).view(bits) == np.ascontiguousarray(y).view(bits)
    if element_of(x.dtype).family is ElementKind.FLOAT:
        equal |= np.isnan(x) & np.isnan(y)
    return bool(np.all(equal))


# The collectives as operations


def compute(ops: Sequence[Op]) -> None:
    """Run a collective: `ops[r]` is rank r's operation."""
    facts, joined = facts_of(ops[0]), list[tuple[Fields, Array]]()

    def records(x: Any) -> Any:
        if isinstance(x, (list, tuple)):
            return [records(each) for each in x]
        if not isinstance(x, Fields):
            return x
        joined.append((x, x.records()))
        return joined[-1][1]

    given = ops
    names = {name: [records(getattr(op, name)) for op in ops] for name in facts.arrays}
    ops = [
        facts.replace(op, **{name: each[r] for name, each in names.items()})
        for r, op in enumerate(ops)
    ]
    for name, ranks in facts.writes.items():
        for rank, (op, value) in enumerate(zip(ops, _results(ops), strict=True)):
            if value is not None and rank_is_in(ranks, op, rank):
                _assign_all(getattr(op, name), value)
    written = [id(getattr(op, name)) for op in given for name in facts.writes]
    for fields, whole in joined:
        if id(fields) in written:
            fields.assign(whole)


def assign(out: Any, value: Any) -> None:
    """Write `value` into `out`; shapes may differ, element counts must agree."""
    np.copyto(out, np.asarray(value).reshape(out.shape))


def _assign_all(outs: object, value: object) -> None:
    """Write an array, or a list with an array per rank: into a list, or in sequence if flat."""
    if not isinstance(value, list):
        assign(outs, value)
    elif isinstance(outs, (list, tuple)):
        for out, part in zip(outs, value, strict=True):
            assign(out, part)
    else:
        assign(outs, np.concatenate([np.ravel(part) for part in value]))


def _results(ops: Sequence[Any]) -> Sequence[object]:
    """Return each rank's result by the function with the operation's name."""
    facts, first, size = facts_of(ops[0]), ops[0], len(ops)
    by_name: Any = globals()[facts.name]
    if "inp" not in facts.per_rank:
        inputs = [getattr(op, next(iter(facts.reads))) for op in ops]
    elif facts.has_root:
        return list(by_name(_sent(ops[first.root], size)))
    else:
        inputs = [_sent(op, size) for op in ops]
    options = [getattr(first, f) for f in ("root", "op", "identity") if f in facts.fields]
    return list(by_name(inputs, *options))


def _chunks(xs: Arrays, size: int) -> list[Array]:
    return list(xs) if isinstance(xs, (list, tuple)) else np.split(np.ravel(xs), size)


def _sent(op: Any, size: int) -> list[Array]:
    """Return the chunks of an operation's input."""
    if getattr(op, "in_splits", None) is None:
        return _chunks(op.inp, size)
    return np.split(op.inp, np.cumsum(op.in_splits)[:-1].tolist())


# The reductions


def fold(arrays: Sequence[Array], op: ReduceOp) -> Array:
    """Reduce `arrays` in their order; TypeError if their dtype does not allow `op`."""
    shape, row = arrays[0].shape, arrays[0].shape[-1] if arrays[0].shape else 1
    element = reduced_element(element_of(arrays[0].dtype), op, row)
    check_reduce(element, op)
    seen = [np.ascontiguousarray(x).view(element.numpy) for x in arrays]
    total = functools.reduce(
        lambda x, y: pairwise(x, y, op.pairwise), [_prepared(x, op) for x in seen]
    )
    return _finished(total, len(arrays), op).view(arrays[0].dtype).reshape(shape)


def _prepared(x: Array, op: ReduceOp) -> Array:
    own = op.pairwise.own
    if own is not None and op.kind.prepares:
        return own_results(own.functions["map"], x)
    return x if op.factor is None else scaled(x, op.factor)


def _finished(total: Array, count: int, op: ReduceOp) -> Array:
    own = op.pairwise.own
    if own is not None and op.kind.finishes:
        return own_results(own.functions["finish"], total)
    return divided(total, count) if op.kind.finishes else np.array(total)


def pairwise(x: Array, y: Array, step: Pairwise) -> Array:
    """Return x op y in the arrays' dtype, rounded once."""
    if step.own is not None:
        return own_results(step.own.functions["step"], x, y)
    dtype = element_of(x.dtype)
    rule = RULES[step.name]
    if dtype.family is ElementKind.BOOL:
        rule = LOGICAL[step.of_truth]
    elif dtype.family is ElementKind.COMPLEX and rule is np.multiply:
        rule = _complex_product
    with np.errstate(all="ignore"):
        wide = [_widened(x), _widened(y)]
        return np.asarray(rule(*wide)).astype(x.dtype)


def own_results(function: Callable[..., Any], *arrays: Array) -> Array:
    """Return a function's results, element by element, computed by Python itself."""
    out = np.array(arrays[0])
    wide = [np.atleast_1d(_widened(x)).reshape(-1) for x in arrays]
    if out.dtype.names:  # elements with attributes
        wide = [x.view(np.recarray) for x in wide]
    flat = np.atleast_1d(out).reshape(-1)
    writes = len(inspect.signature(function).parameters) > len(arrays)
    with np.errstate(all="ignore"):
        for i in range(flat.size):
            total = wide[0][i : i + 1].copy()
            result = function(*[x[i] for x in wide], *total[: int(writes)])
            if not writes:
                total[0] = result
            flat[i : i + 1] = total  # rounded as the compiled function's result: to float32 first
    return flat.reshape(out.shape)


def divided(x: Array, count: int) -> Array:
    """Return x / count: ints truncate toward zero, floats round once, complex by parts."""
    family = element_of(x.dtype).family
    if family in (ElementKind.INT, ElementKind.UINT):
        return _each(lambda v: (abs(v) // count) * (1 if v >= 0 else -1), x)
    return _by_parts(x, lambda real: real / real.dtype.type(count))


def scaled(x: Array, factor: float) -> Array:
    """Return x * factor in x's dtype, to which the factor is rounded first; ints wrap around."""
    if element_of(x.dtype).family in (ElementKind.INT, ElementKind.UINT):
        return _each(lambda v: _wrapped(v * int(factor), x.dtype), x)
    return _by_parts(x, lambda real: real * _rounded(factor, x.dtype, real.dtype))


RULES: dict[str, Callable[[Array, Array], Array]] = {
    "SUM": np.add,
    "PRODUCT": np.multiply,
    "MIN": lambda x, y: np.where((x < y) | np.isnan(x), x, y),
    "MAX": lambda x, y: np.where((x > y) | np.isnan(x), x, y),
    "BAND": np.bitwise_and,
    "BOR": np.bitwise_or,
    "BXOR": np.bitwise_xor,
}
LOGICAL: dict[str, Callable[[Array, Array], Array]] = {
    "BAND": np.logical_and,
    "BOR": np.logical_or,
    "BXOR": np.logical_xor,
}


def _complex_product(x: Array, y: Array) -> Array:
    """Written out, because NumPy may fuse the multiplications with the additions."""
    out = np.empty_like(x)
    out.real = x.real * y.real - x.imag * y.imag
    out.imag = x.real * y.imag + x.imag * y.real
    return out


def _widened(x: Array) -> Array:
    element = element_of(x.dtype)
    if isinstance(element, RecordType):
        return x.astype(widened(element).numpy)
    return x.astype(np.float32) if element in NARROW else x


def _by_parts(x: Array, rule: Callable[[Array], Array]) -> Array:
    """Apply `rule` to real numbers in at least float32, and round once."""
    wide = np.array(_widened(x))
    with np.errstate(all="ignore"):
        if np.iscomplexobj(wide):
            wide.real, wide.imag = rule(wide.real), rule(wide.imag)
            return wide
        return np.asarray(rule(wide)).astype(x.dtype)


def _rounded(factor: float, dtype: np.dtype[Any], wide: np.dtype[Any]) -> object:
    """Round `factor` to the array's real dtype, and return it in the computation's dtype."""
    narrow = dtype if element_of(dtype) in NARROW else wide
    return np.asarray(factor, wide).astype(narrow).astype(wide)[()]


def _each(rule: Callable[[int], int], x: Array) -> Array:
    """Apply `rule` to Python's ints: no width, no rounding, no overflow."""
    return np.array([rule(int(v)) for v in x.flat], x.dtype).reshape(x.shape)


def _wrapped(value: int, dtype: np.dtype[Any]) -> int:
    low, bits = int(np.iinfo(dtype).min), 8 * dtype.itemsize
    return (value - low) % (1 << bits) + low
