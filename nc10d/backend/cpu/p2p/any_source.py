"""Receiving from any source: the Work of a receive whose sender is not known yet."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from nc10d.backend.cpu.failure.health import Health
from nc10d.backend.cpu.works import PartWaiter
from nc10d.base.deadline import Deadline
from nc10d.ops import Op
from nc10d.work import Work

LOOK = 0.05
"""Seconds between two looks of a waiting thread for a message."""


class AnySourceReceive(Work):
    """A receive from the first rank that sends; matched when a thread waits for it or looks.

    `match` returns the Work of the matched receive, or None; `pause` waits for any message for
    some seconds at most.
    """

    __slots__ = (
        *("_awaited", "_health", "_inner", "_match", "_matching", "_pause", "_waiter"),
        "deadline",
    )

    def __init__(
        self,
        waiter: PartWaiter,
        health: Health,
        ops: Sequence[Op],
        deadline: Deadline,
        match: Callable[[], Work | None],
        pause: Callable[[float], None],
    ) -> None:
        super().__init__(ops)
        self._waiter = waiter
        self._health = health
        self._match = match
        self._pause = pause
        self._matching = threading.Lock()
        self._inner: Work | None = None
        self._awaited = False
        self.deadline = deadline

    def _poll(self) -> None:
        self._block(Deadline(0.0))

    def _block(self, deadline: Deadline) -> None:
        until = deadline if deadline.at < self.deadline.at else self.deadline
        while self._inner is None:
            failure = self._health.failure()
            if failure is None and self.deadline.expired():
                failure = self._health.fail_timeout(self.ops, None)
            if failure is not None:
                self._finish(failure)
                return
            # Asked before matching, so that messages sent before a rank left are found. A thread
            # that only polls has not asked to wait, and is no reason for an error.
            awaited = self._awaited or deadline.at > 0
            all_left = awaited and self._health.all_left()
            # The notifier and several waiting threads may match: a single thread takes the message.
            with self._matching:
                if self._inner is None:
                    self._inner = self._match()
            if self._inner is None:
                if all_left:
                    self._finish(self._health.fail_all_left(self.ops))
                    return
                if until.expired():
                    return
                self._pause(until.slice(LOOK))
        inner = self._inner
        inner._block(deadline) if deadline.at > 0 else inner._poll()
        if inner._look():
            self._finish(inner._exception, inner._result)

    def _watch(self) -> None:
        self._awaited = True  # a callback or a coroutine waits
        self._waiter.watch(self)
