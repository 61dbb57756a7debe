"""From how many bytes on an algorithm takes which way: all thresholds, in one table."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

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

    cpu_policy.py says how quick boards are on which CPUs. Where they are quick or quickest, that
    the
    kernel writes as well is no reason to ask it sooner.
    """
    return dict(_ASKING[boards])
