"""What an algorithm knows of the group: its size, my rank, and how much a board half holds.

Everything here is alike on all ranks except `rank`; that is what lets every rank choose the same
algorithm without asking.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

from nc10d.backend.cpu.algorithms.topology import Topology

LINE = 64
"""Bytes of a cache line: chunks are cut at its multiples, so that ranks never share one."""
NEVER = 1 << 62
DIRECT = 64 * 1024
"""Bytes from which reading a registered array where it lies pays."""
PAGE = 4096
"""Bytes of a page: what peers may write is whole pages, which can be taken back from them."""
ASKED = 4 << 20
"""Bytes from which the kernel is asked to read arrays that are not registered: they fill a cache.

It is slow at fetching lines that their owner has just changed and still has in a cache. Where it
writes as well, two ranks ask sooner. Threads need no kernel, and are treated alike.
"""
FOLDING = 2 << 20
"""Bytes from which a reduce_scatter asks the kernel for what it folds."""
LENDING = 1 << 20
"""Bytes from which an all_reduce of two ranks pays that asks the kernel to write results, too."""
SWAPPED = 512 * 1024
"""Bytes of both together from which two ranks that swap arrays have the kernel write them."""
QUICK_ASKED = 16 << 20
"""Bytes from which two ranks' all_reduce and an all_to_all of more than two ask the kernel where
boards are quick."""
QUICK_EXCHANGED = 32 << 20
"""The same for a reduce_scatter, and for what two ranks swap."""
QUICKEST_ASKED = 8 << 20
"""Bytes from which it is asked to read where boards are quickest."""
QUICKEST_EXCHANGED = 32 << 20
"""The same for what two ranks swap: from boards it goes past the cache, unlike by the kernel."""
WINDOW = 2 << 20
"""Bytes of an array that are folded and fetched at a time: a chunk has left its owner's own cache
when it is fetched."""


class Boards(IntEnum):
    """How quick boards are beside the kernel's copies: the larger may arrays be that take them."""

    NORMAL = 0
    QUICK = 1
    QUICKEST = 2


_ASKING: Mapping[Boards, Mapping[str, int]] = {
    Boards.NORMAL: {},
    Boards.QUICK: {
        **dict.fromkeys(("asked", "reduced", "lending"), QUICK_ASKED),
        **dict.fromkeys(("folding", "exchanged", "swapped"), QUICK_EXCHANGED),
        **dict.fromkeys(("gathered", "spread", "shared"), NEVER),
    },
    Boards.QUICKEST: {
        **dict.fromkeys(("reduced", "lending", "swapped", "shared", "gathered"), NEVER),
        **dict.fromkeys(("asked", "folding", "spread"), QUICKEST_ASKED),
        "exchanged": QUICKEST_EXCHANGED,
    },
}


def one_shot_bytes(ranks: int, *, roomy: bool) -> int:
    """Return up to how many bytes each rank folds everyone's at once; `roomy`: each has a core.

    Two ranks do no more work so than otherwise. Of more each does the work of all, which pays
    where waiting is dear: with shared cores for long (as measured), else not (by the cost model).
    """
    if ranks <= 2:
        return 64 * 1024
    return 4 * 1024 // ranks if roomy else 16 * 1024


def asking(boards: Boards) -> dict[str, int]:
    """Return from how many bytes on the kernel helps with plain arrays, as a Layout's fields.

    cores.py says how quick boards are on which CPUs. Where they are quick or quickest, that the
    kernel writes as well is no reason to ask it sooner.
    """
    return dict(_ASKING[boards])


@dataclass(frozen=True, slots=True)
class Layout:
    """A group's shape: `half` bytes of board for one round, `small` the one-shot limit.

    From `direct` bytes on, registered arrays are read where they lie, from `asked` bytes on all
    that the kernel can read; for an all_reduce that is from `reduced` bytes on, for an all_gather
    from `gathered`, for a broadcast from `spread`, for a reduce_scatter from `folding`, for a swap
    of two ranks (all_gather, all_to_all) from `exchanged`. Of two ranks, if the kernel also writes,
    an all_reduce begins at `lending` bytes, a swap at `swapped`, a broadcast at `shared`. An
    all_reduce goes `window` by window. What is lent is whole pages of `page` bytes.
    `hosts` says who is where in a group that spans hosts; it is None for one on a single host.
    """

    size: int
    rank: int
    half: int
    small: int
    hosts: Topology | None = None
    direct: int = NEVER
    asked: int = ASKED
    reduced: int = ASKED
    gathered: int = ASKED
    spread: int = ASKED
    exchanged: int = ASKED
    folding: int = FOLDING
    lending: int = LENDING
    swapped: int = SWAPPED
    shared: int = DIRECT
    window: int = WINDOW
    page: int = PAGE

    @property
    def near(self) -> Layout:
        """The shape of this rank's host alone."""
        if self.hosts is None:
            return self
        mates = self.hosts.mates(self.rank)
        return Layout(len(mates), mates.index(self.rank), self.half, self.small)

    @property
    def others(self) -> list[int]:
        """The other ranks, beginning with my right neighbour: nobody starts at the same one."""
        return [(self.rank + i) % self.size for i in range(1, self.size)]


def line_up(nbytes: int) -> int:
    """Round up to whole cache lines."""
    return -(-nbytes // LINE) * LINE


def line_down(nbytes: int) -> int:
    """Round down to whole cache lines."""
    return nbytes // LINE * LINE
