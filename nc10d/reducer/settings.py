"""The user's options for a Reducer, and the marks that a pass expects because of them.

Contract: pure. ReducerOptions are the user's; Settings are the same after their checks. All ranks
must have the same options; they compare `numbers`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict
from zlib import crc32

from nc10d.reducer.plan import (
    BUCKET_BYTES,
    FIRST_BUCKET_BYTES,
    ReducePlan,
    Spec,
    lay_out,
    plan_buckets,
)


class ReducerOptions(TypedDict, total=False):
    """A Reducer's keywords about its buckets and passes, with the same values on all ranks.

        options: ReducerOptions = {"cap_bytes": 1 << 20, "static_graph": True}
        reducer = Reducer(params, group, **options)

    An option that is left out has its default.
    """

    names: Sequence[str] | None
    """A name per parameter, for errors."""
    cap_bytes: int
    """A bucket's approximate size (25 MiB)."""
    first_bytes: int
    """The first bucket's approximate size (1 MiB)."""
    size_limits: Sequence[int] | None
    """Each bucket's size, in place of both; the last repeats."""
    bucket_indices: Sequence[Sequence[int]] | None
    """Each bucket's parameters, in launch order, for all passes."""
    delayed: Sequence[int]
    """Parameters that share a bucket per dtype and device, which is launched late."""
    delayed_until: int | None
    """The parameter after whose bucket `delayed` parameters are launched; None: after all."""
    expect_sparse: Sequence[bool] | None
    """Whether each parameter has SparseGradients, also in hooks."""
    find_unused_parameters: bool
    """Whether a pass may declare gradients unused; one that no rank has used stays unchanged."""
    skip_unused_buckets: bool
    """Whether a bucket without used gradients is not reduced: ranks use the same parameters."""
    static_graph: bool
    """Whether all passes mark each gradient as often as the first pass, which counts."""
    delay_all_reduce: bool
    """Whether `finish` launches all buckets."""
    ordered: bool
    """Whether dense buckets fold rank 0, 1, 2, ... in turn on every backend (ReduceOp.ordered)."""
    leaves: int
    """A step's number of leaves, each the gradients of a pass: see `Reducer`; 0: none."""


@dataclass(frozen=True, slots=True)
class Settings:
    """A Reducer's options for `names`, one for each parameter."""

    names: tuple[str, ...]
    limits: tuple[int, ...]
    find_unused: bool
    static: bool
    delay: bool
    sparse: tuple[bool, ...]
    buckets: tuple[tuple[int, ...], ...] | None
    delayed: tuple[int, ...]
    delayed_until: int | None
    skip_unused: bool
    ordered: bool
    leaves: int

    @classmethod
    def of(cls, count: int, options: ReducerOptions) -> Settings:
        """Return the settings for `count` parameters; ValueError for options that do not fit them.

        TypeError for an unknown option.
        """
        unknown = options.keys() - ReducerOptions.__annotations__.keys()
        if unknown:
            raise TypeError(f"a Reducer has no option {min(unknown)!r}")
        first = options.get("first_bytes", FIRST_BUCKET_BYTES)
        limits = options.get("size_limits") or (first, options.get("cap_bytes", BUCKET_BYTES))
        buckets = options.get("bucket_indices")
        sparse = checked_sparse(options.get("expect_sparse"), count)
        leaves, skips = options.get("leaves", 0), options.get("skip_unused_buckets", False)
        if leaves and (skips or any(sparse)):
            what = "skip_unused_buckets" if skips else "sparse gradients"
            raise ValueError(f"a Reducer with leaves takes no {what}")
        return cls(
            checked_names(options.get("names"), count),
            tuple(limits),
            options.get("find_unused_parameters", False),
            options.get("static_graph", False),
            options.get("delay_all_reduce", False),
            sparse,
            None if buckets is None else tuple(tuple(params) for params in buckets),
            checked_indices(options.get("delayed", ()), count, "delayed"),
            options.get("delayed_until"),
            skips,
            options.get("ordered", False),
            leaves,
        )

    def numbers(self) -> dict[str, int]:
        """Return the options that must be the same on all ranks, by their names in errors."""
        return {
            "caps of buckets in bytes": self.limits[-1],
            "caps of the first bucket in bytes": self.limits[0],
            "lists of size_limits": _digest(self.limits),
            "lists of bucket_indices": _digest(self.buckets),
            "lists of delayed parameters": _digest((self.delayed, self.delayed_until)),
            "settings of skip_unused_buckets": self.skip_unused,
            "settings of find_unused_parameters": self.find_unused,
            "settings of static_graph": self.static,
            "settings of ordered": self.ordered,
            "numbers of leaves": self.leaves,
            "parameters with sparse gradients": crc32(bytes(self.sparse)),
        }

    @property
    def cap_bytes(self) -> int:
        """The largest bucket limit in bytes."""
        return max(self.limits)

    def plan(self, specs: Sequence[Spec], order: Sequence[int] | None) -> ReducePlan:
        """Return the plan for these parameters, in arrival order if that is known."""
        if self.buckets is not None:
            return lay_out(specs, self.buckets, self.sparse)
        return plan_buckets(
            specs,
            self.limits,
            self.sparse,
            order,
            delayed=self.delayed,
            delayed_until=self.delayed_until,
        )

    @property
    def varies(self) -> bool:
        """Whether passes may use different parameters."""
        return self.find_unused and not self.static

    def marks(self, unused: frozenset[int], first: Sequence[int] | None) -> Sequence[int] | None:
        """Return how often a pass marks each parameter.

        With a static graph these are the counts of the `first` pass, None if that has not ended.
        ValueError for indices in `unused` that are no parameters, or if `find_unused` is off.
        """
        if self.static:
            return first
        if not unused:
            return (1,) * len(self.names)
        if not self.find_unused:
            raise ValueError("unused gradients need a Reducer with find_unused_parameters=True")
        if not unused <= frozenset(range(len(self.names))):
            raise ValueError(f"unused must be parameters' indices, got {sorted(unused)}")
        return [int(param not in unused) for param in range(len(self.names))]


def checked_names(names: Sequence[str] | None, count: int) -> tuple[str, ...]:
    """Return the names, or "parameter 0" and so on; ValueError if their number is wrong."""
    if names is None:
        return tuple(f"parameter {index}" for index in range(count))
    if len(names) != count:
        raise ValueError(f"there are {len(names)} names for {count} parameters")
    return tuple(names)


def checked_sparse(sparse: Sequence[bool] | None, count: int) -> tuple[bool, ...]:
    """Return whether each gradient is sparse, none if empty; ValueError for a wrong number."""
    if not sparse:
        return (False,) * count
    if len(sparse) != count:
        raise ValueError(f"expect_sparse has {len(sparse)} entries for {count} parameters")
    return tuple(map(bool, sparse))


def checked_indices(given: Sequence[int], count: int, name: str) -> tuple[int, ...]:
    """Return parameters' indices; ValueError if an index is out of range or there twice."""
    found = tuple(given)
    if len(set(found)) != len(found) or not set(found) <= set(range(count)):
        raise ValueError(f"{name} must be indices of {count} parameters, each once: {list(found)}")
    return found


def _digest(value: object) -> int:
    return crc32(repr(value).encode())
