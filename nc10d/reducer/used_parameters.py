"""Find the parameters that any rank used, by a small all_reduce beside the buckets.

Contract: `mark` records a parameter that this rank used. `agree` launches the exchange, after the
last bucket on every rank, and `wait` waits for it. A gradient that no rank has used keeps its old
value: a mean of zeros would make optimizers with momentum update the parameter.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nc10d.group.collectives import Collectives
from nc10d.ops import MAX
from nc10d.work import Work

Flags = np.ndarray[Any, np.dtype[np.uint8]]


class UsedParameters:
    """A flag for each of `count` parameters; flags accumulate until the next `agree`.

    `used` is the result of the last exchange; before the first exchange, all flags are True.
    """

    def __init__(self, count: int) -> None:
        self.used = [True] * count
        self._local = bytearray(count)
        self._any_rank: Flags = np.zeros(count, np.uint8)
        self._work: Work | None = None

    def mark(self, param: int) -> None:
        """Record that this rank used a parameter, in this pass or an accumulating pass before."""
        self._local[param] = 1

    def agree(self, group: Collectives) -> None:
        """Launch the exchange; all ranks call. Does not block."""
        # The exchange gets an array of its own: marks of the next pass may come before it ends, and
        # after a failed pass no thread waits for it.
        self._any_rank = np.frombuffer(self._local, np.uint8)
        self._local = bytearray(len(self._local))
        self._work = group.all_reduce(self._any_rank, MAX, async_op=True)

    def wait(self) -> list[bool]:
        """Return, for each parameter, whether any rank used it; blocks until the exchange ends.

        RuntimeError without an `agree` before; DistError if the exchange failed.
        """
        if self._work is None:
            raise RuntimeError("no exchange of used parameters is under way: call agree() first")
        work, self._work = self._work, None
        work.wait()
        self.used = [bool(flag) for flag in self._any_rank]
        return self.used
