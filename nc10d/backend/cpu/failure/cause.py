"""Why a group failed, as all ranks report it: the first cause wins, everywhere.

On one host: the rank that learns a cause writes it into its own area, and then competes for a
word, the first rank's abort word. The winner's number is copied into every rank's abort word, and
every wait looks at that word. Memory outlives the owner, so dead ranks do not matter.

A group that spans hosts first agrees on one cause by consensus; then each host publishes it so.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from nc10d.backend.cpu.control.group_control import GroupControl, ignored
from nc10d.backend.cpu.memory.group_memory import GroupMemory
from nc10d.backend.cpu.native import entry_points
from nc10d.backend.cpu.native import offsets as at
from nc10d.base import error_wire
from nc10d.errors import DistError

TOPIC = "cause"
_LOOK = 0.5


def publish(memory: GroupMemory, error: DistError) -> None:
    """Make `error` the cause on this host unless there is a cause; the caller rings all ranks."""
    first = memory.address(0) + at.AREA_ABORT
    with memory.reporting:
        # Peers may be reading the cause that this rank has written: a cause is written only once.
        if not memory.reported and entry_points.load_word(first) == 0:
            memory.write_cause(error_wire.encode_error(error, at.CAUSE_BYTES))
            memory.reported = True
    winner = entry_points.load_word(first)
    if winner == 0:
        # 0 means that there is no winner, so ranks count from 1 here.
        mine = memory.rank + 1
        winner = entry_points.compare_and_swap(first, 0, mine) or mine
    # Waits, the engine's included, look only at the abort word in the rank's own area.
    for rank in range(memory.size):
        entry_points.compare_and_swap(memory.address(rank) + at.AREA_ABORT, 0, winner)


def read(memory: GroupMemory) -> DistError | None:
    """Return the group's cause as this rank's error, or None."""
    winner = entry_points.load_word(memory.address(memory.rank) + at.AREA_ABORT)
    return error_wire.decode_error(memory.read_cause(winner - 1)) if winner else None


def has_failed(memory: GroupMemory) -> bool:
    """Return whether the group has failed."""
    return bool(entry_points.load_word(memory.address(memory.rank) + at.AREA_ABORT))


class AgreedCause:
    """The cause in a group that spans hosts; `ring` wakes this host's ranks, given a bit mask."""

    def __init__(
        self, control: GroupControl, memory: GroupMemory, ring: Callable[[int], None]
    ) -> None:
        self._control, self._memory, self._ring = control, memory, ring
        self._closed = False
        self._guard = threading.Lock()
        control.on_decision = self._decided

    def report(self, error: DistError, *, wait: bool) -> None:
        """Propose `error` as the cause; with `wait`, block until some cause is agreed."""
        # After `close` no thread waits for a cause, and the memory may belong to another group.
        if self._closed:
            return
        self._control.propose(TOPIC, error_wire.encode_error(error, at.CAUSE_BYTES).decode())
        while wait and not self.known():
            self._control.until(self.known, _LOOK)

    def known(self) -> bool:
        """Return whether a cause is published, or none will be any more."""
        return self._closed or has_failed(self._memory)

    def close(self) -> None:
        """Publish no cause any more: the group's memory may belong to another group."""
        with self._guard:
            self._closed = True
        self._control.on_decision = ignored  # breaks the cycle between the two objects
        self._control.notify()

    def _decided(self, topic: str, value: str) -> None:
        if topic != TOPIC:
            return
        with self._guard:
            if not self._closed:
                publish(self._memory, error_wire.decode_error(value))
                self._ring(self._memory.bits())
