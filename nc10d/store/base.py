"""What a store is: strings to bytes, shared by ranks, with waits for what is not there yet.

The methods and their edge cases are c10d's. A value is str (stored as UTF-8) or bytes, and always
comes back as bytes. A queue lives beside the value of the same key; a queue that is not empty
counts as a key for `check` and `wait`, not for `num_keys` and `list_keys`. Reading what is not
there waits for it, up to the store's timeout. Unless a class says otherwise, a store may be used
from several threads.

Errors: StoreTimeout when a wait ends without its keys, StoreError when the store can't be reached
or refuses; both name the store and the keys.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import timedelta

from nc10d.deadline import Deadline, Timeout, seconds
from nc10d.errors import StoreError, StoreTimeout

DEFAULT_TIMEOUT = 300.0
"""Seconds that a store's calls wait when nobody says otherwise; c10d's value."""

_NAMED_KEYS = 8


class QueueEmpty(StoreError):
    """`queue_pop(key, block=False)` found nothing."""


class Store(ABC):
    """Values by key, for all who hold this store; see the module for the rules."""

    _timeout: float = DEFAULT_TIMEOUT

    @abstractmethod
    def set(self, key: str, value: str | bytes) -> None:
        """Store `value`, whatever was there."""

    @abstractmethod
    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of `keys`, in their order; blocks until all are there."""

    @abstractmethod
    def add(self, key: str, amount: int) -> int:
        """Add to the decimal number at `key` (missing: 0) and return the sum.

        A value that is no number is a ValueError, or a StoreError where another process finds it.
        """

    @abstractmethod
    def check(self, keys: Sequence[str]) -> bool:
        """Say whether all `keys` are there; never blocks for them."""

    @abstractmethod
    def wait(self, keys: Sequence[str], timeout: Timeout = None) -> None:
        """Block until all `keys` are there; no `timeout` means the store's own."""

    @abstractmethod
    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Store `desired` if the value is `expected`; return the value that then stands.

        A missing key counts as an empty expectation: it is set if `expected` is empty, and else
        `expected` is returned and nothing stored.
        """

    @abstractmethod
    def append(self, key: str, value: str | bytes) -> None:
        """Put `value` behind what is at `key` (missing: empty)."""

    @abstractmethod
    def delete_key(self, key: str) -> bool:
        """Remove a value; say whether it was there."""

    @abstractmethod
    def num_keys(self) -> int:
        """Return the number of values, everybody's and of every prefix."""

    @abstractmethod
    def list_keys(self) -> list[str]:
        """Return the keys that have values, in no order."""

    @abstractmethod
    def queue_push(self, key: str, value: str | bytes) -> None:
        """Put `value` at the end of the queue `key`."""

    @abstractmethod
    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Take the oldest value of the queue; if empty, wait, or raise QueueEmpty."""

    @abstractmethod
    def queue_len(self, key: str) -> int:
        """Return how many values the queue holds."""

    @abstractmethod
    def barrier(self, key: str, world_size: int, timeout: Timeout = None) -> None:
        """Block until `world_size` calls have been made on `key`.

        The calls are counted in the value of `key` and never taken back: a barrier's key serves
        once.
        """

    @abstractmethod
    def clone(self) -> Store:
        """Return another handle on the same values, for another thread or another timeout."""

    def get(self, key: str) -> bytes:
        """Return the value of `key`; blocks until it is there."""
        return self.multi_get([key])[0]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Store each value under its key."""
        for key, value in paired(keys, values):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        """Say that append, multi_get, multi_set and queues are there: always."""
        return True

    def set_timeout(self, timeout: Timeout) -> None:
        """Let calls on this handle wait for `timeout` (seconds or timedelta; None: for ever)."""
        self._timeout = seconds(timeout)

    @property
    def timeout(self) -> timedelta:
        """How long calls on this handle wait; timedelta.max for ever."""
        forever = math.isinf(self._timeout)
        return timedelta.max if forever else timedelta(seconds=self._timeout)

    def close(self) -> None:
        """Give back what this handle holds; idempotent. The values stay for the others."""

    def _deadline(self, timeout: Timeout = None) -> Deadline:
        return Deadline.after(self._timeout if timeout is None else timeout)

    def _timed_out(
        self, limit: float, keys: Sequence[str], what: str = "waiting for"
    ) -> StoreError:
        return StoreTimeout(f"{self!r}: timed out after {limit:g} s {what} {named(keys)}")


def named(keys: Sequence[str]) -> str:
    """Say the keys in an error, the first few of many."""
    some = ", ".join(map(repr, keys[:_NAMED_KEYS]))
    more = f" and {len(keys) - _NAMED_KEYS} more" if len(keys) > _NAMED_KEYS else ""
    return f"key{'s' if len(keys) != 1 else ''} {some}{more}"


def as_bytes(value: str | bytes) -> bytes:
    """Return a value as it is stored; TypeError for what is neither str nor bytes."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode()
    raise TypeError(f"a store's values are str or bytes, not {type(value).__name__}")


def as_number(key: str, value: bytes) -> int:
    """Return the number that `add` finds at `key`; ValueError if it is none."""
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"add: the value of {key!r} is not a number: {value[:40]!r}") from None


def paired(keys: Sequence[str], values: Sequence[str | bytes]) -> list[tuple[str, str | bytes]]:
    """Return (key, value) pairs; ValueError if there are not as many of each."""
    if len(keys) != len(values):
        raise ValueError(f"multi_set: {len(keys)} keys, but {len(values)} values")
    return list(zip(keys, values, strict=True))
