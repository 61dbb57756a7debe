"""Why a group that spans hosts has failed: one cause, which its council agrees on.

On a host the first cause wins, in shared memory (causes.py). Of several hosts each rank that learns
a cause proposes it; what is decided is entered on every host, and nothing else is.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from nc10d import retold
from nc10d.backend.cpu import causes
from nc10d.backend.cpu.council import ignored
from nc10d.backend.cpu.native import layout as at
from nc10d.errors import DistError

if TYPE_CHECKING:
    from nc10d.backend.cpu.area import Areas
    from nc10d.backend.cpu.council import Council

TOPIC = "cause"
_LOOK = 0.5


class Verdict:
    """One group's cause, as one of its ranks comes to know it."""

    def __init__(self, council: Council, areas: Areas) -> None:
        self._council, self._areas = council, areas
        self._closed = False
        self._guard = threading.Lock()
        council.on_decision = self._decided

    def report(self, error: DistError, *, wait: bool) -> None:
        """Have the group fail, for `error` or whatever is decided; `wait` until that is known."""
        if self._closed:
            return
        self._council.propose(TOPIC, retold.written(error, at.CAUSE_BYTES).decode())
        while wait and not self.known():
            self._council.until(self.known, _LOOK)

    def known(self) -> bool:
        """Say whether there is nothing left to wait for."""
        return self._closed or causes.known(self._areas)

    def close(self) -> None:
        """Enter no cause any more: the group's memory may be another's."""
        with self._guard:
            self._closed = True
        self._council.on_decision = ignored  # they are not to keep each other
        self._council.notify()

    def _decided(self, topic: str, value: str) -> None:
        if topic != TOPIC:
            return
        with self._guard:
            if not self._closed:
                causes.publish(self._areas, retold.read(value))
                self._areas.host.ring(self._areas.bits())
