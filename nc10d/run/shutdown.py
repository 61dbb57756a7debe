"""The order in which ranks are ended: a timetable as data, and a clock that reads the timetable.

A timetable is a list of steps, each at so many seconds after the shutdown began. A new timetable
replaces the current one: a second Ctrl-C cuts a graceful shutdown short.
"""

from __future__ import annotations

import enum
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nc10d.base.deadline import monotonic

INTERRUPT_GRACE = 0.5
"""Seconds between Ctrl-C's SIGINT and SIGKILL: every process must be gone within one second."""
CAUSE_WAIT = 5.0
"""Seconds to wait, after a secondary failure, for the exit of the rank that caused it.

That rank told its peers before it closed its groups and ended, which takes a busy machine seconds.
"""


class SignalTarget(enum.Enum):
    """The receivers of a signal: the ranks, or every process in their group, children too."""

    RANKS = enum.auto()
    GROUP = enum.auto()


@dataclass(frozen=True, slots=True)
class ShutdownStep:
    """Send signal `number` to `target`, `delay` seconds after the shutdown began."""

    delay: float
    number: signal.Signals
    target: SignalTarget


Timetable = Sequence[ShutdownStep]


def graceful(
    grace: float, delay: float = 0.0, number: signal.Signals = signal.SIGTERM
) -> Timetable:
    """Return: a signal to the ranks after `delay` seconds, SIGKILL to all `grace` seconds later.

    The ranks' children get no SIGTERM. A data loader that died before its rank has written its
    checkpoint would turn an orderly end into a disorderly end.
    """
    return (
        ShutdownStep(delay, number, SignalTarget.RANKS),
        ShutdownStep(delay + grace, signal.SIGKILL, SignalTarget.GROUP),
    )


# As Ctrl-C does in a shell, the whole group gets SIGINT once.
INTERRUPT: Timetable = (
    ShutdownStep(0.0, signal.SIGINT, SignalTarget.GROUP),
    ShutdownStep(INTERRUPT_GRACE, signal.SIGKILL, SignalTarget.GROUP),
)
KILL_NOW: Timetable = (ShutdownStep(0.0, signal.SIGKILL, SignalTarget.GROUP),)


class ShutdownClock:
    """Yields the steps of the current timetable as they become due."""

    def __init__(self, now: Callable[[], float] = monotonic) -> None:
        self._now = now
        self._steps: list[tuple[float, ShutdownStep]] = []

    def begin(self, timetable: Timetable) -> None:
        """Start `timetable` now, in place of the current timetable."""
        start = self._now()
        self._steps = [(start + step.delay, step) for step in timetable]

    def remaining(self) -> float | None:
        """Return the seconds until the next step, None if there is none."""
        return max(0.0, self._steps[0][0] - self._now()) if self._steps else None

    def take_due(self) -> list[ShutdownStep]:
        """Return the steps whose time has come; each step is returned once."""
        now = self._now()
        due = [step for at, step in self._steps if at <= now]
        del self._steps[: len(due)]
        return due
