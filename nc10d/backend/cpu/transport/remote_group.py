"""Ranks on other hosts: the process's address and poller, and a group's connections to them.

A group on a single host has no RemoteGroup.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import TYPE_CHECKING

import numpy as np

from nc10d.backend.cpu.algorithms.group_shape import Topology
from nc10d.backend.cpu.engine.channel import Channel, ChannelSpec, Words
from nc10d.backend.cpu.native import offsets as at
from nc10d.backend.cpu.native import prepared_calls as plain
from nc10d.backend.cpu.transport.addresses import own_address
from nc10d.backend.cpu.transport.connect import EndpointExchange, PeerSockets, close_all, connect
from nc10d.base.deadline import Deadline
from nc10d.base.run_to_end import import_to_end, off_main
from nc10d.store.base import Store

if TYPE_CHECKING:
    from nc10d.backend.cpu.transport.poller import Poller, Streams

COLLECTIVES, MESSAGES, PURPOSES = 0, 1, 2
"""A group's two connections to each rank on another host, and their number."""
_CONTROL = "control connections"


class RemoteGroup:
    """A rank's connections in a group, by peer."""

    # Each remote rank has a connection for collectives and another for messages: a message that
    # waits for its receiver must not block a collective.

    def __init__(self, poller: Poller, sockets: PeerSockets, hosts: Topology) -> None:
        self.hosts = hosts
        self._poller = poller
        self._sockets = sockets
        links = {rank: poller.wire(rank, pair[COLLECTIVES]) for rank, pair in sockets.items()}
        self._messages = {rank: poller.wire(rank, pair[MESSAGES]) for rank, pair in sockets.items()}
        self.streams = poller.streams(links, hosts.size)
        self._message_streams: list[tuple[Streams, Words]] = []

    def has(self, rank: int) -> bool:
        """Return whether a rank is on another host."""
        return rank in self._messages

    def message_end(self, peer: int, area: int, *, sending: bool) -> ChannelSpec:
        """Return the spec for this rank's end of the message link to, or from, `peer`."""
        # The header of the next message from a remote peer is written to private memory; a local
        # peer would write the header to the link's shared memory.
        streams = self._poller.streams({0: self._messages[peer]}, 1)
        inbox: Words = np.zeros(at.AWAY_BYTES // 8, np.int64)
        # Kept alive here: the channel holds only their addresses.
        self._message_streams.append((streams, inbox))
        start = plain.address(inbox)
        return ChannelSpec(
            rank=0 if sending else 1,
            size=2,
            area=area,
            counters=(start + at.LINK_SENT, start + at.LINK_TAKEN),
            slots=((start, start), (start, start)),
            kind=at.SENDER if sending else at.RECEIVER,
            streams=streams.address,
            cells=at.AWAY_CELLS,
        )

    def error(self, channel: Channel) -> str:
        """Return why a channel's connection has failed, as text."""
        streams = (streams for streams, _ in self._message_streams)
        by_address = {s.address: s for s in (self.streams, *streams)}
        return by_address[channel.spec.streams].error()

    @off_main
    def close(self) -> None:
        """Shut the connections down and close them; the channels have been stopped before."""
        for pair in self._sockets.values():
            for wire in pair:
                # Shut down first: a forked child may hold copies, which keep a closed socket open.
                with contextlib.suppress(OSError):
                    wire.shutdown(socket.SHUT_RDWR)
        close_all(self._sockets)

    def disown(self) -> None:
        """Close a forked child's copies of the sockets."""
        # No shutdown: that would end the parent's connections, too.
        close_all(self._sockets)


class RemoteHosts:
    """The other hosts as rank `number`'s process reaches them."""

    # `topology` is the job's; `rank_block` is the address of the words that the engine and all
    # of this rank's threads share.

    def __init__(self, number: int, topology: Topology, rank_block: int, store: Store) -> None:
        self._number, self._topology, self._rank_block = number, topology, rank_block
        self._lock = threading.Lock()
        self.address = own_address(store)
        self._poller: Poller | None = None

    @property
    def poller(self) -> Poller:
        """The poller of all connections; the thread starts with the first group that needs it."""
        with self._lock:
            if self._poller is None:
                # Imported late: it compiles functions that a job on a single host does without.
                poller = import_to_end("nc10d.backend.cpu.transport.poller")
                self._poller = poller.Poller(self._rank_block)
            return self._poller

    def connect(self, store: Store, deadline: Deadline) -> dict[int, socket.socket]:
        """Make the control connections to all ranks on other hosts; blocks until all are made."""
        peers = self._topology.remote_ranks(self._number)
        # Ranks that have read other hosts for each other in the store don't connect.
        terms = f" {self._topology.hosts}"
        endpoints = EndpointExchange(store, self.address, _CONTROL, self._number, terms)
        sockets = connect(endpoints, peers, 1, deadline, lambda: None)
        return {number: pair[0] for number, pair in sockets.items()}

    def close(self) -> None:
        """Join the poller's thread."""
        if self._poller is not None:
            self._poller.close()

    def disown(self) -> None:
        """Close a forked child's copies of the descriptors."""
        # Another thread in the parent may have held the lock during the fork.
        self._lock = threading.Lock()
        if self._poller is not None:
            self._poller.disown()
