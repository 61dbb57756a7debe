"""What every store is: keys, values, queues and waits, with the method set of torch's Store.

Keys are text, values come back as bytes; a str value is stored as UTF-8. Every call that waits
(get, multi_get, wait, barrier, a blocking queue_pop) has a timeout, the store's own unless it is
given, and raises StoreTimeout naming the store and the keys; any failure of the store itself is
a StoreError. Timeouts are seconds or datetime.timedelta.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import timedelta

from nc10d.base.deadline import Timeout, seconds

Value = str | bytes | bytearray | memoryview
_BYTES = (bytes, bytearray, memoryview)  # a union made for each call takes longer than the call
DEFAULT_TIMEOUT = timedelta(seconds=300)
MOST_KEY = 8191
"""The bytes of the longest key; what torch's server takes, too."""


class Store(ABC):
    """A key-value store that the ranks of a job share."""

    _seconds: float = DEFAULT_TIMEOUT.total_seconds()

    @property
    def timeout(self) -> timedelta:
        """How long a call waits that is given no timeout of its own."""
        return timedelta.max if math.isinf(self._seconds) else timedelta(seconds=self._seconds)

    def set_timeout(self, timeout: Timeout) -> None:
        """Set how long calls wait that are given no timeout (None: for ever)."""
        self._seconds = seconds(timeout)

    def has_extended_api(self) -> bool:
        """Say that append, multi_get and multi_set are there: always True."""
        return True

    @abstractmethod
    def set(self, key: str, value: Value) -> None:
        """Store `value` under `key`, in place of what was there; wakes who waits for the key."""

    @abstractmethod
    def get(self, key: str) -> bytes:
        """Return the value under `key`; blocks until there is one."""

    @abstractmethod
    def add(self, key: str, amount: int) -> int:
        """Add to the decimal number under `key` (0 if missing) and return the sum (64 bits).

        NotANumberError if what is stored there is no such number; it stays as it was.
        """

    @abstractmethod
    def check(self, keys: Sequence[str]) -> bool:
        """Say whether all `keys` are there (a queue counts if it is not empty); never blocks."""

    @abstractmethod
    def wait(self, keys: Sequence[str], timeout: Timeout = None) -> None:
        """Block until all `keys` are there; None is the store's timeout."""

    @abstractmethod
    def compare_set(self, key: str, expected: Value, desired: Value) -> bytes:
        """Store `desired` if `expected` is stored (or nothing, and it is empty).

        Returns what is stored then; if nothing is, `expected`.
        """

    @abstractmethod
    def append(self, key: str, value: Value) -> None:
        """Append to the value under `key`, which begins empty."""

    @abstractmethod
    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of all `keys`, in their order; blocks until all are there."""

    @abstractmethod
    def multi_set(self, keys: Sequence[str], values: Sequence[Value]) -> None:
        """Store values under keys, pairwise; ValueError if there are not as many of both."""

    @abstractmethod
    def delete_key(self, key: str) -> bool:
        """Remove the value under `key` (a queue stays); say whether there was one."""

    @abstractmethod
    def num_keys(self) -> int:
        """Return how many keys hold a value; queues and what is behind prefixes included not."""

    @abstractmethod
    def list_keys(self) -> list[str]:
        """Return the keys that hold a value, in no particular order."""

    @abstractmethod
    def queue_push(self, key: str, value: Value) -> None:
        """Append `value` to the queue under `key`; wakes one who waits for it."""

    @abstractmethod
    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Take the oldest value off the queue under `key`.

        Blocks until there is one; without `block`, an empty queue raises QueueEmptyError.
        """

    @abstractmethod
    def queue_len(self, key: str) -> int:
        """Return the length of the queue under `key`."""

    @abstractmethod
    def barrier(self, key: str, world_size: int, timeout: Timeout = None) -> None:
        """Block until `world_size` calls in all have been made with this `key`.

        Calls are counted in the key's value and never taken back: a key serves one barrier.
        NotANumberError if something else is stored there.
        """

    @abstractmethod
    def clone(self) -> Store:
        """Return a store on the same keys, for use by another thread beside this one."""

    def close(self) -> None:  # noqa: B027 (most stores hold on to nothing)
        """Give back what this store holds on to; idempotent. Keys stay where others see them."""


def encode_key(key: str) -> bytes:
    """Return `key` as bytes; TypeError if it is not text, ValueError if it is too long."""
    if not isinstance(key, str):
        raise not_text(key)
    name = key.encode("utf-8", "surrogateescape")
    if len(name) > MOST_KEY:
        raise ValueError(
            f"a key has at most {MOST_KEY} bytes in UTF-8, not {len(name)}: {key[:40]!r}..."
        )
    return name


def not_text(key: object) -> TypeError:
    """Return what to raise for a key that is no text."""
    return TypeError(f"a key must be str, not {type(key).__name__}")


def encode_keys(keys: Sequence[str]) -> list[bytes]:
    """Return `keys` as bytes; TypeError for a lone string, which is a sequence of letters."""
    if isinstance(keys, str | bytes):
        raise TypeError(f"expected a sequence of keys, not the single {keys!r}")
    return [encode_key(key) for key in keys]


def decode_key(key: bytes) -> str:
    """Undo encode_key."""
    return key.decode("utf-8", "surrogateescape")


def encode_value(value: Value) -> bytes:
    """Return `value` as bytes, text as UTF-8; TypeError for anything else."""
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, _BYTES):
        return bytes(value)
    raise TypeError(f"a value must be str or bytes, not {type(value).__name__}")


def pair(keys: Sequence[str], values: Sequence[Value]) -> list[tuple[bytes, bytes]]:
    """Return keys and values side by side, encoded; ValueError if they are not as many."""
    if len(keys) != len(values):
        raise ValueError(f"{len(keys)} keys but {len(values)} values")
    return list(zip(encode_keys(keys), map(encode_value, values), strict=True))
