"""Limit the connections that have not proved yet that they know the token. Pure.

Such a connection has two seconds for its handshake. If there are too many, a new connection
displaces the oldest, so that a flood of connections keeps no rank out.
"""

from __future__ import annotations

from itertools import takewhile
from typing import Generic, TypeVar

from nc10d.auth.handshake import UNPROVEN_SECONDS

T = TypeVar("T")


class Admission(Generic[T]):
    """At most `most` unproven connections; `now` is in seconds, of the same clock in all calls."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._until: dict[T, float] = {}  # in order of arrival

    def __contains__(self, connection: object) -> bool:
        return connection in self._until

    def admit(self, connection: T, now: float) -> T | None:
        """Add a connection; if there are too many, return the oldest for the caller to close."""
        self._until[connection] = now + UNPROVEN_SECONDS
        return next(iter(self._until)) if len(self._until) > self._most else None

    def remove(self, connection: T) -> None:
        """Remove a connection that has proved itself or was closed; idempotent."""
        self._until.pop(connection, None)

    def overdue(self, now: float) -> list[T]:
        """Return the connections whose time is over; the caller must close them."""
        late = takewhile(lambda item: item[1] <= now, self._until.items())
        return [connection for connection, _ in late]

    def seconds_to_next(self, now: float) -> float | None:
        """Return the seconds until the next connection is overdue; None if there is none."""
        return next((until - now for until in self._until.values()), None)
