"""torch's stores as stores of nc10d.

torch's stores have the methods of nc10d's, but other types of timeouts and errors.
"""

# ruff: noqa: D102  (Store documents the methods)
from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from nc10d.base.deadline import Timeout, seconds
from nc10d.base.signal_errors import raised_here
from nc10d.errors import DistNetworkError, QueueEmptyError, StoreError, StoreTimeout
from nc10d.store.base import Store, Value, encode_value

T = TypeVar("T")
_LONGEST = timedelta(days=365)
_ERRORS = (dist.DistError, RuntimeError)


class TorchStore(Store):
    """A view of a store of torch's; its errors are nc10d's."""

    def __init__(self, store: Any) -> None:
        if not isinstance(store, dist.Store):
            raise TypeError(f"expected a store of torch.distributed, got {store!r}")
        self._store = store

    @property
    def timeout(self) -> timedelta:
        found: timedelta = self._store.timeout
        return found

    def set_timeout(self, timeout: Timeout) -> None:
        self._store.set_timeout(_delta(timeout))

    def has_extended_api(self) -> bool:
        return bool(self._store.has_extended_api())

    def __repr__(self) -> str:
        return f"TorchStore({self._store!r})"

    def _ask(self, call: Callable[[], T], keys: Sequence[str]) -> T:
        """Return what `call` returns; its failure is a StoreError that names `keys`."""
        try:
            return call()
        except raised_here(*_ERRORS) as error:
            text = str(error).partition("\n")[0]
            kind: type[StoreError] = StoreError
            if "timeout" in text.lower() or "timed out" in text.lower():
                kind = StoreTimeout
            elif isinstance(error, dist.QueueEmptyError):
                kind = QueueEmptyError
            elif isinstance(error, dist.DistNetworkError):
                kind = DistNetworkError
            raise kind(f"torch's store failed for {', '.join(keys)}: {text}") from error

    def set(self, key: str, value: Value) -> None:
        self._ask(lambda: self._store.set(key, encode_value(value)), [key])

    def get(self, key: str) -> bytes:
        return self._ask(lambda: bytes(self._store.get(key)), [key])

    def add(self, key: str, amount: int) -> int:
        return self._ask(lambda: int(self._store.add(key, amount)), [key])

    def check(self, keys: Sequence[str]) -> bool:
        return self._ask(lambda: bool(self._store.check([*keys])), keys)

    def wait(self, keys: Sequence[str], timeout: Timeout = None) -> None:
        limit = [] if timeout is None else [_delta(timeout)]
        self._ask(lambda: self._store.wait([*keys], *limit), keys)

    def compare_set(self, key: str, expected: Value, desired: Value) -> bytes:
        pair = encode_value(expected), encode_value(desired)
        return self._ask(lambda: bytes(self._store.compare_set(key, *pair)), [key])

    def append(self, key: str, value: Value) -> None:
        if not self.has_extended_api():
            super().append(key, value)
        else:
            self._ask(lambda: self._store.append(key, encode_value(value)), [key])

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        if not self.has_extended_api():
            return super().multi_get(keys)
        return self._ask(lambda: [*map(bytes, self._store.multi_get([*keys]))], keys)

    def multi_set(self, keys: Sequence[str], values: Sequence[Value]) -> None:
        if not self.has_extended_api():
            super().multi_set(keys, values)
        else:
            given = [*map(encode_value, values)]
            self._ask(lambda: self._store.multi_set([*keys], given), keys)

    def delete_key(self, key: str) -> bool:
        return self._ask(lambda: bool(self._store.delete_key(key)), [key])

    def num_keys(self) -> int:
        return self._ask(lambda: int(self._store.num_keys()), ["num_keys"])

    def list_keys(self) -> list[str]:
        return self._ask(lambda: [*self._store.list_keys()], ["list_keys"])

    def queue_push(self, key: str, value: Value) -> None:
        self._ask(lambda: self._store.queue_push(key, encode_value(value)), [key])

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        return self._ask(lambda: bytes(self._store.queue_pop(key, block)), [key])

    def queue_len(self, key: str) -> int:
        return self._ask(lambda: int(self._store.queue_len(key)), [key])

    def clone(self) -> TorchStore:
        return TorchStore(self._store.clone())


def _delta(timeout: Timeout) -> timedelta:
    limit = seconds(timeout)
    return _LONGEST if limit > _LONGEST.total_seconds() else timedelta(seconds=limit)
