"""Lists in error messages."""

from __future__ import annotations

from collections.abc import Sequence


def listing(words: Sequence[str]) -> str:
    """Join words for a sentence."""
    return ", ".join(words[:-1]) + (" and " if len(words) > 1 else "") + words[-1] if words else ""
