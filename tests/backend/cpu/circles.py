"""Councils of a few ranks in one process, on socket pairs, each with a control thread's loop."""

from __future__ import annotations

import os
import select
import socket
import threading
from types import TracebackType

from nc10d.backend.cpu.control.connections import ControlConnections, Message
from nc10d.backend.cpu.control.group_control import GroupControl
from nc10d.group.shrink import ShrinkAttempt


class Seat:
    """One rank; nothing of it is heard or said by itself until `wake_up`."""

    def __init__(self, rank: int, wires: dict[int, socket.socket]) -> None:
        self.rank = rank
        self._bell = os.eventfd(0, os.EFD_NONBLOCK)
        self.control = ControlConnections(
            wires, self._hear, lambda number, reason: self.council.notify()
        )
        self.control.wake = lambda: os.eventfd_write(self._bell, 1)
        self.council = GroupControl("group", range(len(wires) + 1), rank, self.control, self.gone)
        self._over = False
        self._thread = threading.Thread(target=self._listen, name=f"seat {rank}")

    def wake_up(self) -> None:
        """Begin to listen."""
        self._thread.start()

    def gone(self) -> set[int]:
        """Return whose line has ended."""
        return {rank for rank in self.control.lines if self.control.lost(rank) is not None}

    def _hear(self, number: int, message: Message) -> None:
        self.council.hear(number, message["kind"], message)

    def _listen(self) -> None:
        poller = select.poll()
        patience = None
        while not self._over:
            poller.register(self._bell, select.POLLIN)
            self.control.register(poller)
            for fd, _ in poller.poll(patience):
                if fd == self._bell:
                    os.eventfd_read(fd)
                else:
                    self.control.ready(fd, poller)
            left = self.council.overdue()
            patience = None if left is None else 1000.0 * left

    def die(self) -> None:
        """Be gone, as a process whose descriptors the kernel closes; idempotent."""
        if self._over:
            return
        self._over = True
        self.control.wake()
        if self._thread.ident is not None:
            self._thread.join()
        self.control.close()
        os.close(self._bell)


class Circle:
    """Some ranks, each with a line to every other; those that are `asleep` don't listen yet."""

    def __init__(self, size: int, asleep: tuple[int, ...] = ()) -> None:
        wires: list[dict[int, socket.socket]] = [{} for _ in range(size)]
        for one in range(size):
            for other in range(one):
                wires[one][other], wires[other][one] = socket.socketpair()
        for wire in (wire for some in wires for wire in some.values()):
            wire.setblocking(False)
        self.seats = [Seat(rank, some) for rank, some in enumerate(wires)]
        for seat in self.seats:
            if seat.rank not in asleep:
                seat.wake_up()

    def attempt(self, rank: int, number: int = 1) -> ShrinkAttempt:
        """Return an attempt to shrink, as one rank takes part in it."""
        return ShrinkAttempt(self.seats[rank].council, number, self.seats[rank].gone)

    def __enter__(self) -> Circle:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for seat in self.seats:
            seat.die()
