"""Control messages between a group's ranks, beside their calls: the group failed, or a rank left.

They are short messages on the group's second communicator. `MpiControl` always has a receive
posted, so that polling costs a single MPI_Test.

A rank that closes its group sends each peer two counts: the calls that it has completed, and the
messages that it has sent to that peer. From these counts a peer knows whether a call or a message
that it waits for can still end, so a rank may leave while its last messages are in flight.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from nc10d.backend.mpi.library import MPI, Comm, Request
from nc10d.backend.mpi.message_queue import MessageQueue
from nc10d.backend.polled.flat_buffers import keep
from nc10d.backend.polled.launches import MessageTask, Task
from nc10d.ops import Recv

FAILED, LEFT = 1, 2
MOST_BYTES = 8192


class MpiControl:
    """A rank's control messages in a group; the caller holds the progress thread's lock."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._peers = [rank for rank in range(comm.size) if rank != comm.rank]
        self._received = np.empty(MOST_BYTES, np.uint8)
        self._request: Request | None = None
        self._status = MPI.Status()
        if self._peers:
            self._post_receive()

    def _post_receive(self) -> None:
        self._request = self._comm.Irecv(self._received, MPI.ANY_SOURCE, MPI.ANY_TAG)

    def received(self) -> Iterator[tuple[int, int, bytes]]:
        """Yield the messages that have arrived: the sender, FAILED or LEFT, and the text."""
        status = self._status
        while self._request is not None and self._request.Test(status):
            text = self._received[: status.Get_count(MPI.BYTE)].tobytes()
            source, kind = status.Get_source(), status.Get_tag()
            self._post_receive()
            yield source, kind, text

    def send(self, kind: int, texts: dict[int, bytes]) -> None:
        """Send each rank its text; never blocks."""
        for peer, text in texts.items():
            data = np.frombuffer(text, np.uint8)
            request = self._comm.Isend(data, peer, kind)
            if not request.Test():
                keep((request, data))

    def broadcast(self, kind: int, text: bytes) -> None:
        """Send a text to all other ranks; never blocks."""
        self.send(kind, dict.fromkeys(self._peers, text))

    def close(self) -> None:
        """Stop listening; idempotent."""
        request, self._request = self._request, None
        if request is not None:
            request.Cancel()
            request.Wait()


class LeaveProtocol:
    """The ranks that have left, as far as this rank knows."""

    def __init__(self, message_queue: MessageQueue, rank: int, size: int) -> None:
        self._message_queue = message_queue
        self._peers = [peer for peer in range(size) if peer != rank]
        self._leave_counts: dict[int, tuple[int, int]] = {}

    def leave_notices(self, calls: int) -> dict[int, bytes]:
        """Return the notice to each peer of a rank that leaves after `calls` calls."""
        return {peer: f"{calls} {self._message_queue.sent[peer]}".encode() for peer in self._peers}

    def record_leave(self, rank: int, text: bytes) -> None:
        """Record a rank's leave notice."""
        calls, sent = map(int, text.split())
        self._leave_counts[rank] = calls, sent

    def all_left(self) -> bool:
        """Return whether all peers have left, with none of their messages in flight."""
        return all(map(self._is_drained, self._peers))

    def blocked_task(self, tasks: Iterable[Task]) -> tuple[Task, int] | None:
        """Return a task that can't end, and the rank that it needs; None if all can end."""
        if not self._leave_counts:
            return None
        pairs = ((task, self._missing_rank(task)) for task in tasks)
        return next(((task, rank) for task, rank in pairs if rank is not None), None)

    def _missing_rank(self, task: Task) -> int | None:
        if not isinstance(task, MessageTask):
            left = self._leave_counts.items()
            return next((rank for rank, (calls, _) in left if calls < task.seq), None)
        if not isinstance(task.op, Recv):
            return None
        peers = self._peers if task.op.peer is None else [task.op.peer]
        return peers[0] if peers and all(map(self._is_drained, peers)) else None

    def _is_drained(self, peer: int) -> bool:
        """Return whether a rank has left and all its messages have been received."""
        return (
            peer in self._leave_counts
            and self._message_queue.received[peer] >= self._leave_counts[peer][1]
        )
