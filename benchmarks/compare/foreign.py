"""What other processes did to the machine while something was measured.

CPU time of the whole machine, less this process's and that of the children it has waited for: what
is left is foreign. On a virtual machine the time that the host took away is foreign, too.
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
    """Return the seconds that all cores worked since boot, of the contents of /proc/stat."""
    words = text.split("\n", 1)[0].split()
    if words[:1] != ["cpu"]:
        raise ValueError(f"/proc/stat begins with {words[:1]}, not with cpu")
    ticks = dict(zip(BUSY, map(int, words[1:]), strict=False))
    return sum(count for name, count in ticks.items() if name not in RESTING) / hertz


def own() -> float:
    """Return the CPU seconds of this process and of the children that it has waited for."""
    spent = [resource.getrusage(of) for of in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in spent)


class Foreign:
    """Measures a with-block; afterwards `cores` is how many cores others kept busy, on average."""

    def __init__(self) -> None:
        self.cores = 0.0

    def __enter__(self) -> Foreign:
        self._busy, self._own, self._start = _whole(), own(), time.monotonic()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        mine, whole = own() - self._own, _whole() - self._busy
        # The kernel counts the two by different clocks: an idle machine may seem below nothing.
        self.cores = max(0.0, whole - mine) / (time.monotonic() - self._start)


def _whole() -> float:
    return busy(Path("/proc/stat").read_text(), os.sysconf("SC_CLK_TCK"))
