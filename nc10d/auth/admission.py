"""The limit on connections that have not yet proved themselves, in number and in time."""

from __future__ import annotations

from itertools import takewhile
from typing import Generic, TypeVar

UNPROVEN_SECONDS = 10.0
"""The time that a connection has to prove that its process knows the key.

TCP tries six times meanwhile, and survives a network that is gone for five seconds.
"""
T = TypeVar("T")


class Admission(Generic[T]):
    """Limits the connections that owe something: a proof, a greeting, the rest of a request.

    Each has `seconds` to deliver. If there are more than `most`, a new connection displaces the
    oldest, so that a flood of connections keeps no rank out. `now` is in seconds, by the same clock
    in all calls. No I/O.
    """

    def __init__(self, most: int, seconds: float = UNPROVEN_SECONDS) -> None:
        self._most, self._seconds = most, seconds
        self._until: dict[T, float] = {}  # in order of arrival

    def __contains__(self, connection: object) -> bool:
        return connection in self._until

    def __len__(self) -> int:
        return len(self._until)

    def admit(self, connection: T, now: float) -> T | None:
        """Add a connection; if there are too many, return the oldest for the caller to close."""
        self._until[connection] = now + self._seconds
        return next(iter(self._until)) if len(self._until) > self._most else None

    def remove(self, connection: T) -> None:
        """Remove a connection that owes nothing any more; idempotent."""
        self._until.pop(connection, None)

    def overdue(self, now: float) -> list[T]:
        """Return the connections whose time is over; the caller must close them."""
        late = takewhile(lambda item: item[1] <= now, self._until.items())
        return [connection for connection, _ in late]

    def seconds_to_next(self, now: float) -> float | None:
        """Return the seconds until the next connection is overdue; None if there is none."""
        return next((until - now for until in self._until.values()), None)
