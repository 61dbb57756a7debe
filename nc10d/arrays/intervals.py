"""Spans of memory, and which of them share bytes.

Contract: pure. A span is (the first address, the first behind it); one without bytes shares none. A
use is a span and whether it may be written: what two only read may be the same memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

Span = tuple[int, int]
Use = tuple[Span, bool]
Words = npt.NDArray[np.int64]


def meet(one: Span, other: Span) -> bool:
    """Say whether two spans share a byte."""
    return max(one[0], other[0]) < min(one[1], other[1])


def clash(some: Sequence[Use], others: Sequence[Use]) -> bool:
    """Say whether some use of the ones writes what one of the others uses, or the reverse."""
    return any((a[1] or b[1]) and meet(a[0], b[0]) for a in some for b in others)


def apart(spans: Iterable[Span]) -> bool:
    """Say whether no two of many spans share a byte."""
    last = 0
    for first, behind in sorted(spans):
        if first < behind:
            if first < last:
                return False
            last = behind
    return True


def all_apart(addresses: Words, nbytes: Words) -> bool:
    """Do as `apart` for spans in columns; one without bytes must not lie inside another."""
    order = addresses.argsort()
    starts = addresses[order]
    return bool((starts[1:] - starts[:-1] >= nbytes[order][:-1]).all())
