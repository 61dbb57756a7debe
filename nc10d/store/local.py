"""The base of stores whose values are in this process, FileStore and HashStore; and HashStore.

`LocalStore` implements all methods of `Store`. A subclass implements exclusive access to the values
(`_exclusively`) and the wait for a change (`_until`).
"""

# ruff: noqa: D102  (Store documents the methods)
from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from nc10d.base.deadline import Deadline, Timeout, seconds
from nc10d.base.signal_errors import Condition
from nc10d.base.text import in_seconds
from nc10d.errors import QueueEmptyError, StoreTimeout
from nc10d.store.base import (
    Store,
    Value,
    decode_key,
    encode_key,
    encode_keys,
    encode_value,
    key_list,
    pair,
)
from nc10d.store.store_errors import keys_text, not_a_number_error
from nc10d.store.values import NotANumber, Values
from nc10d.store.wire import i64

T = TypeVar("T")


class LocalStore(Store):
    """A store over a Values object of this process."""

    # Not a context manager: what a signal's handler raises between the manager's entry and the
    # with-block would leave the values locked.
    @abstractmethod
    def _exclusively(self, act: Callable[[Values], T]) -> T:
        """Return `act` of the values, which no other thread uses meanwhile; others see changes."""

    @abstractmethod
    def _until(self, ready: Callable[[Values], T | None], deadline: Deadline) -> T | None:
        """Call `ready` with exclusive access, after each change, until the result is not None.

        Return that result, or None at the deadline.
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
        name, data = encode_key(key), encode_value(value)
        self._exclusively(lambda values: values.put(name, data))

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def add(self, key: str, amount: int) -> int:
        name, _ = encode_key(key), i64(amount)
        number = int(amount)  # NumPy's integers overflow
        with self._numbers(key):
            return self._exclusively(lambda values: values.add(name, number))

    @contextmanager
    def _numbers(self, key: str) -> Iterator[None]:
        try:
            yield
        except NotANumber as error:
            raise not_a_number_error(self._name(), key, error.args[0]) from error

    def check(self, keys: Sequence[str]) -> bool:
        names = encode_keys(keys)
        return self._exclusively(lambda values: all(map(values.exists, names)))

    def wait(self, keys: Sequence[str], timeout: Timeout = None) -> None:
        keys = key_list(keys)
        names = encode_keys(keys)
        self._await(lambda values: all(map(values.exists, names)) or None, keys, timeout)

    def compare_set(self, key: str, expected: Value, desired: Value) -> bytes:
        name, old, new = encode_key(key), encode_value(expected), encode_value(desired)
        return self._exclusively(lambda values: values.compare_set(name, old, new))

    def append(self, key: str, value: Value) -> None:
        name, tail = encode_key(key), encode_value(value)
        self._exclusively(lambda values: values.extend(name, tail))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        keys = key_list(keys)
        names = encode_keys(keys)

        def found(values: Values) -> list[bytes] | None:
            if not all(map(values.exists, names)):
                return None
            return [values.get(name) for name in names]

        return self._await(found, keys)

    def multi_set(self, keys: Sequence[str], values: Sequence[Value]) -> None:
        pairs = pair(keys, values)

        def put(held: Values) -> None:
            for key, value in pairs:
                held.put(key, value)

        self._exclusively(put)

    def delete_key(self, key: str) -> bool:
        name = encode_key(key)
        return self._exclusively(lambda values: values.remove(name))

    def num_keys(self) -> int:
        return self._exclusively(lambda values: len(values.data))

    def list_keys(self) -> list[str]:
        return [decode_key(key) for key in self._exclusively(lambda values: [*values.data])]

    def queue_push(self, key: str, value: Value) -> None:
        name, data = encode_key(key), encode_value(value)
        self._exclusively(lambda values: values.push(name, data))

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        name = encode_key(key)
        if block:
            return self._await(lambda values: values.pop(name), [key])
        value = self._exclusively(lambda values: values.pop(name))
        if value is None:
            raise QueueEmptyError(f"{self._name()}: the queue {key!r} is empty")
        return value

    def queue_len(self, key: str) -> int:
        name = encode_key(key)
        return self._exclusively(lambda values: values.queued(name))

    def barrier(self, key: str, world_size: int, timeout: Timeout = None) -> None:
        name, _ = encode_key(key), i64(world_size)
        with self._numbers(key):
            self._exclusively(lambda values: values.add(name, 1))
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

    def _exclusively(self, act: Callable[[Values], T]) -> T:
        return self._changed.change(lambda: act(self._values))

    def _until(self, ready: Callable[[Values], T | None], deadline: Deadline) -> T | None:
        return self._changed.until(lambda: ready(self._values), deadline)

    def clone(self) -> HashStore:
        twin = HashStore()
        twin._values, twin._changed = self._values, self._changed
        twin._seconds = self._seconds
        return twin
