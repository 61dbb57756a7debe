"""Texts: lists in error messages, and digests."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence


def digest(text: str) -> str:
    """Return 16 letters that differ for different texts, the same in every process."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def in_seconds(limit: float) -> str:
    """Return a time as text for an error: 4.99994 as "5 s", math.inf as "any time"."""
    if math.isinf(limit):
        return "any time"
    return f"{limit:.3g} s" if limit < 100 else f"{limit:.0f} s"


def join_words(words: Sequence[str]) -> str:
    """Return words as a list in a sentence: "a, b and c"; empty for no words."""
    return ", ".join(words[:-1]) + (" and " if len(words) > 1 else "") + words[-1] if words else ""
