"""Intervals of memory addresses, and tests whether they share bytes.

Contract: pure. An interval is (first address, first address behind it); an empty interval shares no
byte. A use is an interval and whether it is written: two reads of the same memory are no conflict.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

Interval = tuple[int, int]
Use = tuple[Interval, bool]
Words = npt.NDArray[np.int64]


def intersect(a: Interval, b: Interval) -> bool:
    """Return whether two intervals share a byte."""
    return max(a[0], b[0]) < min(a[1], b[1])


def conflict(some: Sequence[Use], others: Sequence[Use]) -> bool:
    """Return whether a use in `some` and a use in `others` share a byte that either writes."""
    return any((a[1] or b[1]) and intersect(a[0], b[0]) for a in some for b in others)


def disjoint(intervals: Iterable[Interval]) -> bool:
    """Return whether no two of many intervals share a byte."""
    last = 0
    for first, behind in sorted(intervals):
        if first < behind:
            if first < last:
                return False
            last = behind
    return True


def columns_disjoint(addresses: Words, nbytes: Words) -> bool:
    """Do as `disjoint` for columns; an empty interval must not lie inside another."""
    order = addresses.argsort()
    starts = addresses[order]
    return bool((starts[1:] - starts[:-1] >= nbytes[order][:-1]).all())
