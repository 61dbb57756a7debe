"""One cause for all hosts: how the ranks of a group agree on why it has failed.

On a host the first cause wins, in shared memory (causes.py). Of a group that spans hosts, the
first host on which a member can still be reached decides: elsewhere, who learns a cause reports it
to that host's members; they enter it as their own, and tell everyone which cause has won. A host
that hears nothing for a second, though it has reported, goes by its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from nc10d.backend.cpu import causes
from nc10d.errors import DistError

if TYPE_CHECKING:
    from nc10d.backend.cpu.algorithms.topology import Topology
    from nc10d.backend.cpu.area import Areas
    from nc10d.backend.cpu.control import Control, Message

PATIENCE = 1.0


class Council:
    """One group's agreement, as one of its ranks takes part in it."""

    def __init__(
        self,
        name: str,
        members: Sequence[int],
        hosts: Topology,
        areas: Areas,
        control: Control,
    ) -> None:
        self._name = name
        self.members = list(members)
        self.hosts = hosts
        self._areas = areas
        self._control = control
        self.left: set[int] = set()
        self._told = self._closed = False
        self._guard = threading.Lock()
        self._news = threading.Condition()
        self._pending: tuple[DistError, float] | None = None

    @property
    def number(self) -> int:
        """My rank in the group."""
        return self._areas.number

    def away(self) -> list[int]:
        """Return the job's numbers of the members on other hosts."""
        return [self.members[rank] for rank in self.hosts.away(self.number)]

    def lost(self, rank: int) -> str | None:
        """Return why a member on another host can't be reached any more, or None."""
        return self._control.lost(self.members[rank])

    # -- a cause ---------------------------------------------------------------------------

    def report(self, error: DistError, *, wait: bool) -> None:
        """Have the group fail, for `error` or whatever came first; may block for a second."""
        judges = self._judges()
        if self.number in judges:
            self._enter(error)
            return
        numbers = [self.members[rank] for rank in judges]
        self._control.send(numbers, self._message("report", error))
        with self._news:
            self._pending = self._pending or (error, time.monotonic() + PATIENCE)
            if wait:
                self._news.wait_for(self._decided, PATIENCE)
        if wait:
            self.overdue()

    def overdue(self) -> float | None:
        """Go by my own cause if nobody has decided in time; return the seconds left, if any."""
        with self._news:
            pending = self._pending
            if pending is None or self._decided():
                self._pending = None
                return None
            left = pending[1] - time.monotonic()
            if left > 0:
                return left
            self._pending = None
        self._enter(pending[0])
        return None

    def tell(self) -> None:
        """Tell the other hosts which cause has won here, once."""
        if self._told:
            return
        self._told = True
        winner = causes.read(self._areas)
        if winner is not None:
            self._control.send(self.away(), self._message("cause", winner))

    def hear(self, kind: str, message: Message) -> None:
        """Take in what a member on another host says."""
        if kind == "left":
            self.left.add(int(message["rank"]))
            with self._news:
                self._news.notify_all()
            return
        error = causes.decoded(message["error"])
        if kind == "cause":
            self._told = True  # everyone hears it from whoever decided
            self._publish(error)
        elif self._closed:
            return
        elif self.number in self._judges() or self._decided():
            self._told = False
            self._enter(error)
        else:
            self.report(error, wait=False)

    def leave(self) -> None:
        """Tell the other hosts that this rank closes the group."""
        self._control.send(self.away(), {"kind": "left", "group": self._name, "rank": self.number})

    def await_word(self, rank: int, timeout: float) -> None:
        """Wait until it is known what has become of a member, or of the group."""
        with self._news:
            self._news.wait_for(
                lambda: rank in self.left or self.lost(rank) is not None or self._decided(), timeout
            )

    def notify(self) -> None:
        """Wake who waits for a word: a line has ended."""
        with self._news:
            self._news.notify_all()

    def close(self) -> None:
        """Enter no causes any more: the group's memory may be another's."""
        with self._guard:
            self._closed = True
        self.notify()

    def _enter(self, error: DistError) -> None:
        if self._publish(error):
            self.tell()

    def _publish(self, error: DistError) -> bool:
        with self._guard:
            if self._closed:
                return False
            causes.publish(self._areas, error)
            self._areas.host.ring(self._areas.bits())
        with self._news:
            self._pending = None
            self._news.notify_all()
        return True

    def _decided(self) -> bool:
        return self._closed or causes.known(self._areas)

    def _judges(self) -> tuple[int, ...]:
        """Return the members of the first host that can still be reached."""
        mine = self.hosts.mates(self.number)
        for ranks in self.hosts.hosts:
            if ranks == mine:
                return ranks
            there = tuple(r for r in ranks if self.lost(r) is None and r not in self.left)
            if there:
                return there
        return mine

    def _message(self, kind: str, error: DistError) -> Message:
        text = causes.encoded(error).decode(errors="replace")
        return {"kind": kind, "group": self._name, "error": text}
