"""Which parameters took part on any rank, agreed by one small all_reduce beside the buckets.

Contract: `mark` what this rank used; `agree` starts the exchange, after the last bucket on every
rank; `settle` waits for it. A gradient that no rank has used stays as it was: averaging zeros into
it would wake optimizers that keep momentum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from nc10d.ops import MAX
from nc10d.work import Work

if TYPE_CHECKING:
    from nc10d.group.collectives import Collectives

Flags = np.ndarray[Any, np.dtype[np.uint8]]


class UsedParameters:
    """One flag for each of `count` parameters; marks add up until ranks have agreed.

    `used` is what they have agreed on last: all of them, before the first time.
    """

    def __init__(self, count: int) -> None:
        self.used = [True] * count
        self._mine = bytearray(count)
        self._ours: Flags = np.zeros(count, np.uint8)
        self._work: Work | None = None

    def mark(self, param: int) -> None:
        """Take note that this rank used a parameter, in this pass or an accumulating one before."""
        self._mine[param] = 1

    def agree(self, group: Collectives) -> None:
        """Start to find out what any rank used; all ranks call. Does not block."""
        # Another array travels: marks of the next pass may come before this one has ended, and
        # where a pass has failed nobody waits for it.
        self._ours = np.frombuffer(self._mine, np.uint8)
        self._mine = bytearray(len(self._mine))
        self._work = group.all_reduce(self._ours, MAX, async_op=True)

    def settle(self) -> list[bool]:
        """Return, for each parameter, whether any rank used it; blocks until ranks have agreed.

        RuntimeError without an `agree` before; DistError if the exchange failed.
        """
        if self._work is None:
            raise RuntimeError("no exchange of used parameters is under way: call agree() first")
        work, self._work = self._work, None
        work.wait()
        self.used = [bool(flag) for flag in self._ours]
        return self.used
