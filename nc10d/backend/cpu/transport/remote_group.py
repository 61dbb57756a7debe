"""A group's part beyond this host: its links to the ranks of other hosts, and the agreement on
why it has failed. A group on a single host has none.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import TYPE_CHECKING

import numpy as np

from nc10d.backend.cpu.algorithms.topology import Topology
from nc10d.backend.cpu.engine.channel import Channel, ChannelSpec, Words
from nc10d.backend.cpu.native import offsets as at
from nc10d.backend.cpu.native import prepared_calls as plain
from nc10d.backend.cpu.transport import connect as wiring
from nc10d.backend.cpu.transport.addresses import own_address

if TYPE_CHECKING:
    from nc10d.backend.cpu.context import Context
    from nc10d.backend.cpu.transport.poller import Streams

COLLECTIVES, MESSAGES, PURPOSES = 0, 1, 2


class RemoteGroup:
    """Links of one rank of one group, by rank: one for collectives, one for messages."""

    def __init__(self, host: Context, wires: wiring.Wires, hosts: Topology) -> None:
        self.hosts = hosts
        assert host.abroad is not None, "there are several hosts"
        self._net = net = host.abroad.net
        self._wires = wires
        links = {rank: net.link(rank, pair[COLLECTIVES]) for rank, pair in wires.items()}
        self._messages = {rank: net.link(rank, pair[MESSAGES]) for rank, pair in wires.items()}
        self.streams = net.streams(links, hosts.size)
        self._message_streams: list[tuple[Streams, Words]] = []

    def has(self, rank: int) -> bool:
        """Say whether a rank is on another host."""
        return rank in self._messages

    def message_end(self, peer: int, area: int, *, sending: bool) -> ChannelSpec:
        """Return what my end of the messages to, or from, a rank is made of.

        The header of the next message from there is taken to private memory, where a host mate
        would have put it.
        """
        streams = self._net.streams({0: self._messages[peer]}, 1)
        inbox: Words = np.zeros(at.AWAY_BYTES // 8, np.int64)
        self._message_streams.append((streams, inbox))
        start = plain.address(inbox)
        return ChannelSpec(
            rank=0 if sending else 1,
            size=2,
            area=area,
            counters=(start + at.LINK_SENT, start + at.LINK_TAKEN),
            boards=((start, start), (start, start)),
            kind=at.SENDER if sending else at.RECEIVER,
            streams=streams.address,
        )

    def error(self, channel: Channel) -> str:
        """Say how a link of a channel has failed."""
        streams = (streams for streams, _ in self._message_streams)
        every = {s.address: s for s in (self.streams, *streams)}
        return every[channel.shared.streams].error()

    def close(self) -> None:
        """Leave the other hosts; the channels have been stopped."""
        for pair in self._wires.values():
            for wire in pair:
                with contextlib.suppress(OSError):
                    wire.shutdown(socket.SHUT_RDWR)
        wiring.close(self._wires)

    def disown(self) -> None:
        """Close a forked child's copies of the sockets."""
        wiring.close(self._wires)


if TYPE_CHECKING:
    import socket

    from nc10d.backend.cpu.context import Context
    from nc10d.backend.cpu.transport.poller import Poller
    from nc10d.base.deadline import Deadline
    from nc10d.store.base import Store

_CONTROL = "control lines"


class RemoteHosts:
    """The other hosts, as one rank reaches them."""

    def __init__(self, host: Context, store: Store) -> None:
        self._host = host
        self._lock = threading.Lock()
        self.address = own_address(store)
        self._net: Poller | None = None

    @property
    def net(self) -> Poller:
        """The links' thread; it starts with the first group that needs it."""
        with self._lock:
            if self._net is None:
                from nc10d.backend.cpu.transport.poller import Poller

                self._net = Poller(self._host.process)
            return self._net

    def connect(self, store: Store, deadline: Deadline) -> dict[int, socket.socket]:
        """Connect to all ranks of other hosts; blocks until they all have."""
        number = self._host.number
        away = self._host.topology.away(number)
        place = wiring.MeetingPoint(store, self.address, _CONTROL, number)
        wires = wiring.connect(place, away, 1, deadline, lambda: None)
        return {number: pair[0] for number, pair in wires.items()}

    def close(self) -> None:
        """Join the net thread."""
        if self._net is not None:
            self._net.close()

    def disown(self) -> None:
        """Close a forked child's copies of the descriptors."""
        self._lock = threading.Lock()
        if self._net is not None:
            self._net.disown()
