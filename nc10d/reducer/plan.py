"""Each gradient's bucket and offset, computed from sizes only and the same on all ranks.

Contract: pure functions. A spec is an array, a Spec, or a tuple (shape or count, dtype, device).
Ranks that pass equal arguments get equal plans. So ranks exchange no plans, only the order in which
gradients arrived.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from nc10d.arrays.buffer import Buffer, as_buffer
from nc10d.arrays.dtypes import DType, dtype_of, scalar
from nc10d.base.run_to_end import import_to_end

FIRST_BUCKET_BYTES = 1 << 20
"""The first bucket's cap: small, so that communication begins early (c10d's value)."""
BUCKET_BYTES = 25 << 20
"""The cap for all other buckets (c10d's value)."""
_NO_LIMIT = 0
_UNLIMITED = 1 << 62
_Kind = tuple[DType, str]
"""The dtype and the device that a bucket's gradients share."""


@dataclass(frozen=True, slots=True)
class Spec:
    """A parameter's properties on which a plan depends."""

    shape: tuple[int, ...]
    dtype: DType
    device: str

    @property
    def count(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The gradient's size in bytes."""
        return self.count * self.dtype.itemsize


def spec_of(x: object) -> Spec:
    """Return the Spec for an array, or for a tuple (shape or count, dtype, device="cpu").

    TypeError for other values, and for a dtype that can't be communicated.
    """
    if isinstance(x, Spec):
        return x
    if isinstance(x, tuple):
        return _spec(*x)
    buffer = as_buffer(x)
    return Spec(tuple(buffer.shape), scalar(buffer.dtype), _device(x, buffer))


def _device(x: object, buffer: Buffer) -> str:
    """Return a device's name, with the ordinal if it is a GPU: "cpu", "cuda:1"."""
    if buffer.device != "cuda":
        return buffer.device
    return f"cuda:{import_to_end('nc10d.cuda.memory').device_of(x)}"


def _spec(shape: int | Sequence[int], dtype: Any, device: object = "cpu") -> Spec:
    sides = (shape,) if isinstance(shape, int) else tuple(shape)
    kind = dtype if isinstance(dtype, DType) else dtype_of(np.dtype(dtype))
    return Spec(sides, kind, str(device))


def with_dtypes(specs: list[Spec], dtypes: Sequence[object] | None) -> list[Spec]:
    """Return the specs with these dtypes, or unchanged without dtypes.

    ValueError if their number is wrong; TypeError for a dtype that can't be communicated.
    """
    if dtypes is None:
        return specs
    if len(dtypes) != len(specs):
        raise ValueError(f"there are {len(dtypes)} gradient_dtypes for {len(specs)} parameters")
    return [_spec(x.shape, kind, x.device) for x, kind in zip(specs, dtypes, strict=True)]


def compute_bucket_assignment_by_size(
    specs: Sequence[object],
    size_limits: Sequence[int],
    expect_sparse: Sequence[bool] | None = None,
    indices: Sequence[int] | None = None,
) -> tuple[list[list[int]], list[int]]:
    """Return the buckets (lists of parameter indices) and the limit of each bucket in bytes.

    A bucket holds parameters of the same dtype and device, in the order of `specs`, and is full
    when it has reached its limit. The buckets of a (dtype, device) use the limits in turn, and the
    last limit repeats. A parameter with `expect_sparse[index]` has a bucket of its own, with limit
    0. `indices[i]` is the parameter that `specs[i]` describes; the default is i. An empty list is
    the same as None.

    Without `indices` the buckets are sorted by their smallest index. With `indices` the full
    buckets come first, in the order in which they got full. The others follow, the latest new
    (dtype, device) first. (c10d iterates over a hash map there: the order is the same for two keys,
    and usually for more.)

    ValueError without specs or limits, and for lengths and indices that don't fit.
    Source: the behaviour of c10d's function of this name.
    """
    order = indices or range(len(specs))
    _check(len(specs), size_limits, expect_sparse, order)
    buckets: list[tuple[list[int], int]] = []
    filling: dict[_Kind, list[int]] = {}
    nbytes: Counter[_Kind] = Counter()
    turns: Counter[_Kind] = Counter()

    def limit(kind: _Kind) -> int:
        return size_limits[min(turns[kind], len(size_limits) - 1)]

    for index, spec in zip(order, map(spec_of, specs), strict=True):
        if expect_sparse and expect_sparse[index]:
            buckets.append(([index], _NO_LIMIT))
            continue
        kind = spec.dtype, spec.device
        filling.setdefault(kind, []).append(index)
        nbytes[kind] += spec.nbytes
        if nbytes[kind] >= limit(kind):
            buckets.append((filling[kind], limit(kind)))
            filling[kind], nbytes[kind] = [], 0
            turns[kind] += 1
    buckets.extend((rest, limit(kind)) for kind, rest in reversed(filling.items()) if rest)
    if not indices:
        buckets.sort(key=lambda bucket: min(bucket[0]))
    return [bucket for bucket, _ in buckets], [limit for _, limit in buckets]


def _check(
    count: int, limits: Sequence[int], sparse: Sequence[bool] | None, order: Sequence[int]
) -> None:
    if not count:
        raise ValueError("there are no parameters to put into buckets")
    if not limits or min(limits) < 0:
        raise ValueError(f"size limits must be one or more numbers of bytes, got {list(limits)}")
    if sparse and len(sparse) != count:
        raise ValueError(f"expect_sparse has {len(sparse)} entries for {count} parameters")
    if len(order) != count:
        raise ValueError(f"indices has {len(order)} entries for {count} parameters")
    if sparse and not all(0 <= index < count for index in order):
        raise ValueError(f"indices must be from 0 to {count - 1} where expect_sparse is given")


@dataclass(frozen=True, slots=True)
class Slot:
    """A parameter's place in its bucket: `count` elements from `offset` on."""

    param: int
    offset: int
    count: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """A bucket's plan: the slots are contiguous, without gaps."""

    slots: tuple[Slot, ...]
    dtype: DType
    device: str
    sparse: bool

    @property
    def count(self) -> int:
        """The number of elements in all slots."""
        return sum(slot.count for slot in self.slots)

    @property
    def params(self) -> list[int]:
        """The bucket's parameters, in the order of their slots."""
        return [slot.param for slot in self.slots]


@dataclass(frozen=True, slots=True)
class ReducePlan:
    """All buckets in launch order."""

    buckets: tuple[BucketPlan, ...]


def plan_buckets(
    specs: Sequence[object],
    size_limits: Sequence[int] = (FIRST_BUCKET_BYTES, BUCKET_BYTES),
    expect_sparse: Sequence[bool] | None = None,
    order: Sequence[int] | None = None,
    *,
    delayed: Sequence[int] = (),
    delayed_until: int | None = None,
) -> ReducePlan:
    """Plan buckets for all parameters, with about these limits in bytes; the last limit repeats.

    The `delayed` parameters are in a bucket per dtype and device, behind the bucket of parameter
    `delayed_until` (None: behind all others).
    """
    # Without `order` the last parameters come first, since a backward pass ends with the first
    # layer. With `order` (each parameter once, see `arrival_order`) buckets follow arrival order.
    params = [spec_of(x) for x in specs]
    whole = range(len(params))
    if order is not None and sorted(order) != list(whole):
        raise ValueError(f"order must have each of the {len(params)} parameters once")
    late = set(delayed)
    prompt = [param for param in (whole if order is None else order) if param not in late]
    buckets = _assigned(params, prompt, size_limits, expect_sparse)
    if order is None:
        buckets.sort(key=min, reverse=True)
    if late:
        found = [index for index, bucket in enumerate(buckets) if delayed_until in bucket]
        place = found[0] + 1 if found else len(buckets)
        buckets[place:place] = _assigned(params, list(delayed), [_UNLIMITED], expect_sparse)
    return lay_out(params, buckets, expect_sparse)


def _assigned(
    specs: Sequence[Spec],
    params: Sequence[int],
    limits: Sequence[int],
    expect_sparse: Sequence[bool] | None,
) -> list[list[int]]:
    if not params:
        return []
    chosen = [specs[param] for param in params]
    sparse = [expect_sparse[param] for param in params] if expect_sparse else None
    buckets, _ = compute_bucket_assignment_by_size(chosen, limits, sparse, range(len(chosen)))
    return [[params[index] for index in bucket] for bucket in buckets]


def lay_out(
    specs: Sequence[Spec], buckets: Sequence[Sequence[int]], expect_sparse: Sequence[bool] | None
) -> ReducePlan:
    """Return the plan for these buckets; ValueError unless each parameter is in a single bucket."""
    params = [param for bucket in buckets for param in bucket]
    if sorted(params) != list(range(len(specs))):
        raise ValueError(f"buckets must have each of the {len(specs)} parameters once")
    return ReducePlan(tuple(_bucket(specs, bucket, expect_sparse) for bucket in buckets))


def _bucket(
    specs: Sequence[Spec], params: Sequence[int], expect_sparse: Sequence[bool] | None
) -> BucketPlan:
    members = [specs[param] for param in params]
    keys = {(spec.dtype, spec.device) for spec in members}
    if len(keys) != 1:
        raise ValueError(f"the parameters {list(params)} differ in dtype or device")
    ends = accumulate(spec.count for spec in members)
    slots = tuple(
        Slot(param, end - spec.count, spec.count, spec.shape)
        for param, spec, end in zip(params, members, ends, strict=True)
    )
    if expect_sparse and len(params) > 1 and any(expect_sparse[param] for param in params):
        raise ValueError(f"a sparse gradient needs a bucket of its own, it is among {list(params)}")
    ((dtype, device),) = keys
    return BucketPlan(slots, dtype, device, bool(expect_sparse and expect_sparse[params[0]]))


def arrival_order(arrived: Iterable[int], count: int) -> list[int]:
    """Return all `count` parameters: by first arrival, then the others in reverse order."""
    # Ranks may get different orders, so a group must use a single rank's order.
    first = dict.fromkeys(arrived)
    first.update(dict.fromkeys(range(count - 1, -1, -1)))
    return list(first)
