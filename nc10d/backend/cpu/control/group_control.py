"""Control messages within a group: published values, consensus, announcements of leaving.

A published value is a text under a key, sent to all members. Each member writes its own keys, once.
A consensus (consensus.py) decides a value for a topic, the same on all live members.

A topic on a member:

| state | next |
|---|---|
| unknown | open, when a member proposes a value or a message about the topic arrives |
| open | decided; meanwhile silent and gone members are dismissed, see below |
| decided | announced once through `on_decision`, by the thread that finds the decision |

An open topic dismisses the members that are awaited:

| member | dismissed after |
|---|---|
| has left, or its connection has ended | no delay |
| is known to have died or left otherwise; or the value itself expects it to be silent | SOON |
| any other | PATIENCE; after the first such dismissal SOON, if it has sent nothing on the topic |

Invariant: a member that has left, or whose connection has ended, is dismissed only after all its
messages have been processed: the member may have decided before leaving.

Messages use control connections only. The control thread receives them and calls `overdue`; any
thread may publish, propose and wait.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from nc10d.backend.cpu.control.connections import ControlConnections, Message
from nc10d.backend.cpu.control.consensus import Consensus
from nc10d.base.deadline import Deadline, monotonic
from nc10d.base.signal_errors import Condition
from nc10d.errors import StoreTimeout

PATIENCE = 1.0
"""Seconds of silence after which a consensus continues without a rank that seems to live."""
SOON = 0.05
"""The same for ranks that are not expected to answer."""
_SLICE = 0.02

Ranks = set[int]


class GroupControl:
    """A member's control messages with the other members of its group; ranks are the group's."""

    def __init__(
        self,
        name: str,
        members: Sequence[int],
        rank: int,
        control: ControlConnections,
        gone: Callable[[], Ranks],
    ) -> None:
        """`gone` returns the ranks that have died, have left or are unreachable."""
        self.members, self.rank = list(members), rank
        self.left: dict[int, str] = {}
        """The ranks that have announced that they leave the group, and why; "" if unknown."""
        self.on_decision: Callable[[str, str], None] = ignored
        self.on_value: Callable[[int, str, str], None] = lambda rank, key, value: None
        """Called as on_value(rank, key, value) by the control thread; must not block."""
        self._name, self._control, self._gone = name, control, gone
        self._others = [other for other in range(len(members)) if other != rank]
        self._topics: dict[str, Consensus] = {}
        self._progress_at: dict[str, float] = {}
        self._stalled: set[str] = set()
        self._announced: set[str] = set()
        self._values: dict[str, str] = {}
        self._lock = threading.RLock()
        self._changed = Condition()

    # -- published values ----------------------------------------------------------------------

    def set(self, key: str, value: str, to: Sequence[int] | None = None) -> None:
        """Publish a value to all members, or to the ranks `to`; never blocks."""
        self._values[key] = value
        others = self._others if to is None else to
        self._send(others, {"kind": "value", "key": key, "value": value})
        self.notify()

    def value(self, key: str) -> str | None:
        """Return a key's latest value, None if none has been published to this rank."""
        return self._values.get(key)

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all these keys have been published."""
        return all(key in self._values for key in keys)

    def wait(self, keys: Sequence[str], timeout: float) -> None:
        """Block until all these keys are published; StoreTimeout after `timeout` seconds."""
        if not self.until(partial(self.check, keys), timeout):
            raise StoreTimeout(f"group {self._name!r}: not all of {list(keys)} have been published")

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return published keys' values."""
        return [self._values[key].encode(errors="replace") for key in keys]

    # -- consensus -----------------------------------------------------------------------------

    def propose(self, topic: str, value: str) -> None:
        """Join the consensus on a topic; `value` counts unless another has come. Never blocks."""
        with self._lock:
            self._consensus(topic).propose(value)
            self._progress_at[topic] = monotonic()
        self._announce(topic)
        self._control.wake()

    def decided(self, topic: str) -> str | None:
        """Return the decision on a topic, or None."""
        consensus = self._topics.get(topic)
        return None if consensus is None else consensus.decision

    def decide(self, topic: str, value: str) -> str:
        """Propose a value, block until the decision (PATIENCE for a silent rank), return it."""
        self.propose(topic, value)
        while not self.until(lambda: self.decided(topic) is not None, PATIENCE):
            pass
        decision = self.decided(topic)
        assert decision is not None, "the loop has waited for it"
        return decision

    def overdue(self) -> float | None:
        """Dismiss gone and silent ranks; return the seconds until the next call, or None."""
        # The caller first processes all messages that have arrived. Otherwise a rank that was
        # stopped would take its own pause for the others' silence.
        with self._lock:
            pending = [topic for topic, consensus in self._topics.items() if consensus.awaited()]
            for topic in pending:
                self._dismiss_silent(topic, self._topics[topic])
        for topic in pending:
            self._announce(topic)
        return _SLICE if pending else None

    def _dismiss_silent(self, topic: str, consensus: Consensus) -> None:
        silent = monotonic() - self._progress_at[topic]
        unlikely = self._unlikely(topic, consensus) if silent > SOON else set()
        for rank in consensus.awaited():
            if silent > PATIENCE:
                self._stalled.add(topic)
            elif rank not in unlikely and not self._ended(rank):
                continue
            consensus.dismiss(rank)
            self._progress_at[topic] = monotonic()

    def _unlikely(self, topic: str, consensus: Consensus) -> Ranks:
        """Return the ranks that are not expected to answer: SOON is enough for them."""
        # A stopped host stops several ranks: waiting PATIENCE for the first is enough.
        stalled = topic in self._stalled
        silent = set(self._others if stalled else suspects(consensus.value)) - consensus.heard
        return silent | self._gone()

    def _consensus(self, topic: str) -> Consensus:
        """Return the consensus on a topic; a new consensus starts without ended ranks."""
        if topic not in self._topics:
            send = partial(self._send_step, topic)
            consensus = Consensus(range(len(self.members)), self.rank, send)
            self._topics[topic] = consensus
            for rank in filter(self._ended, self._others):
                consensus.dismiss(rank)
        return self._topics[topic]

    def _ended(self, rank: int) -> bool:
        return rank in self.left or self.lost(rank) is not None

    def _send_step(self, topic: str, ranks: Iterable[int], step: int, value: str) -> None:
        message = {"kind": "consensus", "topic": topic, "step": step, "value": value}
        self._send(ranks, message)

    def _announce(self, topic: str) -> None:
        """Report a decision to `on_decision` and to waiting threads, once."""
        with self._lock:
            value = self.decided(topic)
            if value is None or topic in self._announced:
                return
            self._announced.add(topic)
        self.on_decision(topic, value)
        self.notify()

    # -- receiving, leaving, waiting -----------------------------------------------------------

    def on_message(self, rank: int, kind: str, message: Message) -> None:
        """Process a member's message; called by the control thread."""
        if kind == "leave":
            self.left[rank] = str(message.get("why", ""))
        elif kind == "value":
            self._values[message["key"]] = message["value"]
            self.on_value(rank, message["key"], message["value"])
        else:
            topic = message["topic"]
            with self._lock:
                self._consensus(topic).receive(rank, message["step"], message["value"])
                self._progress_at[topic] = monotonic()
            self._announce(topic)
        self.notify()

    def leave(self, remote: Iterable[int], why: str = "") -> None:
        """Announce to the `remote` ranks, or to all if a topic exists, that this rank leaves."""
        # Local peers see the state in shared memory. But only a message behind all earlier messages
        # shows that those have arrived, and consensus needs to know that.
        self._send(self._others if self._topics else remote, {"kind": "leave", "why": why})

    def lost(self, rank: int) -> str | None:
        """Return why a member's connection has ended, or None."""
        return self._control.lost(self.members[rank])

    def until(self, ready: Callable[[], bool], timeout: float) -> bool:
        """Block until `ready()` or for `timeout` seconds; return whether ready."""
        found = self._changed.until(lambda: ready() or None, Deadline.after(timeout))
        return found is not None

    def notify(self) -> None:
        """Make all threads in `until` check again."""
        self._changed.notify_all()

    def _send(self, ranks: Iterable[int], message: Message) -> None:
        message |= {"group": self._name, "rank": self.rank}
        self._control.send([self.members[rank] for rank in ranks], message)


def ignored(topic: str, value: str) -> None:
    """Ignore a decision."""


def suspects(value: str) -> list[int]:
    """Return the ranks that a proposed value expects to be silent; [] if there are none."""
    # They are the ranks left out of a list of survivors, or the rank that a failure's cause blames.
    try:
        fields = json.loads(value)
        found = fields["without"] if "without" in fields else [fields["fields"]["rank"]]
        return [rank for rank in found if isinstance(rank, int)]
    except (ValueError, RecursionError, LookupError, TypeError):
        return []
