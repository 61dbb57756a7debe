"""Cache lines: where chunks are cut."""

from __future__ import annotations

LINE = 64
"""Bytes of a cache line: chunks are cut at its multiples, so that ranks never share one."""


def line_up(nbytes: int) -> int:
    """Round up to whole cache lines."""
    return -(-nbytes // LINE) * LINE


def line_down(nbytes: int) -> int:
    """Round down to whole cache lines."""
    return nbytes // LINE * LINE
