"""What the scenarios of faults share: a cell of the table, and how the end of a call is told."""

from __future__ import annotations

import itertools
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from nc10d.debug.libraries import Library
from nc10d.debug.stage import Report

TIMEOUT = 1.0
LIMIT = 20.0
numbers = itertools.count(1_000_000)
"""Of the groups that scenarios make: each is another one."""


@dataclass(frozen=True, slots=True)
class Cell:
    """What one library did in one scenario: how late, in seconds, and a few words."""

    late: tuple[float, ...]
    words: str

    def __str__(self) -> str:
        if not self.late:
            return self.words
        middle, most = statistics.median(self.late), max(self.late)
        return f"{1e3 * middle:.0f} / {1e3 * most:.0f} ms, {self.words}"


Scenario = Callable[[Library, int], Cell]


def counted(words: Iterable[str]) -> str:
    """Say how often there was each of some words."""
    return ", ".join(f"{word} {number}x" for word, number in Counter(words).most_common())


def shorten(library: Library) -> None:
    """Give the group the timeout of the scenario: to join may take longer."""
    if library.name == "nc10d":
        import nc10d

        nc10d.world.get_default_group().timeout = TIMEOUT
        return
    from datetime import timedelta

    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _set_pg_timeout

    _set_pg_timeout(timedelta(seconds=TIMEOUT), dist.group.WORLD)


def told(library: Library, call: Callable[[], object], due: float) -> Report:
    """Return what a call ended with, and how long after it was due."""
    try:
        call()
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  (it is what is looked at)
        return {"late": time.monotonic() - due, **library.told(error)}
    return {"late": time.monotonic() - due, "kind": "nothing", "message": "", "failed": None}
