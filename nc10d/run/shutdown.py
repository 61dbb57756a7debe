"""In which order ranks are ended: a timetable as data, and a clock that reads it.

A timetable is a list of steps, each so many seconds after the ending began. A later timetable
replaces an earlier one only if it is more urgent: Ctrl-C cuts short a polite ending.
"""

from __future__ import annotations

import enum
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

INTERRUPT_GRACE = 0.5
"""Seconds between Ctrl-C's SIGINT and SIGKILL: everything must be gone within one second."""
SETTLE = 1.0
"""Seconds to wait, after a rank died of another's failure, for that other's exit."""


class SignalTarget(enum.Enum):
    """Who gets a signal: the ranks, or everything in their process group, children too."""

    RANKS = enum.auto()
    GROUP = enum.auto()


@dataclass(frozen=True, slots=True)
class ShutdownStep:
    """Send `number` to `whom`, `delay` seconds after the ending began."""

    delay: float
    number: signal.Signals
    whom: SignalTarget


Timetable = Sequence[ShutdownStep]


def politely(grace: float, delay: float = 0.0, number: int = signal.SIGTERM) -> Timetable:
    """Ask the ranks to end; after `grace` seconds end everything.

    Children of ranks are left to their parents at first: a data loader that dies before its rank
    has written its checkpoint would turn an orderly end into a disorderly one.
    """
    return (
        ShutdownStep(delay, signal.Signals(number), SignalTarget.RANKS),
        ShutdownStep(delay + grace, signal.SIGKILL, SignalTarget.GROUP),
    )


# What Ctrl-C does in a shell: the whole group gets SIGINT, once.
INTERRUPT: Timetable = (
    ShutdownStep(0.0, signal.SIGINT, SignalTarget.GROUP),
    ShutdownStep(INTERRUPT_GRACE, signal.SIGKILL, SignalTarget.GROUP),
)
AT_ONCE: Timetable = (ShutdownStep(0.0, signal.SIGKILL, SignalTarget.GROUP),)


class ShutdownClock:
    """Tells which steps of the current timetable are due, and how long until the next."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._due: list[tuple[float, ShutdownStep]] = []

    def begin(self, timetable: Timetable) -> None:
        """Start `timetable` now, instead of whatever was running."""
        start = self._now()
        self._due = [(start + step.delay, step) for step in timetable]

    def remaining(self) -> float | None:
        """Return the seconds until the next step, None if there is none."""
        return max(0.0, self._due[0][0] - self._now()) if self._due else None

    def take_due(self) -> list[ShutdownStep]:
        """Return the steps whose time has come; each is returned once."""
        now = self._now()
        due = [step for at, step in self._due if at <= now]
        del self._due[: len(due)]
        return due
