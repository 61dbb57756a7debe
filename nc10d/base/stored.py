"""Values that come from a store or from another rank: checked before anything is done with them.

Any process that reaches a store can write anything there. So each reader names the form that a
value must have. Any other form is a StoreError that names the key. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

from nc10d.base.signal_errors import raised_here
from nc10d.errors import StoreError

T = TypeVar("T")
MOST_BYTES = 1 << 20
"""The most bytes of a value that a reader parses."""


def read_stored(key: str, raw: bytes, parse: Callable[[bytes], T], most: int = MOST_BYTES) -> T:
    """Return parse(raw), the value of `key`; StoreError if `parse` can't make sense of it."""
    try:
        if len(raw) > most:
            raise ValueError(f"{len(raw)} bytes")
        return parse(raw)
    except raised_here(
        ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError
    ):
        start = f"{raw[:60]!r}{'...' if len(raw) > 60 else ''}"
        raise StoreError(
            f"the store holds no valid value of {key!r}, but {start}: something other than this "
            "job's ranks has written it, or they run different programs"
        ) from None


def read_json(key: str, raw: bytes, check: Callable[[Any], T], most: int = MOST_BYTES) -> T:
    """Return check(value) of the JSON value of `key`; StoreError as `read_stored`."""
    return read_stored(key, raw, lambda text: check(json.loads(text)), most)


def read_text(key: str, raw: bytes, most: int = 4096) -> str:
    """Return a text of at most `most` bytes; StoreError as `read_stored`."""
    return read_stored(key, raw, bytes.decode, most)


def read_number(key: str, raw: bytes, low: int, high: int) -> int:
    """Return a whole number from `low` to `high`; StoreError as `read_stored`."""
    return read_stored(key, raw, lambda text: whole(int(text), low, high), 20)


def whole(value: Any, low: int, high: int) -> int:
    """Return `value` if it is an int from `low` to `high`; ValueError if not."""
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"no whole number from {low} to {high}")
    return value


def distinct(value: object, count: int) -> list[int]:
    """Return `value` if it is a list of different ints from 0 to count - 1; ValueError if not."""
    if not isinstance(value, list) or len({whole(one, 0, count - 1) for one in value}) < len(value):
        raise ValueError(f"no list of different numbers below {count}")
    return value
