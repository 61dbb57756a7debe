"""A barrier over a store with one agreed outcome: all ranks arrived, or a reason for failure.

Each rank increments a counter. The last rank to arrive writes the outcome that all ranks wait for.
A rank that gives up writes its reason instead. Only the first write counts (compare_set), so every
rank returns the same outcome, even if the last rank arrives just as another rank gives up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from nc10d.auth.token import FILE
from nc10d.base.deadline import Deadline
from nc10d.base.signal_errors import raised_here
from nc10d.base.wait_report import WaitReport
from nc10d.errors import RendezvousError, StoreTimeout
from nc10d.store.base import Store
from nc10d.store.wire import REFUSED

POLL_SECONDS = 0.05
"""Seconds between two calls of `check` while a rank waits."""
_SLICE_SECONDS = 0.25
"""The longest time between two checks whether a report is due, or the wait is cancelled."""
_COUNT_KEY, OUTCOME_KEY = "come", "outcome"


class KeyWaiter(Protocol):
    """An object that waits for keys: a store, or the group control."""

    def check(self, keys: Sequence[str], /) -> bool:
        """Return whether all `keys` exist."""

    def wait(self, keys: Sequence[str], timeout: float, /) -> None:
        """Block until all `keys` exist; StoreTimeout after `timeout` seconds."""


def wait_for_keys(waiter: KeyWaiter, keys: Sequence[str], timeout: float) -> bool:
    """Block for at most `timeout` seconds until all keys exist; return whether they do."""
    try:
        waiter.wait(keys, max(timeout, 0.001))
    except raised_here(StoreTimeout):
        # The answer of a distant store may take longer than a short timeout: ask without one.
        return waiter.check(keys)
    return True


def publish_outcome(store: Store, outcome: str | bytes) -> bytes:
    """Write `outcome` unless another rank has written its own; return the stored outcome."""
    return store.compare_set(OUTCOME_KEY, "", outcome)


def arrive(
    store: Store,
    size: int,
    conclude: Callable[[], str],
    give_up: Callable[[], str],
    deadline: Deadline,
    check: Callable[[], None],
) -> bytes:
    """Count this rank as arrived and return the outcome. Blocks until there is an outcome.

    The last of `size` ranks publishes `conclude()`. A rank that has waited until `deadline`
    publishes `give_up()`, which may raise instead. `check` is called every POLL_SECONDS during the
    wait; an exception that it raises ends the wait.
    """
    if store.add(_COUNT_KEY, 1) == size:
        return publish_outcome(store, conclude())
    while not wait_for_keys(store, [OUTCOME_KEY], deadline.slice(POLL_SECONDS)):
        check()
        if deadline.expired():
            return publish_outcome(store, give_up())
    return store.get(OUTCOME_KEY)


def await_ranks(
    waiter: KeyWaiter,
    keys: Sequence[str],
    report: WaitReport,
    missing: Callable[[Sequence[int]], str],
    deadline: Deadline,
    check: Callable[[], None] | None = None,
    renewed: Callable[[], bool] = lambda: False,
) -> None:
    """Block until every rank has published its key, `keys[rank]`; tell `report` who is missing.

    RendezvousError at the deadline, unless `renewed` has moved the deadline. `check` is called
    every POLL_SECONDS, and may raise.
    """

    def absent() -> list[int]:
        return [rank for rank, key in enumerate(keys) if not waiter.check([key])]

    longest = _SLICE_SECONDS if check is None else POLL_SECONDS
    while not wait_for_keys(waiter, keys, deadline.slice(longest)):
        if check is not None:
            check()
        report.look(lambda: missing(absent()))
        if deadline.expired() and not renewed():
            ranks = absent()
            if not ranks:  # the last has come since the wait
                return
            raise RendezvousError(report.timed_out(missing(ranks)), rank=ranks[0])


def refused_text(store: Store) -> str:
    """Return a clause about a client that the store's server has refused; empty without one."""
    if not store.check([REFUSED]):
        return ""
    host = store.get(REFUSED)[:200].decode(errors="replace")
    return f"; a process at {host} came with another token than the store's, or none ({FILE})"


class KeyValueExchange(KeyWaiter, Protocol):
    """Where ranks publish values for each other: a store, or the group control."""

    def set(self, key: str, value: str, /) -> None:
        """Publish `value` under `key`."""

    def multi_get(self, keys: Sequence[str], /) -> list[bytes]:
        """Return the values of `keys`, in the same order."""
