"""Launch order: buckets get ready in any order, and are launched in plan order.

Contract: a state machine without I/O, locks or arrays. `mark` and `begin` return the buckets to
launch now; the caller launches exactly these, in this order. Every rank then launches the same
sequence, whatever the order in which its gradients arrived. Two ranks that launch collectives in
different orders would deadlock.
"""

from __future__ import annotations

from collections.abc import Sequence

SHOWN = 10
_NONE = range(0)


class UnexpectedGradientError(RuntimeError):
    """A gradient is ready that the pass does not expect, or not again."""


class Schedule:
    """Counts each pass's marks; errors call parameters by `names`, or by their numbers."""

    def __init__(
        self, buckets: Sequence[Sequence[int]], names: Sequence[str] | None = None
    ) -> None:
        self._buckets = [list(bucket) for bucket in buckets]
        self._bucket_of = {p: i for i, bucket in enumerate(self._buckets) for p in bucket}
        self._names = names
        self.remaining = [0] * len(self._bucket_of)
        """How often this pass still expects each parameter's mark."""
        self._expected = (0,) * len(self._bucket_of)
        self._members = [0] * len(self._buckets)
        self._pending = [0] * len(self._buckets)
        self._next = len(self._buckets)

    def begin(self, marks: Sequence[int] | None = None) -> range:
        """Start a pass in which parameter p is marked `marks[p]` times (without `marks`, once)."""
        # Return the buckets to launch at once: those before the first bucket that expects a mark. A
        # pass that has not ended is dropped.
        expected = (1,) * len(self._bucket_of) if marks is None else tuple(marks)
        if expected != self._expected:  # most passes expect the marks of the pass before
            self._expect(expected)
        self.remaining, self._pending = list(expected), list(self._members)
        self._next = 0
        return self._advance()

    def _expect(self, expected: tuple[int, ...]) -> None:
        if len(expected) != len(self._bucket_of) or min(expected, default=0) < 0:
            raise ValueError(f"marks must be {len(self._bucket_of)} counts, got {list(expected)}")
        self._members = [sum(expected[p] > 0 for p in bucket) for bucket in self._buckets]
        self._expected = expected

    def mark(self, param: int) -> range:
        """Record a gradient's arrival; return the buckets to launch; see `require_expected`."""
        remaining = self.remaining[param]
        if not remaining:
            self.require_expected(param)
        self.remaining[param] = remaining - 1
        if remaining > 1:
            return _NONE
        bucket = self._bucket_of[param]
        self._pending[bucket] -= 1
        # Most marks launch no bucket: theirs is not full, or not the next in the order.
        return _NONE if self._pending[bucket] or bucket != self._next else self._advance()

    def require_expected(self, param: int) -> None:
        """Raise an UnexpectedGradientError if the gradient is not expected, or not again."""
        if self.remaining[param] == 0:
            raise UnexpectedGradientError(self._too_often(param))

    def missing(self) -> list[int]:
        """Return the parameters whose gradients are missing."""
        return [param for param, count in enumerate(self.remaining) if count]

    def require_complete(self) -> None:
        """Raise a RuntimeError that names the missing parameters, if there are any."""
        if any(self.remaining):
            raise RuntimeError(self._never(self.missing()))

    def _advance(self) -> range:
        start = end = self._next
        while end < len(self._pending) and self._pending[end] == 0:
            end += 1
        self._next = end
        return range(start, end)

    def name(self, param: int) -> str:
        """Return a parameter's name in errors."""
        return f"parameter {param}" if self._names is None else self._names[param]

    def _too_often(self, param: int) -> str:
        expected = self._expected[param]
        if expected == 0:
            return (
                f"the gradient of {self.name(param)} is ready, but it was declared unused in this "
                "pass (or no pass has begun): leave it out of `unused`"
            )
        times = "twice" if expected == 1 else f"more than {expected} times"
        return (
            f"the gradient of {self.name(param)} was marked ready {times} in one backward pass. "
            "Mark a parameter once, when its gradient is final; if it takes part several times and "
            "always as often, a static graph learns the count"
        )

    def _never(self, missing: Sequence[int]) -> str:
        shown = ", ".join(self.name(param) for param in missing[:SHOWN])
        more = f" and {len(missing) - SHOWN} more" if len(missing) > SHOWN else ""
        return (
            f"the backward pass ended without the gradients of {shown}{more}. Declare what takes "
            "no part as unused when the pass begins (a module: find_unused_parameters=True)"
        )
