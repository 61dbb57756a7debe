"""A backward pass, from its beginning until all its buckets are reduced.

Contract: each pass is a new object, so no state remains from the last pass. Any thread may call
`mark`, which takes the owner's lock; the owner holds this lock in `start` and `declare_unused`. The
pass calls `launch(index, unused)` once for every bucket, in plan order; `unused` says that the
bucket is to be skipped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from operator import methodcaller
from typing import Any

from nc10d.base.deadline import monotonic_ns
from nc10d.ops import Array
from nc10d.reducer.buckets.storage import Storage
from nc10d.reducer.settings import Settings


class BackwardPass:
    """A pass in which parameter p is marked `marks[p]` times; `divisor` is as in `mark`."""

    # Without `marks` the counts are still unknown: all buckets wait for the end, and the pass
    # counts the marks. `used[p]` becomes 1 with the first mark of parameter p. `arrived` lists the
    # marks in their order. `began` is the start on the clock of monotonic_ns, `times` the last mark
    # of each parameter in ns after it, `first_launch` the first bucket's launch; 0 means never.
    # `skipped` is the number of skipped buckets. `reduced(index)` is called in plan order for each
    # bucket, as soon as the pass sees its means.

    def __init__(
        self,
        storage: Storage,
        settings: Settings,
        marks: Sequence[int] | None,
        launch: Callable[[int, bool], None],
        *,
        lock: AbstractContextManager[object],
        used: bytearray,
        divisor: int,
        reduced: Callable[[int], None] | None = None,
    ) -> None:
        self._storage, self._schedule = storage, storage.schedule
        self._marks = marks
        self._launch = launch
        self._lock, self._used = lock, used
        self.divisor = divisor
        self._delay = settings.delay
        self._skips, self.skipped = settings.skip_unused, 0
        self._reduced, self._launched, self._handed = reduced, 0, 0
        self._delayed: list[int] = []
        self._failure: BaseException | None = None
        self._unused: list[int] = []
        self.began = monotonic_ns()
        self.first_launch = 0
        self.arrived: list[int] = []
        self.times = [0] * len(used)

    def start(self) -> None:
        """Launch the buckets that expect no gradient."""
        if self._marks is not None:
            self._begin(self._marks)

    def mark(self, param: int, gradient: Array = None, divided: bool = False) -> None:
        """Take a final gradient: an array that gets the mean later, or None if it is in its bucket.

        May launch buckets. A caller that has written the gradient into its bucket may have divided
        it by `divisor` there, and then passes `divided`; with `divisor` 0, that is done later.
        RuntimeError, before any write, for a gradient that is not expected, or not again.
        """
        counting = self._marks is not None
        if counting and not self._schedule.remaining[param]:
            self._schedule.require_expected(param)
        # Without the lock, so that threads copy in parallel.
        self._storage.takes[param](param, gradient, self.divisor, divided)
        with self._lock:
            self._used[param] = 1
            self.arrived.append(param)
            self.times[param] = monotonic_ns() - self.began
            if counting:
                ready = self._schedule.mark(param)
                if ready:
                    self._launch_all(ready)

    def declare_unused(self, param: int) -> None:
        """Mark an expected gradient as unused: its current value takes part in the mean."""
        self._unused.append(param)
        self._storage.keep([param])
        self._launch_all(self._schedule.mark(param))

    def counts(self) -> list[int]:
        """Return how often each parameter was marked."""
        counted = Counter(self.arrived)
        return [counted[param] for param in range(len(self.times))]

    def end(self) -> None:
        """Launch the remaining buckets and wait for all buckets; raise the first error."""
        # RuntimeError names the missing gradients. Ctrl-C ends the wait at once; `Storage.wait`
        # waits for the operations that are still in flight.
        try:
            failure = self._finish_buckets()
        except BaseException:
            self.release()
            raise
        if failure is not None:
            raise failure

    def release(self) -> None:
        """Release the arrays from `mark` if the pass will not end."""
        for bucket in self._storage.buckets:
            bucket.end(reduced=False)

    def _finish_buckets(self) -> BaseException | None:
        buckets = self._storage.buckets
        failures = [] if self._failure is None else [self._failure]
        if not failures:
            _collect(failures, BackwardPass._launch_rest, [self])
        if not failures:
            _collect(failures, _SECOND_STEP, self._storage.sparse)
        if self._reduced is not None and not failures:
            _collect(failures, partial(BackwardPass._hand_over, wait=True), [self])
        _collect(failures, _WAIT, buckets)
        _collect(failures, _GIVE_MEANS if not failures else _RELEASE, buckets)
        return failures[0] if failures else None

    def _hand_over(self, wait: bool = False) -> None:
        """Call `reduced` for the next buckets that are reduced; with `wait`, wait for them."""
        assert self._reduced is not None
        for bucket in self._storage.buckets[self._handed : self._launched]:
            if not (wait or bucket.is_reduced()):
                return
            bucket.wait()
            bucket.end(reduced=True)
            self._reduced(self._handed)
            self._handed += 1

    def restore(self, used: Sequence[bool]) -> None:
        """Restore the old values of gradients that no rank has used."""
        self._storage.restore([param for param in self._unused if not used[param]])

    def _launch_rest(self) -> None:
        if self._marks is None:
            self._begin(self.counts(), hold=False)
        self._schedule.require_complete()
        self._delay = False
        if self._delayed:
            self._launch_all(self._delayed)

    def _begin(self, marks: Sequence[int], hold: bool = True) -> None:
        # Unused gradients take part in the mean with their current values.
        if 0 in marks:
            self._unused = [param for param, count in enumerate(marks) if count == 0]
            self._storage.keep(self._unused)
        ready = self._schedule.begin(marks if hold else [0] * len(marks))
        if ready:
            self._launch_all(ready)

    def _launch_all(self, indices: Iterable[int]) -> None:
        if self._delay:
            self._delayed.extend(indices)
            return
        if self._failure is not None:
            return  # other ranks launch the failed bucket first: a launch here would not match
        for index in indices:
            self.first_launch = self.first_launch or monotonic_ns()
            try:
                unused = self._skips and (
                    set(self._storage.buckets[index].views) <= set(self._unused)
                )
                self._launch(index, unused)
                self.skipped += unused
                self._launched += 1
                if self._reduced is not None:
                    self._hand_over()
            except BaseException as error:
                self._failure = error  # the pass has failed: later buckets are not launched
                raise


_SECOND_STEP, _WAIT = methodcaller("second_step"), methodcaller("wait")
_GIVE_MEANS, _RELEASE = methodcaller("end", reduced=True), methodcaller("end", reduced=False)


def _collect(
    failures: list[BaseException], call: Callable[[Any], object], each: Iterable[object]
) -> None:
    """Make a call for each object, and add the errors to `failures`."""
    for one in each:
        try:
            call(one)
        except Exception as error:  # noqa: BLE001  (raised when nothing is in flight any more)
            failures.append(error)
