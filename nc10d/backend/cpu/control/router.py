"""A rank's control connections to all other ranks in its job, and the routing of their messages.

A message names a group, and is kept until that group has formed here. The context's control
thread polls; the router knows which descriptors to poll and when to look again. The connections
know ranks by their numbers in the job; each group decides whether a number is a member's.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import weakref
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from nc10d.backend.cpu.control.connections import ControlConnections, Message

_MOST_EARLY = 1024
"""Messages that are kept for groups that have not formed here yet."""
OF_THE_JOB = ("wait_notice", "deadlock")
"""Kinds of messages that concern the whole job: wait notices for deadlock detection."""


class ControlledGroup(Protocol):
    """A group as the context's threads see it."""

    # The methods that the control thread calls never wait for a peer. The worker calls
    # `on_engine_failure`, which may block until the ranks have agreed on a cause.

    name: str
    key: str
    """Name and members: no other group in the job has the same."""
    members: Sequence[int]
    """Ranks in the job."""

    def on_death(self, number: int) -> None:
        """React when a local process ends, the job's rank `number`."""

    def on_lost(self, number: int, reason: str) -> None:
        """React when the control connection to the job's rank `number` ends."""

    def on_engine_failure(self, address: int, answer: int) -> None:
        """React to a negative answer that the worker got from the channel at `address`."""

    def on_message(self, number: int, message: Message) -> None:
        """React to a control message for this group from the job's rank `number`."""

    def overdue(self) -> float | None:
        """Let overdue consensus go on; return the seconds until the next look, or None."""

    def disown(self) -> None:
        """Become unusable in a forked child."""


G = TypeVar("G", bound=ControlledGroup)


class LiveGroups(Generic[G]):
    """A rank's live groups, by key. A group that is dropped disappears from here.

    The same reference is given when a group joins and when it leaves.
    """

    def __init__(self) -> None:
        self._groups: dict[str, weakref.ref[G]] = {}
        self._lock = threading.RLock()

    def join(self, group: G, reference: weakref.ref[G]) -> None:
        """Add a group; `reference` refers to that group."""
        with self._lock:
            self._groups[group.key] = reference

    def leave(self, key: str, reference: weakref.ref[G]) -> int:
        """Remove a group, if present; return how many are left."""
        with self._lock:
            if self._groups.get(key) is reference:  # another group may have the key by now
                del self._groups[key]
            return len(self._groups)

    def __len__(self) -> int:
        return len(self._groups)

    def find(self, key: str) -> G | None:
        """Return the live group with this key, or None."""
        reference = self._groups.get(key)
        return None if reference is None else reference()

    def all(self) -> list[G]:
        """Return all live groups."""
        # Without the lock: a thread that holds the lock may be waiting for the control thread.
        found = [reference() for reference in list(self._groups.values())]
        return [group for group in found if group is not None]

    def disown(self) -> None:
        """Replace the lock in a forked child, and disown all groups."""
        self._lock = threading.RLock()
        for group in self.all():
            group.disown()


class Router:
    """A rank's control connections; `near` holds the ranks on its own host."""

    def __init__(
        self,
        wires: Mapping[int, socket.socket],
        near: Container[int],
        groups: LiveGroups[Any],
        wake_fd: int,
        seconds: float,
    ) -> None:
        """`wake_fd` is the caller's eventfd, which the caller closes after `stop`.

        A rank on another host is lost after `seconds` of silence.
        """
        self.on_job_message: Callable[[Message], object] | None = None
        """The receiver for messages in OF_THE_JOB; set before the control thread starts."""
        self._near = near
        self._groups = groups
        self._early: list[tuple[int, Message]] = []
        self._lock = threading.RLock()
        self._wake_fd, self._stopped = wake_fd, False
        self.control = ControlConnections(wires, self._on_message, self._on_end, self.wake, seconds)

    def wake(self) -> None:
        """Make the control thread look at connections and times again."""
        with self._lock:
            if not self._stopped:
                os.eventfd_write(self._wake_fd, 1)

    def stop(self) -> None:
        """Wake the control thread no more: the descriptor may be closed afterwards."""
        with self._lock:
            self._stopped = True

    def register(self, poller: select.poll) -> None:
        """Add the connections, and the descriptor behind `wake`, to a poller."""
        poller.register(self._wake_fd, select.POLLIN)
        self.control.register(poller)

    def ready(self, fd: int, poller: select.poll) -> bool:
        """Serve a descriptor that is ready; return False if not the router's."""
        if fd != self._wake_fd:
            return self.control.ready(fd, poller)
        os.eventfd_read(fd)
        self.control.register(poller)
        return True

    def overdue(self) -> float | None:
        """Let overdue consensus go on, end silent connections; return ms to the next call."""
        left = [self.control.look(), *(group.overdue() for group in self._groups.all())]
        waits = [seconds for seconds in left if seconds is not None]
        return 1000.0 * min(waits) if waits else None

    def join(self, group: ControlledGroup) -> None:
        """Deliver the messages that came before a group formed, and the connections that ended."""
        with self._lock:
            waiting = [entry for entry in self._early if entry[1]["group"] == group.key]
            self._early = [entry for entry in self._early if entry[1]["group"] != group.key]
        for number, message in waiting:
            group.on_message(number, message)
        for number in self.control.connections:
            reason = self.control.lost(number)
            if reason is not None:
                group.on_lost(number, reason)

    def unreachable(self, number: int) -> str | None:
        """Return why a rank on another host can't be reached any more, or None."""
        # For ranks on this host the kernel reports deaths, through pidfds.
        return None if number in self._near else self.control.lost(number)

    def _on_message(self, number: int, message: Message) -> None:
        if message["kind"] in OF_THE_JOB:
            if self.on_job_message is not None:
                self.on_job_message(message)
            return
        with self._lock:
            group = self._groups.find(message["group"])
            if group is None:
                self._early = [*self._early[-_MOST_EARLY:], (number, message)]
                return
        group.on_message(number, message)

    def _on_end(self, number: int, reason: str) -> None:
        for group in self._groups.all():
            group.on_lost(number, reason)

    def close(self, *, shared: bool = False) -> None:
        """Close all connections; if `shared` (in a forked child), they stay open in the parent.

        `stop` was called before; this takes no lock that a waiting thread may hold.
        """
        if shared:
            self._lock, self._stopped = threading.RLock(), True
        self.control.close(shared=shared)
        self.on_job_message = None  # else a cycle with the deadlock detector
