"""Launches on a polled library: the Work that ends with its parts, steps, and held messages."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from nc10d.backend.polled.progress_thread import ProgressThread
from nc10d.base.deadline import Deadline
from nc10d.ops import Op, Recv, Send
from nc10d.work import Work

Steps = Generator[Sequence[Any] | None, None, Any]
"""An operation in steps: a generator that yields the requests it waits for (None: resume it at the
next poll), and returns the result of the operation."""


class PolledWork(Work):
    """One launch; `ended` holds the places in the batch of the operations that have ended."""

    __slots__ = ("_engine", "_parts_left", "_results", "ended")

    def __init__(self, ops: Sequence[Op], engine: ProgressThread, parts: int) -> None:
        super().__init__(ops)
        self._engine = engine
        self._parts_left = parts
        self._results: list[int | None] = [None] * len(ops)
        self.ended: set[int] = set()

    def part_ended(self, places: Sequence[int], result: int | None) -> bool:
        """Record that the operations at `places` have ended; return whether they were the last."""
        self._results[places[0]] = result
        self.ended.update(places)
        self._parts_left -= 1
        return self._parts_left == 0

    def outcome(self) -> Any:
        """Return the value of `result()`: the sender, a list of senders, or None."""
        if len(self.ops) == 1:
            return self._results[0]
        return self._results if any(isinstance(op, Recv) for op in self.ops) else None

    def _poll(self) -> None:
        self._engine.advance()

    def _block(self, deadline: Deadline) -> None:
        self._engine.wait(self, deadline)

    def _watch(self) -> None:
        self._engine.watch(self)


def must_follow(later: Send | Recv, earlier: Send | Recv) -> bool:
    """Return whether a message must begin after an earlier one that has not begun."""
    if type(later) is not type(earlier):
        return False
    return later.peer == earlier.peer or later.peer is None or earlier.peer is None


def side_by_side(parts: Sequence[Steps]) -> Steps:
    """Run operations concurrently: each step waits for the requests of all of them."""
    running = list(parts)
    while running:
        started = [(part, next(part, None)) for part in running]
        running = [part for part, requests in started if requests]
        yield [request for _, requests in started for request in requests or ()]
