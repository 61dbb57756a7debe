"""How a failed group's simulated ranks agree on the next group's members: `shrink_group`.

A published value reaches each member after a separate delay. A proposal goes to the lowest-ranked
member that is not known to be dead. The first that arrives there is the decision, which goes to all
members. If that member dies first, the proposals go to the next.
"""

# ruff: noqa: D102  (SurvivorControl documents the methods)
from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from nc10d.testing.simulated.virtual_time import RankTask, Scheduler

Delay = Callable[[int, int], float]
"""Returns the seconds that a message takes now, from a rank in the job to another."""
RETRY_SECONDS = 0.1


class Announcements:
    """A group's published values and decisions, as far as each member has heard of them."""

    def __init__(self, scheduler: Scheduler, delay: Delay, changed: list[RankTask]) -> None:
        self.scheduler, self._delay, self.changed = scheduler, delay, changed
        self.members: dict[int, int] = {}
        """Each member's rank in the job, by its rank in the group."""
        self.gone: set[int] = set()
        """Members that all others know to be dead, or to have returned."""
        self.heard: dict[int, dict[str, str]] = {}
        self._decisions: dict[str, str] = {}

    def publish(self, src: int, key: str, value: str) -> None:
        """Let all members hear of a value, each after a delay."""
        for dst in self.members:
            self._send(src, dst, partial(self._hear, dst, key, value))

    def propose(self, src: int, topic: str, value: str) -> None:
        """Send a proposal to the member that decides."""
        first = min(member for member in self.members if member not in self.gone)
        self._send(src, first, partial(self._decide, first, topic, value))

    def _decide(self, first: int, topic: str, value: str) -> None:
        if first not in self.gone:
            decision = self._decisions.setdefault(topic, value)
            self.publish(first, f"decision/{topic}", decision)

    def _send(self, src: int, dst: int, action: Callable[[], None]) -> None:
        seconds = 0.0 if src == dst else self._delay(self.members[src], self.members[dst])
        self.scheduler.at(self.scheduler.now + seconds, action)

    def _hear(self, dst: int, key: str, value: str) -> None:
        self.heard.setdefault(dst, {})[key] = value
        self.scheduler.wake_all(self.changed)


class SimulatedControl:
    """A member's part in the agreement: nc10d.group.shrink.SurvivorControl."""

    def __init__(self, announcements: Announcements, rank: int, size: int) -> None:
        self.members, self.rank = [*range(size)], rank
        self._announcements = announcements
        self._heard = announcements.heard.setdefault(rank, {})

    def set(self, key: str, value: str, /) -> None:
        self._announcements.publish(self.rank, key, value)

    def check(self, keys: Sequence[str], /) -> bool:
        return all(key in self._heard for key in keys)

    def multi_get(self, keys: Sequence[str], /) -> list[bytes]:
        return [self._heard[key].encode() for key in keys]

    def decided(self, topic: str, /) -> str | None:
        return self._heard.get(f"decision/{topic}")

    def decide(self, topic: str, value: str, /) -> str:
        while (decision := self.decided(topic)) is None:
            self._announcements.propose(self.rank, topic, value)
            self.until(lambda: self.decided(topic) is not None, RETRY_SECONDS)
        return decision

    def until(self, ready: Callable[[], bool], timeout: float, /) -> bool:
        scheduler = self._announcements.scheduler
        until = scheduler.now + timeout
        return scheduler.wait(ready, until, self._announcements.changed)
