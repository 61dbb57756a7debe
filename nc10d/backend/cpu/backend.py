"""The CPU backend: runs a group's operations by programs on shared memory.

Made when all of a group's ranks have come, it launches (launcher.py), waits (waiter.py), and ends.

What a failure does: whoever learns a cause publishes it (causes.py); every wait of every rank
looks at it in slices of 50 ms at the latest, stops its channels and raises the same error.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from nc10d.backend.base import BackendSetup
from nc10d.backend.cpu.algorithms.group_shape import GroupShape
from nc10d.backend.cpu.algorithms.tuning import DIRECT, Boards, asking, one_shot_bytes
from nc10d.backend.cpu.context import Context
from nc10d.backend.cpu.control.group_control import GroupControl
from nc10d.backend.cpu.engine.call_log import LogEntry
from nc10d.backend.cpu.engine.channel import Channel, ChannelSpec
from nc10d.backend.cpu.failure.error_text import message_in_words
from nc10d.backend.cpu.failure.health import Health
from nc10d.backend.cpu.launcher import OpLauncher
from nc10d.backend.cpu.lowering.program_cache import BatchCache, ProgramCache
from nc10d.backend.cpu.membership.formation import (
    GroupSpec,
    _who,
    check_alive,
    form,
    form_again,
    reach,
    withdraw,
)
from nc10d.backend.cpu.memory.group_memory import GroupMemory
from nc10d.backend.cpu.native import offsets as at
from nc10d.backend.cpu.p2p.mailbox import Mailbox
from nc10d.backend.cpu.transport.links import Links
from nc10d.backend.cpu.transport.remote_group import RemoteGroup
from nc10d.base.deadline import Deadline
from nc10d.errors import DistError, PeerLost
from nc10d.store.arrival import KeyValueBoard
from nc10d.store.base import Store
from nc10d.work import Work

DIRECTIONS = {at.SENDER: "to", at.RECEIVER: "from"}


def make(setup: BackendSetup, host_id: str | None = None) -> CpuBackend:
    """Make the backend of a job's first group; blocks until all of its ranks have come.

    Ranks with the same `host_id` share memory; where it is not given, the kernel tells.
    """
    host = Context(setup.store, setup.rank, setup.size, setup.deadline, host_id)
    name, members = setup.group_name, range(setup.size)

    def check() -> None:
        check_alive(host, name, members)

    try:
        return _made(GroupSpec(host, name, members, setup.rank, setup.store, setup.deadline, check))
    except BaseException:
        host.close()
        raise


def _made(founding: GroupSpec) -> CpuBackend:
    return _joined(founding, form(founding), founding.store)


def _joined(founding: GroupSpec, areas: GroupMemory, board: KeyValueBoard) -> CpuBackend:
    try:
        outside = reach(founding, areas, board)
    except BaseException:
        withdraw(areas)
        raise
    return CpuBackend(areas, founding.name, founding.members, outside)


class CpuBackend(OpLauncher):
    """One group. Methods that block say so."""

    name = "cpu"
    device_type = "cpu"

    def __init__(
        self,
        areas: GroupMemory,
        group_name: str,
        members: Sequence[int],
        outside: RemoteGroup | None,
    ) -> None:
        self.host = host = areas.host
        self.group_name = group_name
        self.members = list(members)
        self.areas = areas
        self.outside = outside
        self.rank = rank = areas.number
        self.size = len(members)
        hosts = None if outside is None else outside.hosts
        small = one_shot_bytes(self.size, roomy=host.roomy and hosts is None)
        sizes = asking(host.boards if hosts is None else Boards.NORMAL)
        self.layout = GroupShape(self.size, rank, areas.half, small, hosts, DIRECT, **sizes)
        self.channel = host.channels.make(self._shared())
        self.links = Links(self.areas, outside)
        self.post = Mailbox(self)
        self.plans = ProgramCache(self.layout, self.channel)
        self.latest = {**self.plans.latest, **self.post.lanes.latest}
        self.batches = BatchCache()
        self._address = self.channel.address
        self.council = GroupControl(group_name, members, rank, host.peers.control, _gone_of(self))
        self.health = Health(
            group_name, self.areas, self.channel, self.links, outside, self.council
        )
        self.ending = threading.RLock()
        self._watched: set[Work] = set()
        host.join(self)

    def _shared(self) -> ChannelSpec:
        mates, areas = range(self.areas.size), self.areas
        even, odd = ([areas.board(mate, half) for mate in mates] for half in (0, 1))
        return ChannelSpec(
            rank=areas.rank,
            size=areas.size,
            area=areas.address(areas.rank),
            counters=[areas.address(mate) for mate in mates],
            boards=(even, odd),
            streams=0 if self.outside is None else self.outside.streams.address,
            reach=areas.reach(mates),
        )

    def on_failure(self, address: int, answer: int) -> None:
        """The worker could not go on with one of my channels: say why to everyone."""
        for channel in (self.channel, *self.links.channels()):
            if channel.address == address:
                self.health.engine_failed(channel, answer)

    def failure(self) -> DistError | None:
        """Return why the group has failed on all its ranks, or None."""
        return self.health.failure()

    def abort(self, reason: BaseException) -> None:
        """Fail the group with `reason` on every rank; the first reason wins."""
        self.health.abort(reason)

    def logged(self) -> list[tuple[LogEntry, str, bool]]:
        """Return what this rank has done last here, oldest first, each in words.

        The third says whether it is a message.

        Calls have numbers in the group, messages on their link.
        """
        channels = {self.channel.label: self.channel}
        channels |= {channel.label: channel for channel in self.links.channels()}
        entries = self.host.log.read(channels)
        return [
            (entry, self._words(channels[entry.label], entry), entry.label != self.channel.label)
            for entry in entries
        ]

    def _words(self, channel: Channel, entry: LogEntry) -> str:
        if channel.shared.kind == at.COLLECTIVE:
            return entry.text
        peer = self.links.peer_of(channel)
        return message_in_words(peer, *entry.message, sending=channel.shared.kind == at.SENDER)

    def waits_for(self) -> int | None:
        """Return the rank that the latest collective waits for right now; None: it doesn't wait."""
        return self.health.waits_for()

    def traffic(self) -> list[tuple[str, int, int, bool]]:
        """Return my ends of all links: "to" or "from", whom, how many messages have begun there.

        And whether this rank waits for its peer in the latest of them.
        """
        found = []
        for channel in self.links.channels():
            peer = self.links.peer_of(channel)
            assert peer is not None, "every channel of the links is an end of one"
            waits = self.health.is_waiting(channel)
            found.append((DIRECTIONS[channel.shared.kind], peer, channel.get(at.C_OPS), waits))
        return found

    def progress(self) -> dict[int, int]:
        """Return the number of the latest collective of each rank of this host."""
        return self.areas.progress()

    @property
    def note(self) -> int:
        """The address of the record in which this rank tells what it began on another device."""
        return self.areas.note

    def whereabouts(self) -> tuple[str, dict[int, int]]:
        """Return what each rank of this host began last: as the end of a message, and numbers."""
        return self.health.whereabouts()

    def allocate(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return registered memory, which goes back when no array refers to it any more."""
        self.health.check()
        return self.host.arena.lend(nbytes)

    def split(
        self,
        ranks: Sequence[int],
        name: str,
        store: Store,
        deadline: Deadline,
        options: Any = None,
    ) -> CpuBackend:
        """Make the backend of a group of some of my ranks; blocks until they all have come."""
        self.health.check()
        members = [self.members[rank] for rank in ranks]

        def check() -> None:
            check_parent(self, name, members)

        rank = list(ranks).index(self.rank)
        return _made(GroupSpec(self.host, name, members, rank, store, deadline, check))

    def gone(self) -> set[int]:
        """Return the ranks that have died, have left, or can't be reached any more."""
        found = set()
        for rank, member in enumerate(self.members):
            lost = self.host.lost([member]) is not None or self.council.lost(rank) is not None
            if lost or (rank != self.rank and self.health.has_left(rank)):
                found.add(rank)
        return found

    def shrink(
        self, ranks: Sequence[int], name: str, store: Store, deadline: Deadline
    ) -> CpuBackend:
        """Make the backend of those of my ranks that are left, which all do so at once.

        As `split`, but of a failed group and without the store: they tell each other.
        """
        members = [self.members[rank] for rank in ranks]

        def check() -> None:
            check_alive(self.host, name, members)

        rank = list(ranks).index(self.rank)
        founding = GroupSpec(self.host, name, members, rank, store, deadline, check)
        return _joined(founding, form_again(founding, self.council), self.council)

    def close(self) -> None:
        """Leave the group; idempotent. What is still in flight fails with GroupClosed."""
        if not self.health.close():
            return
        self.notify()
        for channel in (self.channel, *self.links.channels()):
            self.host.channels.retire(channel)
        self.council.leave(() if self.outside is None else self.outside.hosts.away(self.rank))
        if self.outside is not None:
            self.outside.close()
        withdraw(self.areas, self.links.memory())
        self.host.leave(self)

    def disown(self) -> None:
        """Become unusable in a forked child; what the group owns stays the parent's."""
        self.ending = threading.RLock()
        self.health.disown()
        if self.outside is not None:
            self.outside.disown()

    def __del__(self) -> None:
        health = getattr(self, "health", None)
        if health is not None and not health.closed and os.getpid() == self.host.pid:
            self.close()


def _gone_of(backend: CpuBackend) -> Callable[[], set[int]]:
    """Return its `gone`, which does not keep it: a group that is dropped ends at once."""
    reference = weakref.ref(backend)

    def gone() -> set[int]:
        backend = reference()
        return set() if backend is None else backend.gone()

    return gone


def check_parent(parent: CpuBackend, name: str, members: Sequence[int]) -> None:
    """Raise what keeps a group of some ranks of `parent` from being formed, if anything does."""
    check_alive(parent.host, name, members)
    parent.health.check()
    for rank, member in enumerate(members):
        if parent.health.has_left(parent.members.index(member)):
            message = (
                f"{_who(members, rank)} cannot join the group {name!r}: it has left "
                f"{parent.group_name!r}, from which the group is made"
            )
            raise PeerLost(message, rank=rank, group=name)
