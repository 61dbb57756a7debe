"""A fixed binary tree over numbered leaves, whichever ranks hold them: pure planning.

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
class LeafPlan:
    """A rank's part in the sum over a tree.

    `mine` are the rank's leaves, `parts` each rank's subtrees. `pairs` combine a list with all
    subtrees, (a, b) in turn: element a becomes a + b. Element 0 is then the root.
    """

    leaves: int
    rank: int
    mine: range
    parts: tuple[tuple[range, ...], ...]
    pairs: tuple[tuple[int, int], ...]

    @property
    def most(self) -> int:
        """The most subtrees that a rank has."""
        return max(map(len, self.parts))

    @property
    def total(self) -> int:
        """How many subtrees all ranks have."""
        return sum(map(len, self.parts))


@lru_cache(maxsize=None, typed=True)
def leaf_plan(leaves: int, rank: int, size: int) -> LeafPlan:
    """Return a rank's plan; ValueError unless `leaves` is a power of two, and enough for all ranks.

    TypeError if `leaves` is no int.
    """
    if not isinstance(leaves, int):
        raise TypeError(f"leaves must be an int, got {leaves!r}")
    if leaves < 1 or leaves & (leaves - 1):
        raise ValueError(f"leaves must be a power of two, got {leaves}")
    if leaves < size:
        raise ValueError(f"{leaves} leaves are not enough for {size} ranks: each holds one or more")
    ranges = [leaves_of(r, size, leaves) for r in range(size)]
    parts = tuple(tuple(subtrees(each)) for each in ranges)
    pairs: list[tuple[int, int]] = []
    held: list[range] = []
    places: list[int] = []
    for place, part in enumerate(part for each in parts for part in each):
        places.append(place)
        for _ in range(join(held, part)):
            right = places.pop()
            pairs.append((places[-1], right))
    return LeafPlan(leaves, rank, ranges[rank], parts, tuple(pairs))
