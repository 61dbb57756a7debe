"""Launches on a polled library: the Work that ends with its parts, and the parts as steps."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

from nc10d.backend.polled.progress_thread import ProgressThread
from nc10d.base.deadline import Deadline
from nc10d.ops import Op, Recv, Send
from nc10d.work import Work

Steps = Generator[Sequence[Any] | None, None, Any]
"""An operation in steps: a generator that yields awaited requests (None: resume at the next poll),
and returns the operation's result."""


class PolledWork(Work):
    """One launch; `ended` holds the ended operations' places in the batch.

    `agreement` is a Work that has to end first and can block a thread until then, None without any.
    """

    __slots__ = ("_engine", "_parts_left", "_results", "agreement", "ended")

    def __init__(self, ops: Sequence[Op], engine: ProgressThread, parts: int) -> None:
        super().__init__(ops)
        self._engine = engine
        self._parts_left = parts
        self._results: list[int | None] = [None] * len(ops)
        self.agreement: Work | None = None
        self.ended: set[int] = set()

    def part_ended(self, places: Sequence[int], result: int | None) -> bool:
        """Record that the operations at `places` have ended; return whether they were the last."""
        self._results[places[0]] = result
        self.ended.update(places)
        self._parts_left -= 1
        return self._parts_left == 0

    def outcome(self) -> object:
        """Return the value for `result()`: the sender, a list of senders, or None."""
        if len(self.ops) == 1:
            return self._results[0]
        return self._results if any(isinstance(op, Recv) for op in self.ops) else None

    def _poll(self) -> None:
        self._engine.advance()

    def _block(self, deadline: Deadline) -> None:
        if self.agreement is not None:
            self.agreement._block(deadline)
        self._engine.wait(self, deadline)

    def _watch(self) -> None:
        self._engine.watch(self)


class Task:
    """A part of a launch: its collectives, or a message.

    `places` are the operations' places in the batch. `seq` is the group's number for a launch's
    collectives, 0 for a message. `agreed` is True once all ranks have agreed on the call.
    """

    __slots__ = ("agreed", "deadline", "places", "requests", "result", "seq", "steps", "work")

    def __init__(
        self, work: PolledWork, places: Sequence[int], deadline: Deadline, seq: int = 0
    ) -> None:
        self.work, self.places, self.deadline, self.seq = work, places, deadline, seq
        self.agreed = False
        self.result: int | None = None
        self.steps: Steps
        self.requests: Sequence[object] = ()

    def begin(self, steps: Steps) -> None:
        """Run the first step."""
        self.steps = steps
        self.requests = steps.send(None) or ()

    def advance(self, ended: Callable[[Sequence[Any]], bool]) -> bool:
        """Run steps as far as possible, without blocking; return whether all have ended.

        `ended` says whether a step's requests have ended.
        """
        while not self.requests or ended(self.requests):
            try:
                requests = next(self.steps)
            except StopIteration as end:
                self.result = end.value
                return True
            self.requests = requests or ()
            if requests is None:
                return False
        return False


class MessageTask(Task):
    """A send or receive."""

    __slots__ = ("op",)

    def __init__(self, work: PolledWork, place: int, deadline: Deadline) -> None:
        super().__init__(work, [place], deadline)
        op = work.ops[place]
        assert isinstance(op, (Send, Recv)), "collectives are called by all ranks"
        self.op = op

    def must_follow(self, other: MessageTask) -> bool:
        """Return whether this message must begin after an earlier one, which has not begun."""
        if other.requests or type(self.op) is not type(other.op):
            return False
        peers = self.op.peer, other.op.peer
        return None in peers or peers[0] == peers[1]


def after(condition: Callable[[], bool], steps: Steps) -> Steps:
    """Return steps that begin when `condition()` is true."""
    while not condition():
        yield None
    return (yield from steps)


def side_by_side(parts: Sequence[Steps]) -> Steps:
    """Run operations concurrently: each step waits for the requests of all."""
    running = list(parts)
    while running:
        started = [(part, next(part, None)) for part in running]
        running = [part for part, requests in started if requests]
        yield [request for _, requests in started for request in requests or ()]
