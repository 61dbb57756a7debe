"""A fixed binary tree over numbered leaves, whichever ranks hold them.

Contract: pure.

A subtree is a range with 2**k leaves from a multiple of 2**k on. A rank holds a range, and combines
the largest subtrees inside; then all ranks' subtrees are combined. 8 leaves on 3 ranks:

    leaves      0 1 2 | 3 4 5 | 6 7
    subtrees    0-1 2 | 3 4-5 | 6-7

On 1 to 8 ranks, the root is ((0+1)+(2+3))+((4+5)+(6+7)).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

MOST_LEAVES = 1 << 16


def leaves_of(rank: int, size: int, leaves: int) -> range:
    """Return a rank's leaves: shares are as even as possible, and the lower ranks have one more."""
    least, more = divmod(leaves, size)
    first = rank * least + min(rank, more)
    return range(first, first + least + (rank < more))


def join(held: list[range], new: range) -> int:
    """Put a subtree behind those in `held`, and join siblings; return the number of pairs joined.

    Each pair is the last two subtrees, the left one first, as where a binary counter carries.
    """
    pairs = 0
    while held and len(held[-1]) == len(new) and held[-1].start % (2 * len(new)) == 0:
        new = range(held.pop().start, new.stop)
        pairs += 1
    held.append(new)
    return pairs


def subtrees(leaves: Iterable[int]) -> list[range]:
    """Return the largest subtrees in a range, in order."""
    held: list[range] = []
    for leaf in leaves:
        join(held, range(leaf, leaf + 1))
    return held


@dataclass(frozen=True, slots=True)
class LeafTree:
    """The tree over `leaves`, and how the ranks share it.

    `mine` are this rank's leaves, `subtrees` each rank's subtrees. `pairs` combine a list with all
    subtrees, (a, b) in turn: element a becomes a + b. Element 0 is then the root.
    """

    leaves: int
    mine: range
    subtrees: tuple[tuple[range, ...], ...]
    pairs: tuple[tuple[int, int], ...]

    @property
    def count(self) -> int:
        """How many subtrees all ranks have."""
        return len(self.pairs) + 1


@lru_cache(maxsize=None, typed=True)
def leaf_tree(leaves: int, rank: int, size: int) -> LeafTree:
    """Return a rank's view; ValueError unless `leaves` is a power of two, and enough for all ranks.

    TypeError if `leaves` is no int.
    """
    if not isinstance(leaves, int):
        raise TypeError(f"leaves must be an int, got {leaves!r}")
    if not 1 <= leaves <= MOST_LEAVES or leaves & (leaves - 1):
        raise ValueError(f"leaves must be a power of two, at most {MOST_LEAVES}, got {leaves}")
    if leaves < size:
        raise ValueError(f"{leaves} leaves are not enough for {size} ranks: each holds one or more")
    ranges = [leaves_of(r, size, leaves) for r in range(size)]
    by_rank = tuple(tuple(subtrees(each)) for each in ranges)
    pairs: list[tuple[int, int]] = []
    held: list[range] = []
    indices: list[int] = []
    for index, subtree in enumerate(subtree for each in by_rank for subtree in each):
        indices.append(index)
        for _ in range(join(held, subtree)):
            right = indices.pop()
            pairs.append((indices[-1], right))
    return LeafTree(leaves, ranges[rank], by_rank, tuple(pairs))
