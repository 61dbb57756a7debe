"""Ranks of a host as bits of a word."""

from __future__ import annotations

from collections.abc import Iterable


def mask(ranks: Iterable[int]) -> int:
    """Return ranks of the host as bits of an int64, whose sign is rank 63."""
    bits = sum(1 << rank for rank in ranks)
    return bits - (1 << 64) if bits >> 63 else bits
