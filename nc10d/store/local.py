"""The base of stores whose values are in this process, FileStore and HashStore; and HashStore.

`LocalStore` implements all methods of `Store`. A subclass implements exclusive access to the values
(`_access`) and the wait for a change (`_until`).
"""

# ruff: noqa: D102  (Store documents the methods)
from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

from nc10d.base.deadline import Deadline, Timeout, seconds
from nc10d.base.signal_errors import Condition
from nc10d.base.text import in_seconds
from nc10d.errors import QueueEmptyError, StoreTimeout
from nc10d.store.base import Store, Value, decode_key, encode_key, encode_keys, encode_value, pair
from nc10d.store.store_errors import keys_text, not_a_number_error
from nc10d.store.values import NotANumber, Values
from nc10d.store.wire import i64

T = TypeVar("T")


class LocalStore(Store):
    """A store over a Values object of this process."""

    @abstractmethod
    def _access(self) -> AbstractContextManager[Values]:
        """Give this thread exclusive access to the values; at the end others see its changes."""

    @abstractmethod
    def _until(self, ready: Callable[[Values], T | None], deadline: Deadline) -> T | None:
        """Call `ready` with exclusive access, after each change, until it does not return None.

        Return its result, or None at the deadline.
        """

    @abstractmethod
    def _name(self) -> str:
        """Return this store's name in error messages."""

    def _await(
        self, ready: Callable[[Values], T | None], keys: Sequence[str], timeout: Timeout = None
    ) -> T:
        limit = self._seconds if timeout is None else seconds(timeout)
        found = self._until(ready, Deadline.after(limit))
        if found is None:
            text = f"timeout after {in_seconds(limit)}: waited in vain"
            raise StoreTimeout(f"{self._name()}{keys_text(keys)}: {text}")
        return found

    def has_extended_api(self) -> bool:
        return True

    def set(self, key: str, value: Value) -> None:
        with self._access() as values:
            values.put(encode_key(key), encode_value(value))

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def add(self, key: str, amount: int) -> int:
        name, _ = encode_key(key), i64(amount)
        with self._access() as values, self._numbers(key):
            return values.add(name, amount)

    @contextmanager
    def _numbers(self, key: str) -> Iterator[None]:
        try:
            yield
        except NotANumber as error:
            raise not_a_number_error(self._name(), key, error.args[0]) from error

    def check(self, keys: Sequence[str]) -> bool:
        names = encode_keys(keys)
        with self._access() as values:
            return all(map(values.exists, names))

    def wait(self, keys: Sequence[str], timeout: Timeout = None) -> None:
        names = encode_keys(keys)
        self._await(lambda values: all(map(values.exists, names)) or None, keys, timeout)

    def compare_set(self, key: str, expected: Value, desired: Value) -> bytes:
        with self._access() as values:
            return values.compare_set(
                encode_key(key), encode_value(expected), encode_value(desired)
            )

    def append(self, key: str, value: Value) -> None:
        with self._access() as values:
            values.extend(encode_key(key), encode_value(value))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        names = encode_keys(keys)

        def found(values: Values) -> list[bytes] | None:
            if not all(map(values.exists, names)):
                return None
            return [values.data.get(name, b"") for name in names]

        return self._await(found, keys)

    def multi_set(self, keys: Sequence[str], values: Sequence[Value]) -> None:
        pairs = pair(keys, values)
        with self._access() as held:
            for key, value in pairs:
                held.put(key, value)

    def delete_key(self, key: str) -> bool:
        with self._access() as values:
            return values.remove(encode_key(key))

    def num_keys(self) -> int:
        with self._access() as values:
            return len(values.data)

    def list_keys(self) -> list[str]:
        with self._access() as values:
            return [decode_key(key) for key in values.data]

    def queue_push(self, key: str, value: Value) -> None:
        with self._access() as values:
            values.push(encode_key(key), encode_value(value))

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        name = encode_key(key)
        if block:
            return self._await(lambda values: values.pop(name), [key])
        with self._access() as values:
            value = values.pop(name)
        if value is None:
            raise QueueEmptyError(f"{self._name()}: the queue {key!r} is empty")
        return value

    def queue_len(self, key: str) -> int:
        with self._access() as values:
            return values.queued(encode_key(key))

    def barrier(self, key: str, world_size: int, timeout: Timeout = None) -> None:
        name, _ = encode_key(key), i64(world_size)
        with self._numbers(key):
            with self._access() as values:
                values.add(name, 1)
            self._await(lambda values: values.number(name) >= world_size or None, [key], timeout)


class HashStore(LocalStore):
    """A store that threads of one process share; a call that waits delays no other."""

    def __init__(self) -> None:
        self._values = Values()
        self._changed = Condition()

    def __repr__(self) -> str:
        return "HashStore()"

    def _name(self) -> str:
        return "the hash store"

    @contextmanager
    def _access(self) -> Iterator[Values]:
        with self._changed:
            try:
                yield self._values
            finally:
                self._changed.notify_all()

    def _until(self, ready: Callable[[Values], T | None], deadline: Deadline) -> T | None:
        with self._changed:
            while (found := ready(self._values)) is None and not deadline.expired():
                self._changed.wait(deadline.slice(threading.TIMEOUT_MAX))
            return found

    def clone(self) -> HashStore:
        twin = HashStore()
        twin._values, twin._changed = self._values, self._changed
        twin._seconds = self._seconds
        return twin
