"""The contents of a store: values and queues by key, and the operations on them.

Keys and values are bytes. A queue and a value may share a key; they are independent. Only the five
primitives (put, extend, remove, push, pop) change anything, so a store can keep a journal by
overriding them.
"""

from __future__ import annotations

import math
from collections import deque

ENTRY_BYTES, QUEUE_BYTES, ITEM_BYTES = 200, 1000, 64
"""The memory of a key with its value, of a queue, and of a queued value, besides their bytes."""


class Full(Exception):
    """The entries together would exceed their bound."""


class NotANumber(ValueError):
    """A value is not a number; the value is the exception's argument."""


class Values:
    """Values and queues of bytes by key, bounded to `limit` bytes in all (see ENTRY_BYTES).

    The owner may count other memory, too: `grow` by its bytes, and take them off `nbytes` later.
    A value in `data` is a bytearray from its first `extend` until `get`, so that many appends take
    linear time. A bytearray may take an eighth more than its bytes, which is not counted.
    """

    __slots__ = ("data", "limit", "nbytes", "queues")

    def __init__(self, limit: int | None = None) -> None:
        self.data: dict[bytes, bytes | bytearray] = {}
        self.queues: dict[bytes, deque[bytes]] = {}
        self.limit = math.inf if limit is None else limit
        self.nbytes = 0

    def grow(self, count: int) -> None:
        """Count `count` more bytes; Full if they would exceed the limit."""
        if self.nbytes + count > self.limit:
            raise Full(f"more than {self.limit} bytes in all")
        self.nbytes += count

    def get(self, key: bytes) -> bytes:
        """Return the value under `key`; empty without one."""
        value = self.data.get(key, b"")
        if isinstance(value, bytearray):
            value = self.data[key] = bytes(value)
        return value

    def put(self, key: bytes, value: bytes) -> None:
        """Store `value` under `key`, replacing any earlier value."""
        before = self.data.get(key)
        self.grow(len(value) - (-len(key) - ENTRY_BYTES if before is None else len(before)))
        self.data[key] = value

    def extend(self, key: bytes, tail: bytes) -> None:
        """Append `tail` to the value under `key`; a missing key counts as empty."""
        before = self.data.get(key)
        self.grow(len(tail) + (len(key) + ENTRY_BYTES if before is None else 0))
        if not isinstance(before, bytearray):
            before = self.data[key] = bytearray(before or b"")
        before += tail

    def remove(self, key: bytes) -> bool:
        """Remove the value under `key` (a queue stays); return whether there was a value."""
        value = self.data.pop(key, None)
        if value is None:
            return False
        self.nbytes -= len(value) + len(key) + ENTRY_BYTES
        return True

    def push(self, key: bytes, value: bytes) -> None:
        """Append `value` to the queue under `key`."""
        new = 0 if key in self.queues else len(key) + QUEUE_BYTES
        self.grow(new + len(value) + ITEM_BYTES)
        self.queues.setdefault(key, deque()).append(value)

    def pop(self, key: bytes) -> bytes | None:
        """Remove and return the oldest value of the queue under `key`; None if it is empty."""
        queue = self.queues.get(key)
        if queue is None:
            return None
        value = queue.popleft()
        self.nbytes -= len(value) + ITEM_BYTES
        if not queue:
            del self.queues[key]
            self.nbytes -= len(key) + QUEUE_BYTES
        return value

    def exists(self, key: bytes) -> bool:
        """Return whether there is a value or a queued value under `key`."""
        return key in self.data or key in self.queues

    def queued(self, key: bytes) -> int:
        """Return the length of the queue under `key`."""
        return len(self.queues.get(key, ()))

    def number(self, key: bytes) -> int:
        """Return the decimal number under `key` (0 if missing); NotANumber for other values."""
        return read_number(self.get(key)) if key in self.data else 0

    def add(self, key: bytes, amount: int) -> int:
        """Add to the number under `key` and return the sum, in 64 bits; NotANumber as `number`."""
        total = (self.number(key) + amount + (1 << 63)) % (1 << 64) - (1 << 63)
        self.put(key, b"%d" % total)
        return total

    def compare_set(self, key: bytes, expected: bytes, desired: bytes) -> bytes:
        """Store `desired` if the current value is `expected`; return the value stored afterwards.

        A missing key matches an empty `expected`; any other `expected` is returned unchanged.
        """
        if key not in self.data and expected:
            return expected
        if self.get(key) == expected:
            self.put(key, desired)
        return self.get(key)


def read_number(value: bytes) -> int:
    """Parse a decimal number of 64 bits; NotANumber if `value` is none."""
    try:
        number = int(value)
    except ValueError as error:
        raise NotANumber(value) from error
    if b"_" in value or not -(1 << 63) <= number < 1 << 63:
        raise NotANumber(value)
    return number
