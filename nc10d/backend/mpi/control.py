"""Control messages between a group's ranks, beside their calls: the group failed, or a rank left.

They are short messages on the group's second communicator. `MpiControl` always has a receive
posted, so that polling costs a single MPI_Test.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from nc10d.backend.mpi.library import MPI, Request, keep

FAILED, LEFT = 1, 2
MOST_BYTES = 8192


class MpiControl:
    """A rank's control messages in a group; the caller holds the progress thread's lock."""

    def __init__(self, comm: Any) -> None:
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
