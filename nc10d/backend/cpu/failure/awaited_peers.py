"""The peers on which waits of a group depend: the peer that a channel awaits, peers that left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nc10d.backend.cpu.control.group_control import GroupControl
from nc10d.backend.cpu.engine.channel import Channel
from nc10d.backend.cpu.memory.group_memory import GroupMemory
from nc10d.backend.cpu.native import entry_points
from nc10d.backend.cpu.native import offsets as at
from nc10d.backend.cpu.transport.links import Links
from nc10d.backend.cpu.transport.remote_group import RemoteGroup


@dataclass(frozen=True, slots=True)
class AwaitedPeers:
    """Answers for a group on this rank; ranks are the group's. Stops no channel, takes no lock."""

    memory: GroupMemory
    links: Links
    remote: RemoteGroup | None
    control: GroupControl

    def rank_of(self, blocked_on: int) -> int:
        """Return the rank for the engine's C_BLOCKED_ON."""
        # The engine gives a local peer by its index, a rank on another host as ~rank.
        return ~blocked_on if blocked_on < 0 else self.memory.group_ranks[blocked_on]

    def awaited(self, channel: Channel) -> int | None:
        """Return the peer that a channel has waited for last; None for none, or a gate."""
        if channel.get(at.C_BLOCKED_AT) == 0:
            return None
        if channel.spec.kind == at.COLLECTIVE:
            peer = self.rank_of(channel.get(at.C_BLOCKED_ON))
            return None if peer == self.memory.group_rank else peer  # a local dependency
        return self.links.peer_of(channel)

    def is_waiting(self, channel: Channel) -> bool:
        """Return whether the counter on which a channel was blocked last is still too small."""
        counter = channel.get(at.C_BLOCKED_AT)
        value = entry_points.load_word(counter) if counter else 0
        return bool(counter) and bool(value < channel.get(at.C_BLOCKED_FOR))

    def departed(self, channel: Channel) -> int | None:
        """Return the peer that a channel waits for if that peer has left without doing its part."""
        peer = self.awaited(channel)
        if peer is None or not self.has_closed(peer):
            return None
        if self._is_remote(peer):
            return None  # the last data may be in transit: the connection's end decides
        # In this order: after the last message the channel waits for another, and only `is_over`
        # shows that no receive is under way.
        arrived = not self.is_waiting(channel)
        return None if arrived or channel.is_over() else peer

    def has_closed(self, rank: int) -> bool:
        """Return whether a rank has closed the group."""
        # Remote ranks announce that in a message; local peers show their state in memory.
        if self._is_remote(rank):
            return rank in self.control.left
        return self.memory.state(self.memory.group_ranks.index(rank)) == at.CLOSED

    def have_left(self, peers: Sequence[int]) -> bool:
        """Return whether all `peers` have closed the group; False for a group across hosts."""
        # Between hosts a closed rank's messages may be in transit.
        return self.remote is None and bool(peers) and all(map(self.has_closed, peers))

    def _is_remote(self, rank: int) -> bool:
        return self.remote is not None and self.remote.has(rank)
