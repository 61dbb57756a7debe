"""What ranks of a group tell each other beside their calls: that it failed, or that one left.

A notice is a short message on the group's second communicator. `MpiControl` always has one receive
posted, so that looking costs one MPI_Test.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from nc10d.backend.mpi.library import MPI, Request, keep

FAILED, LEFT = 1, 2
MOST_BYTES = 8192


class MpiControl:
    """One rank's ear and voice in one group; its owner sees to it that threads take turns."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self._peers = [rank for rank in range(comm.size) if rank != comm.rank]
        self._heard = np.empty(MOST_BYTES, np.uint8)
        self._ear: Request | None = None
        self._status = MPI.Status()
        if self._peers:
            self._listen()

    def _listen(self) -> None:
        self._ear = self._comm.Irecv(self._heard, MPI.ANY_SOURCE, MPI.ANY_TAG)

    def hear(self) -> Iterator[tuple[int, int, bytes]]:
        """Yield what has come: the sender, FAILED or LEFT, and its text."""
        status = self._status
        while self._ear is not None and self._ear.Test(status):
            text = self._heard[: status.Get_count(MPI.BYTE)].tobytes()
            source, kind = status.Get_source(), status.Get_tag()
            self._listen()
            yield source, kind, text

    def tell(self, kind: int, texts: dict[int, bytes]) -> None:
        """Send each rank its text; never blocks."""
        for peer, text in texts.items():
            data = np.frombuffer(text, np.uint8)
            request = self._comm.Isend(data, peer, kind)
            if not request.Test():
                keep((request, data))

    def tell_all(self, kind: int, text: bytes) -> None:
        """Send all other ranks a text; never blocks."""
        self.tell(kind, dict.fromkeys(self._peers, text))

    def close(self) -> None:
        """Stop listening; idempotent."""
        ear, self._ear = self._ear, None
        if ear is not None:
            ear.Cancel()
            ear.Wait()
