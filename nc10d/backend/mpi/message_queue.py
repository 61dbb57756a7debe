"""Sends and receives as steps, with any tag that nc10d allows.

MPI has tags up to TAG_UB, which may be far below 2**31 - 1. The largest tags are reserved for
messages with larger tags. The sender announces such a message (by its tag and a number), and sends
the message under a tag made from the number. A receiver accepts announcements, and posts its
receive when an announcement matches. A sender's announcements arrive in order, so messages with one
tag do too. All other messages are MPI's own.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from nc10d.backend.mpi.buffers import whole
from nc10d.backend.mpi.library import MPI, Comm, Request
from nc10d.backend.polled.flat_buffers import OpBuffers
from nc10d.backend.polled.launches import Steps
from nc10d.errors import CollectiveMismatch
from nc10d.ops import MessageInfo, Recv, Send

NUMBERED_TAGS = 4096
"""Messages with large tags that may be in flight between two ranks at a time."""
RESERVED_TAGS = 4096
"""Tags above the numbered tags, for forming groups (forming.py)."""


def largest_tag() -> int:
    """Return the largest tag of this MPI."""
    return int(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB))  # type: ignore[arg-type]


class Receive(NamedTuple):
    """A receive that has been posted; `status` is MPI's once the receive has ended."""

    request: Request
    status: MPI.Status

    def ended(self) -> bool:
        """Return whether a message has been received; never blocks."""
        return bool(self.request.Test(self.status))

    def cancel(self) -> None:
        """Cancel the receive if no message has come yet."""
        if self.request:  # the request of a failed receive is null
            self.request.Cancel()


class MessageQueue:
    """A rank's messages in a group; the caller holds the progress thread's lock."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        # Of the 32768 tags that every MPI must have, some thousands are left for other messages.
        self._announcement_tag = largest_tag() - RESERVED_TAGS
        self._first_numbered_tag = self._announcement_tag - NUMBERED_TAGS
        self._next_numbers = [0] * comm.size
        self._announced: list[tuple[int, int, int]] = []
        self._waiting_receives = 0
        # Messages per rank: with both counts a rank knows whether any is in flight.
        self.sent = [0] * comm.size
        self.received = [0] * comm.size

    def steps(self, op: Send | Recv) -> Steps:
        """Return the steps of a message."""
        if isinstance(op, Send):
            self.sent[op.peer] += 1
            return self._send(op)
        return self._recv(op)

    def _send(self, op: Send) -> Steps:
        requests, tag = [], op.tag
        if op.tag >= self._first_numbered_tag:
            number = self._next_numbers[op.peer] % NUMBERED_TAGS
            self._next_numbers[op.peer] += 1
            announcement = np.array([op.tag, number], np.int64)
            requests = [self._comm.Isend(announcement, op.peer, self._announcement_tag)]
            tag = self._first_numbered_tag + number
        x = OpBuffers().contiguous(op.x, False)
        yield [*requests, self._comm.Isend(whole(x), op.peer, tag)]
        return None

    def _recv(self, op: Recv) -> Steps:
        buffers = OpBuffers()
        x = buffers.contiguous(op.x, True)
        source, tag = MPI.ANY_SOURCE if op.peer is None else op.peer, op.tag
        if op.tag >= self._first_numbered_tag:
            self._waiting_receives += 1
            while (found := self._take(op)) is None:
                yield None
            self._waiting_receives -= 1
            source, number = found
            tag = self._first_numbered_tag + number
        receive = Receive(self._comm.Irecv(whole(x), source, tag), MPI.Status())
        yield [receive]
        source, got = int(receive.status.Get_source()), receive.status.Get_elements(MPI.BYTE)
        if got != x.nbytes:
            text = f"recv: rank {source} sent {got} bytes, and this rank takes {x.nbytes}"
            raise CollectiveMismatch(text, rank=source, op="recv")
        buffers.finish()
        self.received[source] += 1
        return source

    def _take(self, op: Recv) -> tuple[int, int] | None:
        """Remove and return the first announcement that matches a receive, None if none does."""
        for place, (source, tag, number) in enumerate(self._announced):
            if tag == op.tag and op.peer in (None, source):
                del self._announced[place]
                return source, number
        return None

    def accept_announcements(self) -> None:
        """Accept the announcements that have arrived, if any receive waits for them."""
        # Called once a round, before receives advance, so that they are served in their order.
        if self._waiting_receives:
            self._accept()

    def probe(self, peer: int | None, tag: int | None) -> MessageInfo | None:
        """Return a message that has arrived from a rank with a tag; None stands for any."""
        status, source = MPI.Status(), MPI.ANY_SOURCE if peer is None else peer
        if tag is not None and tag < self._first_numbered_tag:
            found = self._comm.Iprobe(source, tag, status)
            return _info(status, tag) if found else None
        self._accept()
        for sender, announced, number in self._announced:
            matches = peer in (None, sender) and tag in (None, announced)
            # The message is on its way behind its announcement.
            if matches and self._comm.Iprobe(sender, self._first_numbered_tag + number, status):
                return _info(status, announced)
        if tag is None and self._comm.Iprobe(source, MPI.ANY_TAG, status):
            found_tag = int(status.Get_tag())
            # Other tags belong to announcements, their messages, and groups that form.
            return _info(status, found_tag) if found_tag < self._first_numbered_tag else None
        return None

    def _accept(self) -> None:
        announcement = np.empty(2, np.int64)
        status = MPI.Status()
        while self._comm.Iprobe(MPI.ANY_SOURCE, self._announcement_tag, status):
            source = status.Get_source()
            self._comm.Recv(announcement, source, self._announcement_tag)
            self._announced.append((source, int(announcement[0]), int(announcement[1])))


def _info(status: MPI.Status, tag: int) -> MessageInfo:
    return MessageInfo(int(status.Get_source()), tag, int(status.Get_elements(MPI.BYTE)))
