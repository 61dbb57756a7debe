"""Why a group failed, as all of its ranks will say it: the first cause wins, everywhere.

The rank that learns a cause writes it into its own shared part, and then competes for one word,
the first rank's: whoever sets it decides. The winner's number is copied into everyone's word,
which is what every wait looks at. Memory outlives its owner, so dead ranks do not matter.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from nc10d.backend.cpu.control.group_control import ignored
from nc10d.backend.cpu.native import entry_points
from nc10d.backend.cpu.native import offsets as at
from nc10d.base import error_wire
from nc10d.errors import DistError

if TYPE_CHECKING:
    from nc10d.backend.cpu.memory.group_memory import GroupMemory


def publish(areas: GroupMemory, error: DistError) -> None:
    """Make `error` the group's cause unless there is one already; every rank wakes up."""
    first = areas.address(0) + at.AREA_ABORT
    with areas.reporting:
        # Peers may be reading what this rank reported first: it is never written again.
        if not areas.reported and entry_points.load_word(first) == 0:
            areas.write_cause(error_wire.written(error, at.CAUSE_BYTES))
            areas.reported = True
    winner = entry_points.load_word(first)
    if winner == 0:
        winner = entry_points.compare_and_swap(first, 0, areas.rank + 1) or areas.rank + 1
    for rank in range(areas.size):
        entry_points.compare_and_swap(areas.address(rank) + at.AREA_ABORT, 0, winner)


def read(areas: GroupMemory) -> DistError | None:
    """Return the group's cause as an error of this rank, or None."""
    winner = entry_points.load_word(areas.address(areas.rank) + at.AREA_ABORT)
    return error_wire.read(areas.read_cause(winner - 1)) if winner else None


def known(areas: GroupMemory) -> bool:
    """Say whether the group has a cause to fail."""
    return bool(entry_points.load_word(areas.address(areas.rank) + at.AREA_ABORT))


if TYPE_CHECKING:
    from nc10d.backend.cpu.control.group_control import GroupControl
    from nc10d.backend.cpu.memory.group_memory import GroupMemory

TOPIC = "cause"
_LOOK = 0.5


class AgreedCause:
    """One group's cause, as one of its ranks comes to know it."""

    def __init__(self, council: GroupControl, areas: GroupMemory) -> None:
        self._council, self._areas = council, areas
        self._closed = False
        self._guard = threading.Lock()
        council.on_decision = self._decided

    def report(self, error: DistError, *, wait: bool) -> None:
        """Have the group fail, for `error` or whatever is decided; `wait` until that is known."""
        if self._closed:
            return
        self._council.propose(TOPIC, error_wire.written(error, at.CAUSE_BYTES).decode())
        while wait and not self.known():
            self._council.until(self.known, _LOOK)

    def known(self) -> bool:
        """Say whether there is nothing left to wait for."""
        return self._closed or known(self._areas)

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
                publish(self._areas, error_wire.read(value))
                self._areas.host.ring(self._areas.bits())
