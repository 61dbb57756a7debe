"""A group as the algorithms see it: size, rank, hosts, staging buffers and size thresholds.

All values except the rank itself are equal on all of the group's ranks. Therefore all ranks choose
the same algorithm without communication. Messages have their sizes in transport/links.py, groups
across hosts in hosts_reduce.py.

Arrays that nc10d allocated (registered arrays) lie in shared memory: from DIRECT bytes on, local
peers access them in place on every CPU. Plain arrays are reached through the kernel
(process_vm_readv, process_vm_writev). Whether that is faster than the staging buffers depends on
the CPU, so each rank publishes two thresholds and a host's ranks agree on the smallest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from nc10d.backend.cpu.native.offsets import PAGE

NEVER = 1 << 62
"""A threshold that no array reaches."""
DIRECT = 64 * 1024
"""Bytes from which peers read a registered array in place."""
BROADCAST_SHARE = 16
"""A two-rank broadcast writes from `write_from` / BROADCAST_SHARE bytes on: nothing is reduced."""
WINDOW = 2 << 20
"""Bytes of an array that are reduced and fetched at a time.

Such a window's chunk has left its owner's private cache when peers fetch it.
"""


@dataclass(frozen=True, slots=True)
class Thresholds:
    """From how many bytes on the kernel moves plain arrays between two ranks of a host."""

    # The kernel is slow at cache lines that another core has just written, so the staging buffers
    # win for arrays that fit in a cache. From `read_from` bytes on, reading alone beats staging.
    # Two ranks that also write into each other's arrays beat staging earlier, from `write_from`
    # bytes on.

    read_from: int = 4 << 20
    write_from: int = 1 << 20


DEFAULTS = Thresholds()
"""The thresholds for CPUs that cpu_policy.py does not list, and for groups across hosts."""


@dataclass(frozen=True)
class Topology:
    """Each host's ranks, in ascending order; hosts are ordered by their lowest rank."""

    hosts: tuple[tuple[int, ...], ...]

    @cached_property
    def places(self) -> dict[int, tuple[int, int]]:
        """Each rank's host, and its local rank on that host."""
        return {
            rank: (host, local_rank)
            for host, ranks in enumerate(self.hosts)
            for local_rank, rank in enumerate(ranks)
        }

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return sum(map(len, self.hosts))

    def host_of(self, rank: int) -> int:
        """Return a rank's host."""
        return self.places[rank][0]

    def local_ranks(self, rank: int) -> tuple[int, ...]:
        """Return the ranks on a rank's host, itself included."""
        return self.hosts[self.places[rank][0]]

    def remote_ranks(self, rank: int) -> tuple[int, ...]:
        """Return the ranks on the other hosts."""
        own = self.places[rank][0]
        return tuple(r for host, ranks in enumerate(self.hosts) if host != own for r in ranks)

    def restricted(self, ranks: Sequence[int]) -> Topology:
        """Return a subgroup's topology, whose ranks are numbered in the order of `ranks`."""
        return grouped([self.places[rank][0] for rank in ranks])


def grouped(names: Sequence[object]) -> Topology:
    """Return the topology for ranks whose hosts have these names."""
    hosts: dict[object, list[int]] = {}
    for rank, name in enumerate(names):
        hosts.setdefault(name, []).append(rank)
    return Topology(tuple(tuple(ranks) for ranks in hosts.values()))


def one_shot_bytes(ranks: int, *, oversubscribed: bool) -> int:
    """Return the largest array in bytes that every rank reduces completely by itself."""
    # For two ranks this is no more work than sharing the reduction. More ranks repeat the whole
    # work on each rank, which pays where a barrier is slow: up to larger sizes if the ranks share
    # cores (measured), else up to 4 KiB from all ranks together (computed).
    if ranks <= 2:
        return 64 * 1024
    return 16 * 1024 if oversubscribed else 4 * 1024 // ranks


@dataclass(frozen=True, slots=True)
class GroupShape:
    """A group's shape.

    A rank's staging buffer has two slots of `slot_bytes` each, which alternate from round to round.
    An all_reduce of up to `one_shot` bytes takes a single round. Peers access registered arrays
    in place from `direct` bytes on, and plain arrays through the kernel from the `thresholds` on.
    In place, an all_reduce proceeds by windows of at least `window` bytes; over staging buffers,
    their size determines the windows. Ranks expose whole pages of `page` bytes for writing, so that
    they can withdraw them.
    `hosts` is None if all ranks are on the same host.
    """

    size: int
    rank: int
    slot_bytes: int
    one_shot: int
    hosts: Topology | None = None
    direct: int = NEVER
    thresholds: Thresholds = DEFAULTS
    window: int = WINDOW
    page: int = PAGE

    @property
    def local(self) -> GroupShape:
        """The shape of this rank's host alone; its ranks are local ranks."""
        if self.hosts is None:
            return self
        ranks = self.hosts.local_ranks(self.rank)
        # `direct` stays NEVER: hosts_peer_arrays.py adds access in place around the whole program.
        return GroupShape(len(ranks), ranks.index(self.rank), self.slot_bytes, self.one_shot)

    @property
    def peers(self) -> list[int]:
        """The other ranks, beginning with the next: so ranks do not all copy from the same peer."""
        return [(self.rank + i) % self.size for i in range(1, self.size)]


@dataclass(frozen=True, slots=True)
class Span:
    """A group across hosts, from the view of a rank on `host`; `local` is that host's shape."""

    shape: GroupShape
    hosts: tuple[tuple[int, ...], ...]
    host: int
    local: GroupShape

    @property
    def local_rank(self) -> int:
        """This rank's number on its host."""
        return self.local.rank

    @property
    def away(self) -> list[int]:
        """The other hosts, beginning with the next."""
        count = len(self.hosts)
        return [(self.host + i) % count for i in range(1, count)]

    def leader(self, host: int) -> int:
        """Return the rank that exchanges headers and small arrays for a host."""
        return self.hosts[host][0]


def span_of(shape: GroupShape) -> Span:
    """Return this rank's view of a group across hosts."""
    assert shape.hosts is not None, shape
    host = shape.hosts.host_of(shape.rank)
    return Span(shape, shape.hosts.hosts, host, shape.local)
