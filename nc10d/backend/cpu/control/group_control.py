"""What the ranks of a group say to each other beside its operations: parts, and agreements.

A part is a text under a key, told to all members: each rank writes keys of its own, once. An
agreement (agreement.py) is a decision about a topic, the same on all members that live.

Who leaves, and whose line has ended, is dismissed from agreements when all is heard that it said
before: it may have decided. Who is silent for too long is dismissed, too: soon if it is known to be
dead, or if nothing was heard of it and the value itself says that it may be silent.

All of it goes over the control lines alone. The host's control thread hears and looks at the time;
any thread may tell, propose and wait.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from nc10d.backend.cpu.control.consensus import Consensus
from nc10d.errors import StoreTimeout

if TYPE_CHECKING:
    from nc10d.backend.cpu.control.connections import ControlConnections, Message

PATIENCE = 1.0
"""Seconds of silence after which an agreement goes on without a rank that seems to live."""
SOON = 0.05
"""The same where there is a reason not to expect an answer."""
_SLICE = 0.02

Ranks = set[int]


class GroupControl:
    """One group's ranks, as one of them hears and speaks to the others; ranks are the group's."""

    def __init__(
        self,
        name: str,
        members: Sequence[int],
        rank: int,
        control: ControlConnections,
        gone: Callable[[], Ranks],
    ) -> None:
        """`gone` says which ranks have died or left, as far as the kernel and the host know."""
        self.members, self.rank = list(members), rank
        self.left: set[int] = set()
        self.on_decision: Callable[[str, str], None] = ignored
        self._name, self._control, self._gone = name, control, gone
        self._others = [other for other in range(len(members)) if other != rank]
        self._talks: dict[str, Consensus] = {}
        self._moved: dict[str, float] = {}
        self._late: set[str] = set()
        self._told: set[str] = set()
        self._parts: dict[str, str] = {}
        self._guard = threading.RLock()
        self._news = threading.Condition()

    # -- what each rank tells ----------------------------------------------------------------

    def set(self, key: str, value: str) -> None:
        """Tell everyone; never blocks."""
        self._parts[key] = value
        self._send(self._others, {"kind": "part", "topic": key, "value": value})
        self.notify()

    def check(self, keys: Sequence[str]) -> bool:
        """Say whether all of these have been told."""
        return all(key in self._parts for key in keys)

    def wait(self, keys: Sequence[str], timeout: float) -> None:
        """Block until all of these have been told; StoreTimeout after `timeout` seconds."""
        if not self.until(partial(self.check, keys), timeout):
            raise StoreTimeout(f"group {self._name!r}: not all of {list(keys)} have been told")

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return what was told under keys that are there."""
        return [self._parts[key].encode() for key in keys]

    # -- what all decide -----------------------------------------------------------------------

    def propose(self, topic: str, value: str) -> None:
        """Have a topic decided, for `value` or what came first; never blocks."""
        with self._guard:
            self._talk(topic).propose(value)
            self._moved[topic] = time.monotonic()
        self._announce(topic)
        self._control.wake()

    def decided(self, topic: str) -> str | None:
        """Return what has been decided, if anything."""
        talk = self._talks.get(topic)
        return None if talk is None else talk.decision

    def decide(self, topic: str, value: str) -> str:
        """Propose, and return what was decided; blocks until then, not for long (see PATIENCE)."""
        self.propose(topic, value)
        while not self.until(lambda: self.decided(topic) is not None, PATIENCE):
            pass
        decision = self.decided(topic)
        assert decision is not None, "that was waited for"
        return decision

    def overdue(self) -> float | None:
        """Dismiss who has gone or is silent; return the seconds until it is time to look again.

        To be called when all that has come was heard: who was stopped must not take that for
        silence of the others.
        """
        with self._guard:
            pending = [topic for topic, talk in self._talks.items() if talk.awaited()]
            for topic in pending:
                self._look(topic, self._talks[topic])
        for topic in pending:
            self._announce(topic)
        return _SLICE if pending else None

    def _look(self, topic: str, talk: Consensus) -> None:
        silent = time.monotonic() - self._moved[topic]
        soon = self._hopeless(topic, talk) if silent > SOON else set()
        for rank in talk.awaited():
            if silent > PATIENCE:
                self._late.add(topic)
            elif rank not in soon and not self._ended(rank):
                continue
            talk.dismiss(rank)
            self._moved[topic] = time.monotonic()

    def _hopeless(self, topic: str, talk: Consensus) -> Ranks:
        """Return the ranks that need not be given all of the patience."""
        # A host that stops, stops several ranks: it is enough to wait for one of them.
        all_mute = topic in self._late
        mute = set(self._others if all_mute else suspects(talk.value)) - talk.heard
        return mute | self._gone()

    def _talk(self, topic: str) -> Consensus:
        """Return a topic's agreement; a new one is without those who have ended."""
        if topic not in self._talks:
            send = partial(self._say, topic)
            talk = self._talks[topic] = Consensus(range(len(self.members)), self.rank, send)
            for rank in filter(self._ended, self._others):
                talk.dismiss(rank)
        return self._talks[topic]

    def _ended(self, rank: int) -> bool:
        return rank in self.left or self.lost(rank) is not None

    def _say(self, topic: str, ranks: Iterable[int], step: int, value: str) -> None:
        message = {"kind": "say", "topic": topic, "step": step, "value": value}
        self._send(ranks, message)

    def _announce(self, topic: str) -> None:
        """Tell of a decision, once."""
        with self._guard:
            value = self.decided(topic)
            if value is None or topic in self._told:
                return
            self._told.add(topic)
        self.on_decision(topic, value)
        self.notify()

    # -- coming, going, waiting ------------------------------------------------------------------

    def hear(self, rank: int, kind: str, message: Message) -> None:
        """Take in what a member says."""
        if kind == "left":
            self.left.add(rank)
        elif kind == "part":
            self._parts[message["topic"]] = message["value"]
        else:
            self._hear(rank, message["topic"], message["step"], message["value"])
        self.notify()

    def _hear(self, rank: int, topic: str, step: int, value: str) -> None:
        with self._guard:
            self._talk(topic).hear(rank, step, value)
            self._moved[topic] = time.monotonic()
        self._announce(topic)

    def leave(self, away: Iterable[int]) -> None:
        """Tell that this rank closes the group: ranks that are `away`, or all if there is need.

        Host mates see it in shared memory, but not whether all has come that was said before.
        """
        self._send(self._others if self._talks else away, {"kind": "left"})

    def lost(self, rank: int) -> str | None:
        """Return why a member's line has ended, or None."""
        return self._control.lost(self.members[rank])

    def until(self, ready: Callable[[], bool], timeout: float) -> bool:
        """Block until something is `ready`, at most so long; say whether it is."""
        with self._news:
            return self._news.wait_for(ready, timeout)

    def notify(self) -> None:
        """Have all who wait look again."""
        with self._news:
            self._news.notify_all()

    def _send(self, ranks: Iterable[int], message: Message) -> None:
        message |= {"group": self._name, "rank": self.rank}
        self._control.send([self.members[rank] for rank in ranks], message)


def ignored(topic: str, value: str) -> None:
    """Do nothing about a decision."""


def suspects(value: str) -> list[int]:
    """Return who may be silent, as a value says: who goes on `without` whom, or why all fail."""
    try:
        said = json.loads(value)
        return list(said["without"]) if "without" in said else [said["fields"]["rank"]]
    except (ValueError, RecursionError, LookupError, TypeError):
        return []
