"""A group's control in a single process: a member for each rank, with its own control thread."""

from __future__ import annotations

import os
import select
import socket
import threading
from types import TracebackType

from nc10d.backend.cpu.control.connections import ControlConnections, Message
from nc10d.backend.cpu.control.group_control import GroupControl
from nc10d.group.shrink import ShrinkAttempt


class Member:
    """A rank of the group; it processes no messages until `wake_up`."""

    def __init__(self, rank: int, wires: dict[int, socket.socket]) -> None:
        self.rank = rank
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self.connections = ControlConnections(
            wires, self._on_message, lambda number, reason: self.control.notify()
        )
        self.connections.wake = lambda: os.eventfd_write(self._wake, 1)
        self.control = GroupControl(
            "group", range(len(wires) + 1), rank, self.connections, self.departed
        )
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name=f"member {rank}")

    def wake_up(self) -> None:
        """Start the control thread."""
        self._thread.start()

    def departed(self) -> set[int]:
        """Return the ranks whose connection has ended."""
        return {
            rank for rank in self.connections.connections if self.connections.lost(rank) is not None
        }

    def _on_message(self, number: int, message: Message) -> None:
        self.control.on_message(number, message["kind"], message)

    def _serve(self) -> None:
        poller = select.poll()
        patience = None
        while not self._closed:
            poller.register(self._wake, select.POLLIN)
            self.connections.register(poller)
            for fd, _ in poller.poll(patience):
                if fd == self._wake:
                    os.eventfd_read(fd)
                else:
                    self.connections.ready(fd, poller)
            left = self.control.overdue()
            patience = None if left is None else 1000.0 * left

    def die(self) -> None:
        """Close all descriptors, as the kernel does for a process that dies; idempotent."""
        if self._closed:
            return
        self._closed = True
        self.connections.wake()
        if self._thread.ident is not None:
            self._thread.join()
        self.connections.close()
        os.close(self._wake)


class ControlGroup:
    """Ranks with a connection between each two; those in `asleep` have no control thread yet."""

    def __init__(self, size: int, asleep: tuple[int, ...] = ()) -> None:
        wires: list[dict[int, socket.socket]] = [{} for _ in range(size)]
        for rank in range(size):
            for other in range(rank):
                wires[rank][other], wires[other][rank] = socket.socketpair()
        for wire in (wire for some in wires for wire in some.values()):
            wire.setblocking(False)
        self.members = [Member(rank, some) for rank, some in enumerate(wires)]
        for member in self.members:
            if member.rank not in asleep:
                member.wake_up()

    def attempt(self, rank: int, number: int = 1) -> ShrinkAttempt:
        """Return an attempt to shrink, of one rank."""
        return ShrinkAttempt(self.members[rank].control, number, self.members[rank].departed)

    def __enter__(self) -> ControlGroup:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for member in self.members:
            member.die()
