"""How some ranks that share a store find that all have come, or why not: the first word counts.

Each counts itself. The last to come writes what they all were waiting for; who gives up writes why
it is not to be. Whichever is written first holds for everybody, so all ranks end alike, whoever was
late by a moment.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from nc10d.base.deadline import Deadline
from nc10d.errors import StoreTimeout

if TYPE_CHECKING:
    from nc10d.base.deadline import Deadline
    from nc10d.store.base import Store

SLICE = 0.05
"""Seconds from look to look whether waiting still has a point."""
_COME, _VERDICT = "come", "verdict"


class KeyWaiter(Protocol):
    """What waits for keys: a store, or a council."""

    def check(self, keys: Sequence[str], /) -> bool:
        """Say whether all of these are there."""

    def wait(self, keys: Sequence[str], timeout: float, /) -> None:
        """Block until they are; StoreTimeout after `timeout` seconds."""


def there(board: KeyWaiter, keys: Sequence[str], timeout: float) -> bool:
    """Say whether all keys are there by now, or within `timeout` seconds; blocks until then."""
    try:
        board.wait(keys, max(timeout, 0.001))
    except StoreTimeout:
        # A store that is farther away than the slice has had no time to say so.
        return board.check(keys)
    return True


def say(store: Store, word: str | bytes) -> bytes:
    """Write the verdict unless there is one; return the one that counts."""
    return store.compare_set(_VERDICT, "", word)


def come(
    store: Store,
    size: int,
    conclude: Callable[[], str],
    give_up: Callable[[], str],
    deadline: Deadline,
    check: Callable[[], None] | None = None,
) -> bytes:
    """Be one of `size` ranks that come; return the verdict. Blocks until there is one.

    The last to come says `conclude()`, who is there beyond `deadline` `give_up()`, which may raise
    instead. `check` is called meanwhile, and raises what makes waiting pointless; without it the
    store is asked once, not again and again.
    """
    if store.add(_COME, 1) == size:
        return say(store, conclude())
    longest = math.inf if check is None else SLICE
    while not there(store, [_VERDICT], deadline.slice(longest)):
        if check is not None:
            check()
        if deadline.expired():
            return say(store, give_up())
    return store.get(_VERDICT)


class KeyValueBoard(KeyWaiter, Protocol):
    """Where ranks read what others have put up: a store, or what a council has heard."""

    def set(self, key: str, value: str, /) -> None:
        """Put something up."""

    def multi_get(self, keys: Sequence[str], /) -> list[bytes]:
        """Return what is there."""
