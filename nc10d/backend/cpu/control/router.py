"""A rank's control lines to all others of its job, and the groups that messages are for.

A message that comes before its group has formed here waits for it. The host's control thread polls;
this says what for, and when to look again.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING

from nc10d.backend.cpu.control.connections import ControlConnections, Message

if TYPE_CHECKING:
    from nc10d.backend.cpu.backend import CpuBackend
    from nc10d.backend.cpu.context import Context

_EARLY = 1024


class Router:
    """All other ranks of the job, as one rank hears from them."""

    def __init__(self, host: Context, wires: Mapping[int, socket.socket]) -> None:
        self._host: Context = weakref.proxy(host)  # memory goes with the last who uses it, at once
        self._early: list[tuple[int, Message]] = []
        self._lock = threading.Lock()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.control = ControlConnections(wires, self._on_message, self._on_end, self.wake)

    def wake(self) -> None:
        """Have the control thread look at lines and times anew."""
        with self._lock:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def register(self, poller: select.poll) -> None:
        """Have a poller watch the lines, and for `wake`."""
        poller.register(self._wake, select.POLLIN)
        self.control.register(poller)

    def ready(self, fd: int, poller: select.poll) -> bool:
        """Do what there is to do about a descriptor; False if it is not of these."""
        if fd != self._wake:
            return self.control.ready(fd, poller)
        os.eventfd_read(fd)
        self.control.register(poller)
        return True

    def overdue(self) -> float | None:
        """Have agreements go on that have waited long enough; return ms to the next look."""
        left = [group.council.overdue() for group in self._host.live_groups()]
        waits = [seconds for seconds in left if seconds is not None]
        return 1000.0 * min(waits) if waits else None

    def join(self, backend: CpuBackend) -> None:
        """Hand a group what came for it before, and tell it who has gone meanwhile."""
        with self._lock:
            mine = [one for one in self._early if one[1]["group"] == backend.group_name]
            self._early = [one for one in self._early if one[1]["group"] != backend.group_name]
        for number, message in mine:
            self._hand(backend, number, message)
        for number in self.control.lines:
            reason = self.control.lost(number)
            if reason is not None:
                self._tell(backend, number, reason)

    def unreachable(self, number: int) -> str | None:
        """Return why a rank of another host can't be reached any more, or None.

        Of the ranks of this host the kernel tells.
        """
        return None if number in self._host.near else self.control.lost(number)

    def _on_message(self, number: int, message: Message) -> None:
        if message["kind"] in ("waits", "circle"):  # of the job, not of a group
            self._host.deadlocks.hear(message)
            return
        with self._lock:
            reference = self._host.groups.get(message["group"])
            backend = reference() if reference is not None else None
            if backend is None:
                self._early = [*self._early[-_EARLY:], (number, message)]
                return
        self._hand(backend, number, message)

    def _hand(self, backend: CpuBackend, number: int, message: Message) -> None:
        if number in backend.members:
            rank = backend.members.index(number)
            backend.council.hear(rank, message["kind"], message)

    def _on_end(self, number: int, reason: str) -> None:
        for backend in self._host.live_groups():
            self._tell(backend, number, reason)

    def _tell(self, backend: CpuBackend, number: int, reason: str) -> None:
        if number in backend.members:
            backend.council.notify()
            if number not in self._host.near:
                card = self._host.cards[number]
                backend.health.on_lost(backend.members.index(number), card, reason)

    def close(self, *, shared: bool = False) -> None:
        """Close all lines; those that are `shared` (in a forked child) stay open elsewhere."""
        if shared:
            self._lock = threading.Lock()
        self.control.close(shared=shared)
        with self._lock:
            wake, self._wake = self._wake, -1
        if wake >= 0:
            os.close(wake)
