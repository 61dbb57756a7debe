"""PrefixStore: a view of another store, in which every key has a prefix."""

# ruff: noqa: D102  (Store documents the methods)
from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from nc10d.base.deadline import Timeout
from nc10d.store.base import Store, Value, as_own_store, encode_value, key_list, not_text_error


class PrefixedKey(str):
    """A key behind the prefixes of its stores; errors show the repr of the `given` key."""

    __slots__ = ("given",)
    given: str

    def __repr__(self) -> str:
        return repr(self.given)


class PrefixStore(Store):
    """A view of `store` that puts `prefix/` before every key.

    As in torch, num_keys counts all keys of the underlying store, and the timeout is that store's.
    list_keys returns only this prefix's keys, without the prefix. `close` closes the underlying
    store only if the view was made with `closes`.
    """

    def __init__(self, prefix: str, store: Store, *, closes: bool = False) -> None:
        if store is None:
            raise ValueError("PrefixStore needs a store, not None")
        if not isinstance(prefix, str):
            raise TypeError(f"PrefixStore: the prefix must be text, got {type(prefix).__name__}")
        self._prefix = prefix + "/"
        self._store = as_own_store(store)
        self._closes = closes

    @property
    def underlying_store(self) -> Store:
        """The underlying store."""
        return self._store

    @property
    def _underlying_non_prefix_store(self) -> Store:
        """The underlying store without any prefix, by torch's name."""
        store = self._store
        return store._underlying_non_prefix_store if isinstance(store, PrefixStore) else store

    @property
    def timeout(self) -> timedelta:
        return self._store.timeout

    def set_timeout(self, timeout: Timeout) -> None:
        self._store.set_timeout(timeout)

    def has_extended_api(self) -> bool:
        return self._store.has_extended_api()

    def __repr__(self) -> str:
        return f"PrefixStore({self._prefix[:-1]!r}, {self._store!r})"

    def _full(self, key: str) -> str:
        try:
            full = PrefixedKey(self._prefix + key)
        except TypeError:
            raise not_text_error(key) from None
        full.given = getattr(key, "given", key)
        return full

    def _all(self, keys: Sequence[str]) -> list[str]:
        return [self._full(key) for key in key_list(keys)]

    def set(self, key: str, value: Value) -> None:
        self._store.set(self._full(key), encode_value(value))

    def get(self, key: str) -> bytes:
        return self._store.get(self._full(key))

    def add(self, key: str, amount: int) -> int:
        return self._store.add(self._full(key), amount)

    def check(self, keys: Sequence[str]) -> bool:
        return self._store.check(self._all(keys))

    def wait(self, keys: Sequence[str], timeout: Timeout = None) -> None:
        self._store.wait(self._all(keys), timeout)

    def compare_set(self, key: str, expected: Value, desired: Value) -> bytes:
        return self._store.compare_set(
            self._full(key), encode_value(expected), encode_value(desired)
        )

    def append(self, key: str, value: Value) -> None:
        self._store.append(self._full(key), encode_value(value))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._store.multi_get(self._all(keys))

    def multi_set(self, keys: Sequence[str], values: Sequence[Value]) -> None:
        self._store.multi_set(self._all(keys), [*map(encode_value, values)])

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(self._full(key))

    def num_keys(self) -> int:
        return self._store.num_keys()

    def list_keys(self) -> list[str]:
        begin = len(self._prefix)
        return [key[begin:] for key in self._store.list_keys() if key.startswith(self._prefix)]

    def queue_push(self, key: str, value: Value) -> None:
        self._store.queue_push(self._full(key), encode_value(value))

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        return self._store.queue_pop(self._full(key), block)

    def queue_len(self, key: str) -> int:
        return self._store.queue_len(self._full(key))

    def barrier(self, key: str, world_size: int, timeout: Timeout = None) -> None:
        self._store.barrier(self._full(key), world_size, timeout)

    def clone(self) -> PrefixStore:
        # The clone of the underlying store has no other owner.
        return PrefixStore(self._prefix[:-1], self._store.clone(), closes=True)

    def close(self) -> None:
        if self._closes:
            self._store.close()
