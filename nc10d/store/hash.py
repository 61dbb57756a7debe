"""A store in this process's memory, for ranks that are threads."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Sequence

from nc10d.deadline import Deadline, Timeout
from nc10d.store.base import (
    DEFAULT_TIMEOUT,
    QueueEmpty,
    Store,
    as_bytes,
    as_number,
    paired,
)

_LONGEST = threading.TIMEOUT_MAX


class _Table:
    """The values and queues that clones share, and one condition over all of them."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.queues: dict[str, deque[bytes]] = {}
        # Reentrant: a signal handler may use the store that it interrupted.
        self.changed = threading.Condition(threading.RLock())

    def has(self, keys: Sequence[str]) -> bool:
        return all(key in self.values or bool(self.queues.get(key)) for key in keys)


class HashStore(Store):
    """Values in a dict; waits block on a condition and release the GIL."""

    def __init__(self) -> None:
        self._table = _Table()
        self._timeout = DEFAULT_TIMEOUT

    def __repr__(self) -> str:
        return "HashStore()"

    def set(self, key: str, value: str | bytes) -> None:
        """Store `value`, whatever was there."""
        self.multi_set([key], [value])

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Store each value under its key, all at once."""
        pairs = [(key, as_bytes(value)) for key, value in paired(keys, values)]
        with self._table.changed:
            self._table.values.update(pairs)
            self._table.changed.notify_all()

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of `keys`, in their order; blocks until all are there."""
        values = self._table.values
        with self._table.changed:
            self._block(lambda: all(key in values for key in keys), keys, self._timeout)
            return [values[key] for key in keys]

    def add(self, key: str, amount: int) -> int:
        """Add to the decimal number at `key` and return the sum; ValueError if it is none."""
        with self._table.changed:
            total = as_number(key, self._table.values.get(key, b"0")) + amount
            self._table.values[key] = b"%d" % total
            self._table.changed.notify_all()
            return total

    def check(self, keys: Sequence[str]) -> bool:
        """Say whether all `keys` are there."""
        with self._table.changed:
            return self._table.has(keys)

    def wait(self, keys: Sequence[str], timeout: Timeout = None) -> None:
        """Block until all `keys` are there; no `timeout` means the store's own."""
        with self._table.changed:
            self._block(lambda: self._table.has(keys), keys, timeout)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Store `desired` if the value is `expected`; return the value that then stands."""
        old, new = as_bytes(expected), as_bytes(desired)
        with self._table.changed:
            current = self._table.values.get(key)
            if current == old or (current is None and not old):
                self._table.values[key] = new
                self._table.changed.notify_all()
                return new
            return old if current is None else current

    def append(self, key: str, value: str | bytes) -> None:
        """Put `value` behind what is at `key`."""
        data = as_bytes(value)
        with self._table.changed:
            self._table.values[key] = self._table.values.get(key, b"") + data
            self._table.changed.notify_all()

    def delete_key(self, key: str) -> bool:
        """Remove a value; say whether it was there."""
        with self._table.changed:
            return self._table.values.pop(key, None) is not None

    def num_keys(self) -> int:
        """Return the number of values."""
        return len(self._table.values)

    def list_keys(self) -> list[str]:
        """Return the keys that have values."""
        with self._table.changed:
            return list(self._table.values)

    def queue_push(self, key: str, value: str | bytes) -> None:
        """Put `value` at the end of the queue `key`."""
        data = as_bytes(value)
        with self._table.changed:
            self._table.queues.setdefault(key, deque()).append(data)
            self._table.changed.notify_all()

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Take the oldest value of the queue; if empty, wait, or raise QueueEmpty."""
        queues = self._table.queues
        with self._table.changed:
            if block:
                self._block(lambda: key in queues, [key], self._timeout)
            elif key not in queues:
                raise QueueEmpty(f"{self!r}: the queue {key!r} is empty")
            value = queues[key].popleft()
            if not queues[key]:
                del queues[key]
            return value

    def queue_len(self, key: str) -> int:
        """Return how many values the queue holds."""
        with self._table.changed:
            return len(self._table.queues.get(key, ()))

    def barrier(self, key: str, world_size: int, timeout: Timeout = None) -> None:
        """Block until `world_size` calls have been made on `key`."""
        with self._table.changed:
            self.add(key, 1)
            self._block(
                lambda: as_number(key, self._table.values.get(key, b"0")) >= world_size,
                [key],
                timeout,
                "in a barrier of",
            )

    def clone(self) -> HashStore:
        """Return another handle on the same values, with a timeout of its own."""
        other = HashStore()
        other._table, other._timeout = self._table, self._timeout
        return other

    def _block(
        self,
        ready: Callable[[], bool],
        keys: Sequence[str],
        timeout: Timeout,
        what: str = "waiting for",
    ) -> None:
        """Wait for `ready()`; the caller holds the condition."""
        deadline = self._deadline(timeout)
        started = Deadline.after(0).at
        left = deadline.remaining()
        if self._table.changed.wait_for(ready, None if math.isinf(left) else min(left, _LONGEST)):
            return
        raise self._timed_out(deadline.at - started, keys, what)
