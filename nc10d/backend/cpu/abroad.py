"""What all groups of one rank share beyond its host: its address there, and the net thread."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from nc10d.backend.cpu import wires as wiring
from nc10d.backend.cpu.interfaces import own_address

if TYPE_CHECKING:
    import socket

    from nc10d.backend.cpu.host import Host
    from nc10d.backend.cpu.net import Net
    from nc10d.deadline import Deadline
    from nc10d.store.base import Store

_CONTROL = "control lines"


class Abroad:
    """The other hosts, as one rank reaches them."""

    def __init__(self, host: Host, store: Store) -> None:
        self._host = host
        self._lock = threading.Lock()
        self.address = own_address(store)
        self._net: Net | None = None

    @property
    def net(self) -> Net:
        """The links' thread; it starts with the first group that needs it."""
        with self._lock:
            if self._net is None:
                from nc10d.backend.cpu.net import Net  # compiles what a single host does without

                self._net = Net(self._host.process)
            return self._net

    def connect(self, store: Store, deadline: Deadline) -> dict[int, socket.socket]:
        """Connect to all ranks of other hosts; blocks until they all have."""
        number = self._host.number
        away = self._host.topology.away(number)
        place = wiring.Place(store, self.address, _CONTROL, number)
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
