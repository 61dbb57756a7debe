"""Which ranks of a group share a host: known alike on all ranks, so that all choose alike.

Hosts are numbered by their lowest rank; on a host, mates are numbered in the order of their ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Topology:
    """The ranks of each host."""

    hosts: tuple[tuple[int, ...], ...]

    @cached_property
    def places(self) -> dict[int, tuple[int, int]]:
        """Each rank's (host, number on the host)."""
        return {
            rank: (host, mate)
            for host, ranks in enumerate(self.hosts)
            for mate, rank in enumerate(ranks)
        }

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return sum(map(len, self.hosts))

    @property
    def rails(self) -> int:
        """How many mates every host has at least."""
        return min(map(len, self.hosts))

    def host_of(self, rank: int) -> int:
        """Return a rank's host."""
        return self.places[rank][0]

    def mates(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of a rank's host, itself included."""
        return self.hosts[self.places[rank][0]]

    def away(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of other hosts."""
        near = self.places[rank][0]
        return tuple(r for host, ranks in enumerate(self.hosts) if host != near for r in ranks)

    def restricted(self, ranks: Sequence[int]) -> Topology:
        """Return the topology of a group of some ranks, numbered as they are listed."""
        return grouped([self.places[rank][0] for rank in ranks])


def grouped(names: Sequence[object]) -> Topology:
    """Return the topology of ranks whose hosts have these names."""
    hosts: dict[object, list[int]] = {}
    for rank, name in enumerate(names):
        hosts.setdefault(name, []).append(rank)
    return Topology(tuple(tuple(ranks) for ranks in hosts.values()))
