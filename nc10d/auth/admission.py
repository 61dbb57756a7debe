"""Who is at a door and has proved nothing yet: for how long, and how many at a time. Pure.

A guest has two seconds; those who are too many push out who has been there longest, so that a flood
of strangers keeps nobody out.
"""

from __future__ import annotations

from itertools import takewhile
from typing import Generic, TypeVar

from nc10d.auth.handshake import STRANGER_SECONDS

Guest = TypeVar("Guest")


class Admission(Generic[Guest]):
    """At most so many guests; `now` is any clock's, the same for all calls."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._until: dict[Guest, float] = {}  # who came first is first

    def __contains__(self, guest: object) -> bool:
        return guest in self._until

    def welcome(self, guest: Guest, now: float) -> Guest | None:
        """Take a guest in; return the one who has to go for it, if there are too many."""
        self._until[guest] = now + STRANGER_SECONDS
        return next(iter(self._until)) if len(self._until) > self._most else None

    def leave(self, guest: Guest) -> None:
        """Forget somebody who has proved itself, or has gone; others don't matter."""
        self._until.pop(guest, None)

    def late(self, now: float) -> list[Guest]:
        """Return those whose time is over."""
        return [guest for guest, _ in takewhile(lambda one: one[1] <= now, self._until.items())]

    def patience(self, now: float) -> float | None:
        """Return the time until the next one's is over; None where there is nobody."""
        return next((until - now for until in self._until.values()), None)
