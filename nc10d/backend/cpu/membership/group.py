"""A group as this rank sees it: members, memory, channel, links, health."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Sequence

from nc10d.backend.cpu.context import Context, ContextGroup
from nc10d.backend.cpu.control.connections import Message
from nc10d.backend.cpu.control.group_control import GroupControl
from nc10d.backend.cpu.engine.channel import Channel, ChannelSpec
from nc10d.backend.cpu.failure.awaited_peers import AwaitedPeers
from nc10d.backend.cpu.failure.error_text import GroupErrors
from nc10d.backend.cpu.failure.health import Health
from nc10d.backend.cpu.membership.formation import give_back
from nc10d.backend.cpu.memory.group_memory import GroupMemory
from nc10d.backend.cpu.native import entry_points
from nc10d.backend.cpu.transport.links import Links
from nc10d.backend.cpu.transport.remote_group import RemoteGroup
from nc10d.backend.shared_board import PeerBoard, SharedBoard
from nc10d.base.text import digest


class Group:
    """A group on this rank; `members` are ranks in the job, `rank` is this rank's index there."""

    # `remote` is None where all members are on this host. A group belongs to its users, a backend
    # and pending Works, and leaves when the last owner is dropped.

    def __init__(
        self,
        context: Context,
        memory: GroupMemory,
        name: str,
        members: Sequence[int],
        remote: RemoteGroup | None,
    ) -> None:
        self.context, self.memory, self.remote = context, memory, remote
        self.name = name
        # Groups with one name and different members are different groups.
        self.key = f"{name} of {digest(repr([*members]))}"
        self.members: Sequence[int] = list(members)
        self.rank, self.size = memory.group_rank, len(members)
        self.channel = context.channels.make(_spec(memory, remote))
        free = context.arena.free
        self.links = Links(memory, context.channels, context.allocate, free, remote)
        wires = context.router.control
        self.control = GroupControl(self.key, members, self.rank, wires, _gone_of(self))
        peers = AwaitedPeers(memory, self.links, remote, self.control)
        text = GroupErrors(
            context, name, memory, self.channel, self.links, remote, self.control, peers
        )
        self.boards: list[int] = []
        """The boards' offsets in this rank's arena."""
        self.health = Health(text, self.control)
        self._leaving = GroupExit(self)
        self._at_drop = AtDrop(self._leaving), AtDrop(self._leaving)
        context.join(self, self._leaving.reference)

    def channels(self) -> list[Channel]:
        """Return the collectives' channel, and all links' channels."""
        return [self.channel, *self.links.channels()]

    def gone(self) -> set[int]:
        """Return the ranks that have died, have left, or can't be reached any more."""
        found = set()
        for rank, member in enumerate(self.members):
            lost = self.context.lost([member]) is not None or self.control.lost(rank) is not None
            if lost or (rank != self.rank and self.health.peers.has_closed(rank)):
                found.add(rank)
        return found

    def share_board(self, nbytes: int) -> SharedBoard:
        """Allocate this rank's board; MemoryError if no shared memory is left."""
        memory = self.memory
        offset = self.context.allocate(nbytes)
        self.boards.append(offset)
        entry_points.compare_and_swap(memory.board_word(memory.rank), 0, offset + 1)
        peers = tuple(
            PeerBoard(rank, memory.board_word(peer), memory.arena_base(peer))
            for peer, rank in enumerate(memory.group_ranks)
            if peer != memory.rank
        )
        return SharedBoard(memory.arena_base(memory.rank) + offset, peers, self._partners())

    def _partners(self) -> tuple[int, ...]:
        """Return a rank on each other host, such that a host's ranks share them evenly."""
        if self.remote is None:
            return ()
        hosts = self.remote.hosts
        own, place = hosts.places[self.rank]
        others = (ranks for host, ranks in enumerate(hosts.hosts) if host != own)
        return tuple(ranks[place % len(ranks)] for ranks in others)

    # -- as a ControlledGroup ------------------------------------------------------------------

    def on_death(self, number: int) -> None:
        """Fail the group if the job's rank `number`, which has died on this host, is a member."""
        self.health.on_death(number)

    def on_lost(self, number: int, reason: str) -> None:
        """Fail the group if the job's rank `number` is a member on another host."""
        if number in self.members:
            self.control.notify()
            if number not in self.context.near:
                self.health.on_lost(self.members.index(number), reason)

    def on_engine_failure(self, address: int, answer: int) -> None:
        """Turn the engine's answer for one of the group's channels into the group's failure."""
        for channel in self.channels():
            if channel.address == address:
                self.health.engine_failed(channel, answer)

    def on_message(self, number: int, message: Message) -> None:
        """Process a member's control message."""
        if number in self.members:
            self.control.on_message(self.members.index(number), message["kind"], message)

    def overdue(self) -> float | None:
        """Let overdue consensus go on; return the seconds until the next look, or None."""
        return self.control.overdue()

    # -- ending --------------------------------------------------------------------------------

    def leave(self) -> None:
        """Announce that this rank has left; give back memory and sockets. `health` is closed."""
        self._leaving.leave()

    def disown(self) -> None:
        """Become unusable in a forked child; the parent keeps memory and sockets."""
        self.health.disown()
        if self.remote is not None:
            self.remote.disown()


