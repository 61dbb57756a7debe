"""Texts: lists and times in error messages, digests, and sizes on command lines."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

RETURNED = "has returned from its function"
"""Part of the text about a rank whose function has ended, while those of other ranks run."""


def digest(text: str) -> str:
    """Return 16 letters that differ for different texts, the same in every process."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def in_seconds(limit: float) -> str:
    """Return a time for a sentence, rounded: "30 s", "0.05 s"; "any time" for math.inf."""
    return "any time" if math.isinf(limit) else f"{round(limit, 1 if limit > 1 else 2):g} s"


def ranks_text(ranks: Sequence[int], most: int = 16) -> str:
    """Return "rank 3" or "ranks 1, 2 and 40 more": the first `most` ranks, and a count.

    Without ranks "a rank": the missing ranks have come while the text was made.
    """
    if not ranks:
        return "a rank"
    more = f" and {len(ranks) - most} more" if len(ranks) > most else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:most]))}{more}"


def members_text(members: Sequence[int], ranks: Sequence[int]) -> str:
    """Return ranks of a group as `ranks_text`, with their global ranks if those differ.

    `members` are the global ranks of the group's ranks.
    """
    numbers = [members[rank] for rank in ranks]
    same = numbers == list(ranks)
    return ranks_text(ranks) if same else f"{ranks_text(ranks)} (global {ranks_text(numbers)})"


def join_words(words: Sequence[str]) -> str:
    """Return words as a list in a sentence: "a, b and c"; empty for no words."""
    return ", ".join(words[:-1]) + (" and " if len(words) > 1 else "") + words[-1] if words else ""


def byte_size(text: str) -> int:
    """Read an option that is a size in bytes: 64, 4K, 16M, 1G; ArgumentTypeError for others."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    unit = units.get(text[-1:].upper(), 1)
    digits = text[:-1] if unit > 1 else text
    if not digits.isdecimal() or int(digits) < 1:
        from argparse import ArgumentTypeError

        raise ArgumentTypeError(f"{text!r} is not a size such as 64, 4K, 16M or 1G")
    return int(digits) * unit
