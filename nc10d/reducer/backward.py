"""One backward pass, from its beginning until all of its buckets are reduced.

Contract: made anew for each pass, so nothing of the last one is left over. Not thread-safe: its
owner holds a lock. `leave(index)` is called for every bucket, once, in plan order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from time import perf_counter_ns
from typing import Any

from nc10d.reducer.schedule import Schedule
from nc10d.reducer.storage import Storage


class BackwardPass:
    """A pass in which parameter p is marked `marks[p]` times.

    Without `marks` nobody knows yet: buckets stay until the end, and the marks are counted. With
    `delay` they stay until then as well. `arrived` are the marks in their order, `times` the last
    one of each parameter in ns since the pass began (`began`, on the clock of perf_counter_ns),
    `left` when the first bucket left; 0 is not at all.
    """

    def __init__(
        self,
        storage: Storage,
        schedule: Schedule,
        marks: Sequence[int] | None,
        leave: Callable[[int], None],
        *,
        delay: bool = False,
    ) -> None:
        self._storage = storage
        self._schedule = schedule
        self._marks = marks
        self._leave = leave
        self._delay = delay
        self._waiting: list[int] = []
        self._failure: BaseException | None = None
        self._unused: list[int] = []
        self.began = perf_counter_ns()
        self.left = 0
        self.arrived: list[int] = []
        self.times = [0] * len(storage.gradients)

    def start(self) -> None:
        """Let go what waits for nothing."""
        if self._marks is not None:
            self._begin(self._marks)

    def take(self, param: int, gradient: Any) -> None:
        """Take a gradient before its mark: where it lies, or an array that gets the mean.

        For any thread, without the lock: copies of several threads go side by side. RuntimeError,
        before anything is written, if it was not expected (again).
        """
        if self._marks is not None:
            self._schedule.require_expected(param)
        self._storage.take(param, gradient)

    def ready(self, param: int) -> None:
        """Take a mark."""
        self.arrived.append(param)
        self.times[param] = perf_counter_ns() - self.began
        if self._marks is not None:
            self._mark(param)

    def absent(self, param: int) -> None:
        """Take note that an expected gradient will not come: what lies there takes part."""
        self._unused.append(param)
        self._storage.keep([param])
        self._mark(param)

    def _mark(self, param: int) -> None:
        leaving = self._schedule.mark(param)
        if leaving:
            self._send(leaving)

    def counts(self) -> list[int]:
        """Return how often each parameter has been marked."""
        counted = Counter(self.arrived)
        return [counted[param] for param in range(len(self.times))]

    def end(self) -> None:
        """Let go what is left, and wait for everything; raise the first thing that failed.

        RuntimeError names the gradients that have not come. Ctrl-C ends the wait at once: what is
        under way then is waited for by `Storage.settle`.
        """
        buckets = self._storage.buckets
        try:
            failure = self._reduced()
        except BaseException:
            for bucket in buckets:
                bucket.end(reduced=False)
            raise
        if failure is not None:
            raise failure

    def _reduced(self) -> BaseException | None:
        buckets = self._storage.buckets
        failures = [self._failure or _attempt(self._release)]
        if failures[0] is None:
            failures.extend(_attempt(bucket.follow) for bucket in buckets)
        failures.extend(_attempt(bucket.settle) for bucket in buckets)
        reduced = not any(failures)
        failures.extend(_attempt(partial(bucket.end, reduced=reduced)) for bucket in buckets)
        return next(filter(None, failures), None)

    def restore(self, used: Sequence[bool]) -> None:
        """Give gradients that no rank has used the values back that they had."""
        self._storage.restore([param for param in self._unused if not used[param]])

    def _release(self) -> None:
        if self._marks is None:
            self._begin(self.counts(), hold=False)
        self._schedule.require_complete()
        self._delay = False
        self._send(self._waiting)

    def _begin(self, marks: Sequence[int], hold: bool = True) -> None:
        # They take part in the mean like all others, with what lies in them.
        self._unused = [param for param, count in enumerate(marks) if count == 0]
        self._storage.keep(self._unused)
        self._send(self._schedule.begin(marks if hold else [0] * len(marks)))

    def _send(self, leaving: Iterable[int]) -> None:
        if self._delay:
            self._waiting.extend(leaving)
            return
        if self._failure is not None:
            return  # this bucket stays, too: other ranks send the one that failed before it
        for index in leaving:
            self.left = self.left or perf_counter_ns()
            try:
                self._leave(index)
            except BaseException as error:
                self._failure = error  # the buckets after this one stay: the pass has failed
                raise


def _attempt(call: Callable[[], object]) -> BaseException | None:
    try:
        call()
    except Exception as error:  # noqa: BLE001  (raised when nothing is under way any more)
        return error
    return None
