"""Texts: lists in error messages, and digests."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence


def digest(text: str) -> str:
    """Return 16 letters that differ for different texts, the same in every process."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def join_words(words: Sequence[str]) -> str:
    """Return words as a list in a sentence: "a, b and c"; empty for no words."""
    return ", ".join(words[:-1]) + (" and " if len(words) > 1 else "") + words[-1] if words else ""
