"""The leave protocol: which ranks have left the group, and which tasks wait for them in vain.

A rank that closes its group sends each peer two counts: the calls that it has completed, and the
messages that it has sent to that peer. From these counts a peer knows whether a call or a message
that it waits for can still end, so a rank may leave while its last messages are in flight.
"""

from __future__ import annotations

from collections.abc import Iterable

from nc10d.backend.mpi.message_queue import MessageQueue
from nc10d.backend.mpi.tasks import MessageTask, Task
from nc10d.ops import Recv


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
        """Record the leave notice of a rank."""
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
            return next(
                (rank for rank, (calls, _) in self._leave_counts.items() if calls < task.seq), None
            )
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