class GroupExit:
    """How this rank leaves a group, without a reference to the group.

    A signal's handler may raise in the middle. A repeated call does the rest; dropping the group
    makes that call.
    """

    def __init__(self, group: Group) -> None:
        self._context, self._memory, self._remote = group.context, group.memory, group.remote
        self._channel, self._links, self._boards = group.channel, group.links, group.boards
        self._control, self._health = group.control, group.health
        self.key = group.key
        self.reference: weakref.ref[ContextGroup] = weakref.ref(group)
        self._over = False

    def leave(self) -> None:
        """Announce that this rank has left; give back memory and sockets. `health` is closed."""
        if self._over:
            return
        for channel in (self._channel, *self._links.channels()):
            self._context.channels.retire(channel)
        # Before the sockets close: a peer whose socket ends looks for this announcement.
        remote = self._remote
        away = () if remote is None else remote.hosts.remote_ranks(self._memory.group_rank)
        self._control.leave(away, self._health.why_closed)
        if remote is not None:
            remote.close()
        give_back(self._context, self._memory, [*self._links.owned, *self._boards])
        self._context.leave(self.key, self.reference)
        self._over = True

    def drop(self) -> None:
        """Leave, unless this rank has left before, or a forked child has inherited the group."""
        # A group that has left takes no lock here, which another thread may hold.
        if not self._over and os.getpid() == self._context.pid:
            self._health.close()
            self.leave()


class AtDrop:
    """Calls `drop` of a group's exit when the last reference to this object is gone."""

    # A group holds two such objects. A signal handler's error may come as a finalizer begins.
    # Python drops the error, and skips the rest of that finalizer. The second object's finalizer
    # then does the work.

    __slots__ = ("_leaving",)

    def __init__(self, leaving: GroupExit) -> None:
        self._leaving = leaving

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        leaving = getattr(self, "_leaving", None)  # None after such an error in __init__
        if leaving is not None and not ending():
            leaving.drop()


def _spec(memory: GroupMemory, remote: RemoteGroup | None) -> ChannelSpec:
    """Return the spec for the channel of a group's collectives."""
    peers = range(memory.size)
    even, odd = ([memory.slot(peer, slot) for peer in peers] for slot in (0, 1))
    return ChannelSpec(
        rank=memory.rank,
        size=memory.size,
        area=memory.address(memory.rank),
        counters=[memory.address(peer) for peer in peers],
        slots=(even, odd),
        streams=0 if remote is None else remote.streams.address,
        peer_access=memory.peer_access(peers),
    )


def _gone_of(group: Group) -> Callable[[], set[int]]:
    """Return `group.gone` as a function that does not keep the group alive."""
    reference = weakref.ref(group)

    def gone() -> set[int]:
        group = reference()
        return set() if group is None else group.gone()

    return gone
