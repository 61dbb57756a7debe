"""What an algorithm knows of the group: its size, my rank, and how much a board half holds.

Everything here is alike on all ranks except `rank`; that is what lets every rank choose the same
algorithm without asking.
"""

from __future__ import annotations

from dataclasses import dataclass

from nc10d.backend.cpu.algorithms.topology import Topology
from nc10d.backend.cpu.algorithms.tuning import (
    ASKED,
    DIRECT,
    FOLDING,
    LENDING,
    NEVER,
    PAGE,
    SWAPPED,
    WINDOW,
)


@dataclass(frozen=True, slots=True)
class GroupShape:
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
    def near(self) -> GroupShape:
        """The shape of this rank's host alone."""
        if self.hosts is None:
            return self
        mates = self.hosts.mates(self.rank)
        return GroupShape(len(mates), mates.index(self.rank), self.half, self.small)

    @property
    def others(self) -> list[int]:
        """The other ranks, beginning with my right neighbour: nobody starts at the same one."""
        return [(self.rank + i) % self.size for i in range(1, self.size)]
