"""Who has left the group, and who waits for them in vain.

A rank that closes its group tells each peer how many calls it has been through and how many
messages it has sent to that peer. With both counts a peer knows whether what it waits for was
still sent, so a rank may leave while its last messages are on their way.
"""

from __future__ import annotations

from collections.abc import Iterable

from nc10d.backend.mpi.message_queue import MessageQueue
from nc10d.backend.mpi.tasks import MessageTask, Task
from nc10d.ops import Recv


class LeaveProtocol:
    """The ranks that have left, as one rank has heard."""

    def __init__(self, mail: MessageQueue, rank: int, size: int) -> None:
        self._mail = mail
        self._peers = [peer for peer in range(size) if peer != rank]
        self._left: dict[int, tuple[int, int]] = {}

    def farewell(self, calls: int) -> dict[int, bytes]:
        """Return what a rank that leaves after `calls` calls tells each of its peers."""
        return {peer: f"{calls} {self._mail.sent[peer]}".encode() for peer in self._peers}

    def heard(self, rank: int, text: bytes) -> None:
        """Take note of a farewell."""
        calls, sent = map(int, text.split())
        self._left[rank] = calls, sent

    def complete(self) -> bool:
        """Say whether all peers have left, and nothing of theirs is on its way."""
        return all(map(self._silent, self._peers))

    def missed(self, tasks: Iterable[Task]) -> tuple[Task, int] | None:
        """Return a task that can't end, and the rank that it needs, if there is one."""
        if not self._left:
            return None
        pairs = ((task, self._missed_by(task)) for task in tasks)
        return next(((task, rank) for task, rank in pairs if rank is not None), None)

    def _missed_by(self, task: Task) -> int | None:
        if not isinstance(task, MessageTask):
            return next((rank for rank, (calls, _) in self._left.items() if calls < task.seq), None)
        if not isinstance(task.op, Recv):
            return None
        peers = self._peers if task.op.peer is None else [task.op.peer]
        return peers[0] if peers and all(map(self._silent, peers)) else None

    def _silent(self, peer: int) -> bool:
        """Say whether a rank has left and all that it sent has been received."""
        return peer in self._left and self._mail.received[peer] >= self._left[peer][1]
