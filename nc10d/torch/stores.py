"""Stores both ways: nc10d's stores for torch.distributed, and torch's stores for nc10d's groups.

    store = nc10d.torch.as_store(nc10d.TCPStore(...))
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=size)

    store = torch.distributed.TCPStore(...)
    nc10d.init_process_group(store=store, rank=rank, world_size=size)

torch's C++ code calls an adapter by C++ names (`deleteKey`, `getNumKeys`), and never calls
`list_keys`, `barrier` and the queues. torch forgets an adapter's methods once the Python object has
gone, so each adapter is kept until its `close`.
"""

# ruff: noqa: D102  (Store documents the methods)
from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from nc10d.base.deadline import Deadline, Timeout, seconds
from nc10d.base.signal_errors import raised_here
from nc10d.errors import (
    DistNetworkError,
    NotANumberError,
    QueueEmptyError,
    StoreError,
    StoreTimeout,
)
from nc10d.store.base import (
    Store,
    Value,
    encode_keys,
    encode_value,
    key_list,
    pair,
    register_store_type,
)

_FOREVER = timedelta(days=24)  # torch's TCPStore polls for a 32-bit number of milliseconds
_SHORTEST, _LONGEST = 0.0002, 0.02
_kept: dict[int, StoreForTorch] = {}


def register() -> None:
    """Let nc10d's groups and PrefixStore take torch's stores."""
    register_store_type(dist.Store, as_own_store)


def as_store(store: Store) -> dist.Store:
    """Return `store` as a torch.distributed.Store: the same one at every call for a store.

    The result stays alive, with the store's connection, until its `close`, which closes `store`.
    Its timeout and the store's are one. torch's PrefixStore over it has no queues and no list_keys:
    torch passes these calls to no store that is written in Python. Errors are nc10d's, which are
    torch's, too.
    """
    if isinstance(store, dist.Store):
        return store
    if isinstance(store, TorchStore):
        return store.underlying
    if not isinstance(store, Store):
        raise TypeError(f"as_store takes a store of nc10d, got {type(store).__name__}")
    return _kept.get(id(store)) or StoreForTorch(store)


def release(store: Store) -> None:
    """Stop keeping the adapter of `store`, which stays open; for a torch group that has ended."""
    _kept.pop(id(store), None)


def as_own_store(store: dist.Store) -> Store:
    """Return torch's `store` as an nc10d store; undoes as_store."""
    return store.underlying if isinstance(store, StoreForTorch) else TorchStore(store)


class StoreForTorch(dist.Store):
    """An nc10d store as torch's; see as_store."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self.underlying = store
        self._clones: list[StoreForTorch] = []
        self._limit = as_timedelta(store.timeout)
        dist.Store.set_timeout(self, self._limit)
        _kept[id(store)] = self

    def __repr__(self) -> str:
        return f"nc10d.torch.as_store({self.underlying!r})"

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Block until all `keys` exist; a `timeout` of 0 is torch's kNoTimeout: for ever."""
        store = self._timed()
        store.wait(keys, store.timeout if timeout is None else timeout or timedelta.max)

    def clone(self) -> StoreForTorch:
        """Return a store on the same keys for another thread; the clone closes with this store."""
        twin = StoreForTorch(self._timed().clone())
        self._clones.append(twin)
        return twin

    def barrier(self, key: str, world_size: int, timeout: timedelta | None = None) -> None:
        store = self._timed()
        store.barrier(key, world_size, store.timeout if timeout is None else timeout)

    @property
    def timeout(self) -> timedelta:
        return self._timed().timeout

    def set_timeout(self, timeout: timedelta) -> None:
        self.underlying.set_timeout(timeout)
        self._limit = as_timedelta(timeout)
        dist.Store.set_timeout(self, self._limit)

    def _timed(self) -> Store:
        """Return nc10d's store with the timeout that torch's PrefixStore may have set here."""
        limit = dist.Store.timeout.__get__(self)
        if limit != self._limit:
            self._limit = limit
            self.underlying.set_timeout(limit)
        return self.underlying

    def close(self) -> None:
        """Close nc10d's store and all clones, and stop keeping this object; idempotent."""
        while self._clones:
            self._clones.pop().close()
        _kept.pop(id(self.underlying), None)
        self.underlying.close()


def _forwarded(name: str) -> Callable[..., object]:
    """Return a method of StoreForTorch that calls nc10d's store."""

    def call(self: StoreForTorch, *arguments: object, **options: object) -> object:
        return getattr(self._timed(), name)(*arguments, **options)

    return call


_SAME = (
    *("set", "get", "add", "check", "compare_set", "append", "multi_get", "multi_set"),
    *("has_extended_api", "delete_key", "num_keys", "list_keys"),
    *("queue_push", "queue_pop", "queue_len"),
)
"""Methods with the same arguments and results in both libraries."""

for _name in _SAME:
    setattr(StoreForTorch, _name, _forwarded(_name))
StoreForTorch.deleteKey = _forwarded("delete_key")  # the names that C++ calls
StoreForTorch.getNumKeys = _forwarded("num_keys")


