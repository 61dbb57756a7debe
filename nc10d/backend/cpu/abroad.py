"""What all groups of one rank share beyond its host: control lines, and the net thread.

Messages of the control lines go to the group that they are about; a message that comes before its
group has formed here waits for it.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from nc10d.backend.cpu import wires as wiring
from nc10d.backend.cpu.control import Control, Message
from nc10d.deadline import Deadline

if TYPE_CHECKING:
    from nc10d.backend.cpu.backend import CpuBackend
    from nc10d.backend.cpu.host import Host
    from nc10d.backend.cpu.net import Net
    from nc10d.store.base import Store

_CONTROL = "control lines"
_EARLY = 1024


class Abroad:
    """The other hosts, as one rank reaches them."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._early: list[Message] = []
        self._lock = threading.Lock()
        self.control = Control({}, self._on_message, self._on_end)
        self._net: Net | None = None

    @property
    def net(self) -> Net:
        """The links' thread; it starts with the first group that needs it."""
        with self._lock:
            if self._net is None:
                from nc10d.backend.cpu.net import Net  # compiles what a single host does without

                self._net = Net(self._host.process)
            return self._net

    def connect(self, store: Store, deadline: Deadline) -> None:
        """Connect the control lines; blocks until all ranks of other hosts have."""
        host = self._host
        away = host.topology.away(host.number)
        wires = wiring.connect(store, _CONTROL, host.number, away, 1, deadline, lambda: None)
        lines = {number: pair[0] for number, pair in wires.items()}
        self.control = Control(lines, self._on_message, self._on_end)

    def join(self, backend: CpuBackend) -> None:
        """Hand a group what came for it before, and tell it who has gone meanwhile."""
        if backend.outside is None:
            return
        with self._lock:
            mine = [m for m in self._early if m["group"] == backend.group_name]
            self._early = [m for m in self._early if m["group"] != backend.group_name]
        for message in mine:
            backend.outside.council.hear(message["kind"], message)
        for number, line in self.control.lines.items():
            if line.over is not None:
                self._tell(backend, number, line.over)

    def overdue(self) -> float | None:
        """Have groups that have waited for a decision long enough go on; return ms to the next."""
        left = [
            group.outside.council.overdue()
            for group in self._host.live_groups()
            if group.outside is not None
        ]
        waits = [seconds for seconds in left if seconds is not None]
        return 1000.0 * min(waits) if waits else None

    def close(self) -> None:
        """Join the net thread, and close the control lines."""
        if self._net is not None:
            self._net.close()
        self.control.close()

    def disown(self) -> None:
        """Close a forked child's copies of the descriptors."""
        self._lock = threading.Lock()
        if self._net is not None:
            self._net.disown()
        self.control.close(shared=True)

    def _on_message(self, number: int, message: Message) -> None:
        del number
        with self._lock:
            reference = self._host.groups.get(message["group"])
            backend = reference() if reference is not None else None
            if backend is None:
                self._early = [*self._early[-_EARLY:], message]
                return
        assert backend.outside is not None
        backend.outside.council.hear(message["kind"], message)

    def _on_end(self, number: int, reason: str) -> None:
        for backend in self._host.live_groups():
            self._tell(backend, number, reason)

    def _tell(self, backend: CpuBackend, number: int, reason: str) -> None:
        if backend.outside is not None and number in backend.members:
            card = self._host.cards[number]
            backend.health.on_lost(backend.members.index(number), card, reason)
