"""Shared memory watched by vector clocks, and the reductions by name, in NumPy.

Signals and waits must order two accesses to the same bytes if either is a write, in whichever
interleaving they ran. Otherwise the access raises Race.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from nc10d.backend.cpu.program.program import Kernel
from nc10d.ops.reductions import step_named
from nc10d.testing.reference import own_results, pairwise

Bytes = npt.NDArray[np.uint8]
Clock = list[int]


class Race(AssertionError):
    """Two ranks access the same bytes and no signal orders the accesses."""


class Deadlock(AssertionError):
    """Ranks wait, and no rank can continue."""


class Disagreement(AssertionError):
    """Ranks run different calls, or exchange sizes that differ."""


PAIR: dict[str, Callable[..., object]] = {
    "SUM": np.add,
    "PRODUCT": np.multiply,
    "MIN": np.minimum,
    "MAX": np.maximum,
    "BAND": np.bitwise_and,
    "BOR": np.bitwise_or,
    "BXOR": np.bitwise_xor,
}


@dataclass(slots=True)
class Access:
    """An access to bytes [low, high) of a region by `rank`, at `time` of that rank's clock."""

    low: int
    high: int
    rank: int
    time: int
    write: bool


@dataclass(slots=True)
class Region:
    """Bytes that all ranks can access, with the accesses that may still conflict."""

    name: str
    data: Bytes
    accesses: list[Access] = field(default_factory=list)

    def touch(self, low: int, high: int, rank: int, clock: Clock, *, write: bool) -> None:
        """Record an access; raise Race if an earlier access is not ordered before it."""
        assert 0 <= low <= high <= self.data.size, (self.name, low, high)
        kept = []
        for old in self.accesses:
            meets = old.low < high and low < old.high
            if meets and old.rank != rank and (write or old.write) and old.time > clock[old.rank]:
                raise Race(f"{self.name}[{low}:{high}] by rank {rank} against {old}")
            # An access that this write covers and follows is dropped: any access that races
            # with the old access races with this write, too.
            if not (write and low <= old.low and old.high <= high):
                kept.append(old)
        kept.append(Access(low, high, rank, clock[rank], write))
        self.accesses = kept


def paired(kernel: Kernel, a: npt.NDArray[Any], b: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the result of a kernel with two operands."""
    found = PAIR.get(kernel.kind)
    return pairwise(a, b, step_named(kernel.kind)) if found is None else np.asarray(found(a, b))


def mapped(kernel: Kernel, data: Bytes, arg: float) -> Bytes:
    """Return the result of a kernel with a single operand, as bytes."""
    values = data.copy().view(kernel.dtype.numpy)
    name, _, part = kernel.kind.partition("/")
    if part:
        own = step_named(name).own
        assert own is not None, kernel
        return own_results(own.functions[part], values).view(np.uint8)
    if kernel.kind == "SCALE":
        return np.asarray(values * values.dtype.type(arg)).view(np.uint8)
    assert kernel.kind == "DIVIDE", kernel
    exact = np.trunc(values / arg).astype(values.dtype)
    result = exact if values.dtype.kind in "iu" else values / values.dtype.type(arg)
    return np.asarray(result, values.dtype).view(np.uint8)
