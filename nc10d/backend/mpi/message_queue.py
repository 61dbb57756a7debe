"""Sends and receives as steps, with any tag that nc10d allows.

MPI has tags up to TAG_UB, which may be far below 2**31 - 1. The top few are kept for messages with
larger tags: such a message is announced (its tag, and a number) and travels under a tag made of
its number; a receiver takes announcements in, and posts its receive when one fits. Announcements
of one sender arrive in order, so messages of one tag do too. All other messages are MPI's own.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nc10d.backend.mpi.buffers import FlatBuffer, OpBuffers
from nc10d.backend.mpi.library import MPI, Comm, Steps
from nc10d.errors import CollectiveMismatch
from nc10d.ops import Recv, Send

NUMBERED_TAGS = 4096
"""Messages with large tags that may be on their way between two ranks at a time."""


RESERVED_TAGS = 4096
"""Tags above these, for forming groups (forming.py)."""


def largest_tag() -> int:
    """Return the largest tag that this MPI knows."""
    largest: int = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)  # type: ignore[assignment]
    return largest


class MessageQueue:
    """One rank's messages in one group; its owner sees to it that threads take turns."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        # Some thousand of the 32768 tags that every MPI must have are left for all other messages.
        self._announcing = largest_tag() - RESERVED_TAGS
        self._numbered = self._announcing - NUMBERED_TAGS
        self._numbers = [0] * comm.size
        self._announced: list[tuple[int, int, int]] = []
        self._waiting = 0
        # Per rank, to say and to know whether anything is still on its way.
        self.sent = [0] * comm.size
        self.received = [0] * comm.size

    def steps(self, op: Send | Recv, status: Any) -> Steps:
        """Carry out one message; a receive leaves what MPI says about it in `status`."""
        if isinstance(op, Send):
            self.sent[op.peer] += 1
        if op.tag < self._numbered:
            return self._send(op, op.tag) if isinstance(op, Send) else self._recv(op, status)
        return (
            self._send_announced(op) if isinstance(op, Send) else self._recv_announced(op, status)
        )

    def _send(self, op: Send, tag: int) -> Steps:
        room = OpBuffers()
        x = room.flat(op.x, False)
        yield [self._comm.Isend(x.all(), op.peer, tag)]
        return None

    def _recv(self, op: Recv, status: Any) -> Steps:
        room = OpBuffers()
        x = room.flat(op.x, True)
        source = MPI.ANY_SOURCE if op.peer is None else op.peer
        yield [self._comm.Irecv(x.all(), source, op.tag)]
        return self._received(x, room, status)

    def _send_announced(self, op: Send) -> Steps:
        number = self._numbers[op.peer] % NUMBERED_TAGS
        self._numbers[op.peer] += 1
        told = np.array([op.tag, number], np.int64)
        first = self._comm.Isend(told, op.peer, self._announcing)
        room = OpBuffers()
        x = room.flat(op.x, False)
        yield [first, self._comm.Isend(x.all(), op.peer, self._numbered + number)]
        return None

    def _recv_announced(self, op: Recv, status: Any) -> Steps:
        room = OpBuffers()
        x = room.flat(op.x, True)
        self._waiting += 1
        while (found := self._take(op)) is None:
            yield None
        self._waiting -= 1
        source, number = found
        yield [self._comm.Irecv(x.all(), source, self._numbered + number)]
        return self._received(x, room, status)

    def _take(self, op: Recv) -> tuple[int, int] | None:
        """Take the first announcement that fits a receive off the list."""
        for place, (source, tag, number) in enumerate(self._announced):
            if tag == op.tag and op.peer in (None, source):
                del self._announced[place]
                return source, number
        return None

    def listen(self) -> None:
        """Take in the announcements that have come, if any receive waits for one.

        Once a round, before receives look: so they are served in their order.
        """
        if not self._waiting:
            return
        told = np.empty(2, np.int64)
        status = MPI.Status()
        while self._comm.Iprobe(MPI.ANY_SOURCE, self._announcing, status):
            source = status.Get_source()
            self._comm.Recv(told, source, self._announcing)
            self._announced.append((source, int(told[0]), int(told[1])))

    def _received(self, x: FlatBuffer, room: OpBuffers, status: Any) -> int:
        source = int(status.Get_source())
        got = status.Get_elements(MPI.BYTE)
        if got != x.nbytes:
            text = f"recv: rank {source} sent {got} bytes, and this rank takes {x.nbytes}"
            raise CollectiveMismatch(text, rank=source, op="recv")
        room.finish()
        self.received[source] += 1
        return source