class TorchStore(Store):
    """A torch store as nc10d's; errors are nc10d's and name the keys.

    A call that waits asks again and again, so Ctrl-C ends it and other threads may use the store
    meanwhile: torch's own wait hears no signal, and its TCPStore serves one thread at a time.
    """

    def __init__(self, store: dist.Store) -> None:
        self.underlying = store

    def __repr__(self) -> str:
        return f"torch's {type(self.underlying).__name__}"

    @contextmanager
    def _own_errors(self, *keys: str) -> Iterator[None]:
        encode_keys(keys)  # TypeError or ValueError for a key that is none
        try:
            yield
        except raised_here(RuntimeError, ValueError) as error:
            named = ", ".join(map(repr, keys))
            text = f"{self!r}, keys {named}: {str(error).partition(chr(10))[0]}"
            kind = _own_kind(error, text)
            if kind is None:
                raise
            raise kind(text) from error

    @property
    def timeout(self) -> timedelta:
        limit = self.underlying.timeout
        return timedelta.max if limit >= _FOREVER else limit

    def set_timeout(self, timeout: Timeout) -> None:
        self.underlying.set_timeout(as_timedelta(timeout))

    def has_extended_api(self) -> bool:
        return self.underlying.has_extended_api()

    def set(self, key: str, value: Value) -> None:
        with self._own_errors(key):
            self.underlying.set(key, encode_value(value))

    def get(self, key: str) -> bytes:
        self.wait([key])
        with self._own_errors(key):
            return self.underlying.get(key)

    def add(self, key: str, amount: int) -> int:
        with self._own_errors(key):
            return self.underlying.add(key, amount)

    def check(self, keys: Sequence[str]) -> bool:
        keys = key_list(keys)
        encode_keys(keys)
        with self._own_errors(*keys):
            return self.underlying.check([*keys])

    def wait(self, keys: Sequence[str], timeout: Timeout = None) -> None:
        keys = key_list(keys)
        self._poll(lambda: self.check(keys), keys, timeout)

    def _poll(self, ready: Callable[[], bool], keys: Sequence[str], timeout: Timeout) -> None:
        """Ask until `ready`; a pause is as long as all before, so an answer is soon seen."""
        limit = seconds(self.timeout if timeout is None else timeout)
        deadline, pause = Deadline.after(limit), _SHORTEST
        while not ready():
            if deadline.expired():
                named = ", ".join(map(repr, keys))
                raise StoreTimeout(f"{self!r}, keys {named}: timeout: not there within {limit:g} s")
            time.sleep(deadline.slice(pause))
            pause = min(2 * pause, _LONGEST)

    def compare_set(self, key: str, expected: Value, desired: Value) -> bytes:
        with self._own_errors(key):
            return self.underlying.compare_set(key, encode_value(expected), encode_value(desired))

    def append(self, key: str, value: Value) -> None:
        with self._own_errors(key):
            self.underlying.append(key, encode_value(value))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        keys = key_list(keys)
        self.wait(keys)
        with self._own_errors(*keys):
            return self.underlying.multi_get(keys)

    def multi_set(self, keys: Sequence[str], values: Sequence[Value]) -> None:
        keys, values = key_list(keys), [*values]
        pair(keys, values)
        with self._own_errors(*keys):
            self.underlying.multi_set(keys, [*map(encode_value, values)])

    def delete_key(self, key: str) -> bool:
        with self._own_errors(key):
            return self.underlying.delete_key(key)

    def num_keys(self) -> int:
        with self._own_errors():
            return self.underlying.num_keys()

    def list_keys(self) -> list[str]:
        with self._own_errors():
            return self.underlying.list_keys()

    def queue_push(self, key: str, value: Value) -> None:
        with self._own_errors(key):
            self.underlying.queue_push(key, encode_value(value))

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        popped: list[bytes] = []

        def pop() -> bool:
            try:
                popped.append(self.queue_pop(key, False))
            except raised_here(QueueEmptyError):
                return False
            return True

        if block:
            self._poll(pop, [key], None)
            return popped[0]
        with self._own_errors(key):
            return self.underlying.queue_pop(key, False)

    def queue_len(self, key: str) -> int:
        with self._own_errors(key):
            return self.underlying.queue_len(key)

    def barrier(self, key: str, world_size: int, timeout: Timeout = None) -> None:
        limit = self.timeout if timeout is None else timeout
        with self._own_errors(key):
            self.underlying.barrier(key, world_size, as_timedelta(limit))

    def clone(self) -> TorchStore:
        return TorchStore(self.underlying.clone())


def _own_kind(error: Exception, text: str) -> type[StoreError] | None:
    """Return nc10d's class for an error from torch's store; None for other errors."""
    if isinstance(error, NotImplementedError | StoreError):
        return None
    if isinstance(error, dist.QueueEmptyError):
        return QueueEmptyError
    if isinstance(error, dist.DistNetworkError):
        return DistNetworkError
    if isinstance(error, ValueError):  # torch's local stores: "stoll", the C function's name
        return NotANumberError if str(error) in ("stoll", "stol") else None
    # torch's FileStore raises a plain RuntimeError.
    timed_out = "timeout" in text.lower() or "timed out" in text.lower()
    return StoreTimeout if timed_out else StoreError if isinstance(error, dist.DistError) else None


def as_timedelta(timeout: Timeout) -> timedelta:
    """Return `timeout` within torch's range: 1 ms to _FOREVER. torch's 0 means for ever."""
    limit = seconds(timeout)
    if limit >= _FOREVER.total_seconds():
        return _FOREVER
    return timedelta(milliseconds=max(1, round(limit * 1000)))
