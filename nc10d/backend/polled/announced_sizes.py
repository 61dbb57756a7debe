"""Sizes that only a sender and its receiver know: ranks exchange them, and compare."""

from __future__ import annotations

from collections.abc import Sequence

from nc10d import ops
from nc10d.errors import CollectiveMismatch
from nc10d.ops.facts import name_of


def raise_if_sizes_differ(
    op: ops.Op, first: int, rank: int, sizes: Sequence[Sequence[int]], size: int
) -> None:
    """Raise on all ranks if `first`, the lowest rank that expects other sizes, is one of the group.

    `sizes` are those that this rank sends, takes, and is sent.
    """
    if first < size:
        name = name_of(op)
        text = f"{name}: rank {first} expects other sizes than its peers send"
        sends, takes, coming = map(list, sizes)
        detail = f" (it sends {sends}, takes {takes}, and is sent {coming})"
        raise CollectiveMismatch(text + detail * (first == rank), rank=first, op=name)
