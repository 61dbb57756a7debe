"""The live groups of a rank, to which its control thread and its worker report.

The control connections know ranks by their numbers in the job; each group decides for itself
whether a number is a member's.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Protocol

from nc10d.backend.cpu.control.connections import Message


class ControlledGroup(Protocol):
    """A group as the context's threads see it.

    The control thread calls it and never waits for a peer in a call. The worker calls
    `on_engine_failure`, which may block until the ranks have agreed on a cause.
    """

    name: str
    members: Sequence[int]
    """Ranks of the job."""

    def on_death(self, number: int) -> None:
        """React to the end of a process of this host, rank `number` of the job."""

    def on_lost(self, number: int, reason: str) -> None:
        """React to the end of the control connection to rank `number` of the job."""

    def on_engine_failure(self, address: int, answer: int) -> None:
        """React to a negative answer that the worker got from the channel at `address`."""

    def on_message(self, number: int, message: Message) -> None:
        """React to a control message for this group from rank `number` of the job."""

    def overdue(self) -> float | None:
        """Let overdue consensus go on; return the seconds until the next look, or None."""

    def disown(self) -> None:
        """Become unusable in a forked child."""


class LiveGroups:
    """The live groups of a rank, by name. A group that is dropped disappears from here."""

    def __init__(self) -> None:
        self._groups: dict[str, weakref.ref[ControlledGroup]] = {}
        self._lock = threading.RLock()

    def join(self, group: ControlledGroup) -> None:
        """Add a group."""
        with self._lock:
            self._groups[group.name] = weakref.ref(group)

    def leave(self, group: ControlledGroup) -> int:
        """Remove a group; return how many entries are left."""
        with self._lock:
            self._groups.pop(group.name, None)
            return len(self._groups)

    def __len__(self) -> int:
        return len(self._groups)

    def find(self, name: str) -> ControlledGroup | None:
        """Return the live group of this name, or None."""
        with self._lock:
            reference = self._groups.get(name)
        return None if reference is None else reference()

    def all(self) -> list[ControlledGroup]:
        """Return all live groups."""
        with self._lock:
            found = [reference() for reference in list(self._groups.values())]
        return [group for group in found if group is not None]

    def disown(self) -> None:
        """Replace the lock in a forked child, and disown all groups."""
        self._lock = threading.RLock()
        for group in self.all():
            group.disown()
