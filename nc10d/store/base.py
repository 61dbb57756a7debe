"""The interface of every store: keys, values, queues and waits, with the methods of torch's Store.

Keys are text. Values are returned as bytes; a str value is stored as UTF-8. The calls that block
are get, multi_get, wait, barrier and a blocking queue_pop. They take the store's timeout unless
given another, and raise StoreTimeout, which names the store and the keys. Any failure of the store
itself is a StoreError. Timeouts are seconds or datetime.timedelta.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

from nc10d.base.deadline import Timeout, seconds

Value = str | bytes | bytearray | memoryview
# A tuple: to build a union for each call would take longer than the call.
_BYTES = (bytes, bytearray, memoryview)
DEFAULT_TIMEOUT = timedelta(seconds=300)
MOST_KEY = 8191
"""The bytes of the longest key: the limit of torch's server too."""


class Store:
    """A key-value store that the ranks of a job share; the base of nc10d's stores and of a user's.

    Any thread may call: groups form on another thread. A subclass need not have all methods.
    Those that it lacks raise NotImplementedError, but for append, multi_get and multi_set, which
    call compare_set, get and set.
    """

    _seconds: float = DEFAULT_TIMEOUT.total_seconds()

    @property
    def timeout(self) -> timedelta:
        """How long a call waits that is given no timeout; timedelta.max for ever."""
        return timedelta.max if math.isinf(self._seconds) else timedelta(seconds=self._seconds)

    def set_timeout(self, timeout: Timeout) -> None:
        """Set the timeout of calls without their own (None: for ever)."""
        self._seconds = seconds(timeout)

    def has_extended_api(self) -> bool:
        """Return whether append, multi_get and multi_set are the store's own."""
        return False

    def _lacks(self, name: str) -> NotImplementedError:
        return NotImplementedError(f"Not implemented. {type(self).__name__} has no method {name}")

    def set(self, key: str, value: Value) -> None:
        """Store `value` under `key`, replacing any earlier value; wakes the key's waiters."""
        raise self._lacks("set")

    def get(self, key: str) -> bytes:
        """Return the value under `key`; blocks until the key exists."""
        raise self._lacks("get")

    def add(self, key: str, amount: int) -> int:
        """Add to the decimal number under `key` (0 if missing) and return the sum (64 bits).

        NotANumberError if the stored value is not a decimal number; that value stays.
        """
        raise self._lacks("add")

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all `keys` exist (a queue exists unless empty); never blocks."""
        raise self._lacks("check")

    def wait(self, keys: Sequence[str], timeout: Timeout = None) -> None:
        """Block until all `keys` exist; `timeout` None means the store's timeout."""
        raise self._lacks("wait")

    def compare_set(self, key: str, expected: Value, desired: Value) -> bytes:
        """Store `desired` if the current value is `expected` (a missing key matches an empty one).

        Return the value stored after the call, or `expected` if the key is still missing.
        """
        raise self._lacks("compare_set")

    def append(self, key: str, value: Value) -> None:
        """Append to the value under `key`; a missing key counts as empty.

        By compare_set alone, as in torch: of two callers that append the same value at the same
        time, one may have no effect.
        """
        tail = encode_value(value)
        while True:
            before = self.compare_set(key, b"", b"")  # the value; an empty one if there was none
            if self.compare_set(key, before, before + tail) == before + tail:
                return

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of all `keys`, in their order; blocks until all exist."""
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[Value]) -> None:
        """Store each value under its key; ValueError unless both have the same length."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, encode_value(value))

    def delete_key(self, key: str) -> bool:
        """Remove the value under `key` (a queue stays); return whether there was a value."""
        raise self._lacks("delete_key")

    def num_keys(self) -> int:
        """Return how many keys hold a value, over all prefixes; queues are not counted."""
        raise self._lacks("num_keys")

    def list_keys(self) -> list[str]:
        """Return the keys that hold a value, in no particular order."""
        raise self._lacks("list_keys")

    def queue_push(self, key: str, value: Value) -> None:
        """Append `value` to the queue under `key`; wakes callers that wait for the key."""
        raise self._lacks("queue_push")

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Take the oldest value off the queue under `key`.

        Blocks until the queue has a value; without `block`, an empty queue raises QueueEmptyError.
        """
        raise self._lacks("queue_pop")

    def queue_len(self, key: str) -> int:
        """Return the length of the queue under `key`."""
        raise self._lacks("queue_len")

    def barrier(self, key: str, world_size: int, timeout: Timeout = None) -> None:
        """Block until `world_size` calls in total have been made with this `key`.

        The key's value counts the calls and is never reset: each barrier needs a key of its own.
        NotANumberError if the key holds another value.
        """
        raise self._lacks("barrier")

    def clone(self) -> Store:
        """Return a store on the same keys, for another thread to use at the same time."""
        raise self._lacks("clone")

    def close(self) -> None:
        """Release this store's resources; idempotent. The keys stay visible to others."""


_ADAPTERS: dict[type, Callable[[Any], Store]] = {}


def register_store_type(kind: type, adapt: Callable[[Any], Store]) -> None:
    """Let `adapt` make stores of `kind`, another library's, into stores of nc10d."""
    _ADAPTERS[kind] = adapt


def as_own_store(store: Any) -> Store:
    """Return `store` as a store of nc10d, by an adapter if another library made it.

    TypeError for a store of torch's without `import nc10d.torch`, and for what is no store.
    """
    if isinstance(store, Store):
        return store
    for kind in type(store).__mro__:
        if kind in _ADAPTERS:
            return _ADAPTERS[kind](store)
    if type(store).__module__.startswith("torch."):
        raise TypeError(f"{type(store).__name__} is a store of torch's: `import nc10d.torch` first")
    if not (hasattr(store, "get") and hasattr(store, "set")):
        raise TypeError(f"expected a store, got {type(store).__name__}")
    duck: Store = store  # a user's class with a store's methods
    return duck


def encode_key(key: str) -> bytes:
    """Return `key` as bytes; TypeError if it is not text, ValueError if it is too long."""
    if not isinstance(key, str):
        raise not_text_error(key)
    name = key.encode("utf-8", "surrogateescape")
    if len(name) > MOST_KEY:
        shown = getattr(key, "given", key)[:40]
        raise ValueError(
            f"a key has at most {MOST_KEY} bytes in UTF-8, the prefixes of its stores included, "
            f"not {len(name)}: {shown!r}..."
        )
    return name


def not_text_error(key: object) -> TypeError:
    """Return the TypeError for a key that is not text."""
    return TypeError(f"a key must be str, not {type(key).__name__}")


def key_list(keys: Iterable[str]) -> list[str]:
    """Return `keys` as a list; TypeError for a lone string, which is a sequence of letters."""
    if isinstance(keys, str | bytes):
        raise TypeError(f"expected a sequence of keys, not the single {keys!r}")
    return keys if isinstance(keys, list) else [*keys]


def encode_keys(keys: Sequence[str]) -> list[bytes]:
    """Return `keys` as bytes; errors as of `key_list` and `encode_key`."""
    return [encode_key(key) for key in key_list(keys)]


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
    """Return encoded (key, value) pairs; ValueError unless both have the same length."""
    names, values = encode_keys(keys), [*values]
    if len(names) != len(values):
        raise ValueError(f"{len(names)} keys but {len(values)} values")
    return list(zip(names, map(encode_value, values), strict=True))
