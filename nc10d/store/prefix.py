"""A part of another store, with keys of its own: every key gets a prefix in front."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from nc10d.deadline import Timeout
from nc10d.store.base import Store


class PrefixStore(Store):
    """`store` with "prefix/" before every key; nests. As fit for threads as `store` is.

    The timeout is the inner store's own, as in c10d: setting it here sets it there. `num_keys`
    counts all of the inner store's keys; `list_keys` gives this prefix's, without it. `close`
    leaves the inner store open: it belongs to whoever made it.
    """

    def __init__(self, prefix: str, store: Store) -> None:
        self.prefix = prefix
        self._store = store
        self._front = f"{prefix}/"

    def __repr__(self) -> str:
        return f"PrefixStore({self.prefix!r}, {self._store!r})"

    @property
    def underlying_store(self) -> Store:
        """The store that this is a part of; itself a PrefixStore where they nest."""
        return self._store

    @property
    def timeout(self) -> timedelta:
        """How long calls wait: the inner store's."""
        return self._store.timeout

    def set_timeout(self, timeout: Timeout) -> None:
        """Set the inner store's timeout."""
        self._store.set_timeout(timeout)

    def set(self, key: str, value: str | bytes) -> None:
        """Store `value`, whatever was there."""
        self._store.set(self._front + key, value)

    def get(self, key: str) -> bytes:
        """Return the value of `key`; blocks until it is there."""
        return self._store.get(self._front + key)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Store each value under its key."""
        self._store.multi_set(self._all(keys), values)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of `keys`, in their order; blocks until all are there."""
        return self._store.multi_get(self._all(keys))

    def add(self, key: str, amount: int) -> int:
        """Add to the decimal number at `key` and return the sum."""
        return self._store.add(self._front + key, amount)

    def check(self, keys: Sequence[str]) -> bool:
        """Say whether all `keys` are there."""
        return self._store.check(self._all(keys))

    def wait(self, keys: Sequence[str], timeout: Timeout = None) -> None:
        """Block until all `keys` are there; no `timeout` means the store's own."""
        self._store.wait(self._all(keys), timeout)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Store `desired` if the value is `expected`; return the value that then stands."""
        return self._store.compare_set(self._front + key, expected, desired)

    def append(self, key: str, value: str | bytes) -> None:
        """Put `value` behind what is at `key`."""
        self._store.append(self._front + key, value)

    def delete_key(self, key: str) -> bool:
        """Remove a value; say whether it was there."""
        return self._store.delete_key(self._front + key)

    def num_keys(self) -> int:
        """Return the number of values in the whole inner store."""
        return self._store.num_keys()

    def list_keys(self) -> list[str]:
        """Return the keys under this prefix, without it."""
        cut = len(self._front)
        return [key[cut:] for key in self._store.list_keys() if key.startswith(self._front)]

    def queue_push(self, key: str, value: str | bytes) -> None:
        """Put `value` at the end of the queue `key`."""
        self._store.queue_push(self._front + key, value)

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Take the oldest value of the queue; if empty, wait, or raise QueueEmpty."""
        return self._store.queue_pop(self._front + key, block)

    def queue_len(self, key: str) -> int:
        """Return how many values the queue holds."""
        return self._store.queue_len(self._front + key)

    def barrier(self, key: str, world_size: int, timeout: Timeout = None) -> None:
        """Block until `world_size` calls have been made on `key`."""
        self._store.barrier(self._front + key, world_size, timeout)

    def clone(self) -> PrefixStore:
        """Return this prefix of a clone of the inner store."""
        return PrefixStore(self.prefix, self._store.clone())

    def has_extended_api(self) -> bool:
        """Say what the inner store says."""
        return self._store.has_extended_api()

    def _all(self, keys: Sequence[str]) -> list[str]:
        return [self._front + key for key in keys]
