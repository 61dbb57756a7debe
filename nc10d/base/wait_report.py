"""Words about a long wait for other processes: lines meanwhile, and the text of its time-out.

The lines are warnings of the logger `nc10d`: Python shows them on stderr if a program has set up no
logging. The first comes after three seconds, and each later one when twice the time has passed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from nc10d.base.call_site import called, here
from nc10d.base.deadline import Deadline
from nc10d.base.text import in_seconds

FIRST_SECONDS = 3.0


class WaitReport:
    """The wait of `waiter` ("rank 1 of 4"), which begins now and ends at `deadline`."""

    def __init__(self, waiter: str, deadline: Deadline) -> None:
        self._waiter, self._begun, self._limit = waiter, time.monotonic(), deadline.limit
        self._next = self._begun + FIRST_SECONDS

    def look(self, missing: Callable[[], str]) -> None:
        """Log a line with `missing()` if a line is due. The caller calls it during the wait."""
        now = time.monotonic()
        if now < self._next:
            return
        waited = now - self._begun
        self._next = now + waited
        end = "without a timeout" if math.isinf(self._limit) else f"of {in_seconds(self._limit)}"
        call = called(f"{self._waiter} has waited {in_seconds(waited)} {end}", here())
        # Imported here: most programs never log a line.
        import logging

        logging.getLogger("nc10d").warning("nc10d: %s: %s", call, missing())

    def next_seconds(self) -> float:
        """Return the seconds until the next line is due."""
        return max(0.0, self._next - time.monotonic())

    def timed_out(self, missing: str) -> str:
        """Return the text of the time-out: the waiter, the time, the line, and `missing`."""
        call = called(f"{self._waiter} timed out after {in_seconds(self._limit)}", here())
        return f"{call}: {missing}"
