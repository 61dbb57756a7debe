"""The load of other processes during a measurement.

It is the CPU time of the whole machine, less that of this process and of the children that it has
waited for. On a virtual machine, time that the host took away counts as load, too.
"""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path
from types import TracebackType

BUSY = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
"""The first fields of the line "cpu" in /proc/stat, see proc_stat(5)."""
RESTING = {"idle", "iowait"}


def busy(text: str, hertz: int) -> float:
    """Return the seconds that all cores worked since boot, from the text of /proc/stat."""
    words = text.split("\n", 1)[0].split()
    if words[:1] != ["cpu"]:
        raise ValueError(f"/proc/stat begins with {words[:1]}, not with cpu")
    ticks = dict(zip(BUSY, map(int, words[1:]), strict=False))
    return sum(count for name, count in ticks.items() if name not in RESTING) / hertz


def own() -> float:
    """Return the CPU seconds of this process and of the children that it has waited for."""
    spent = [
        resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    ]
    return sum(usage.ru_utime + usage.ru_stime for usage in spent)


class BackgroundLoad:
    """Measures a with-block; afterwards `cores` is the mean number of cores that others used."""

    def __init__(self) -> None:
        self.cores = 0.0

    def __enter__(self) -> BackgroundLoad:
        self._busy, self._own, self._start = _whole(), own(), time.monotonic()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        spent, whole = own() - self._own, _whole() - self._busy
        # The kernel counts the two by different clocks, so the difference may be negative.
        self.cores = max(0.0, whole - spent) / (time.monotonic() - self._start)


def _whole() -> float:
    return busy(Path("/proc/stat").read_text(), os.sysconf("SC_CLK_TCK"))
