"""Timetables of a shutdown, on a clock that the test moves."""

from __future__ import annotations

import signal

from nc10d.run.shutdown import INTERRUPT, KILL_NOW, ShutdownClock, SignalTarget, graceful


class Time:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_an_idle_clock_waits_for_ever() -> None:
    clock = ShutdownClock(Time())
    assert clock.remaining() is None
    assert clock.take_due() == []


def test_ranks_are_asked_before_everything_is_killed() -> None:
    time = Time()
    clock = ShutdownClock(time)
    clock.begin(graceful(5.0, delay=1.0))
    assert (clock.remaining(), clock.take_due()) == (1.0, [])
    time.now += 1.0
    (first,) = clock.take_due()
    assert (first.number, first.target) == (signal.SIGTERM, SignalTarget.RANKS)
    assert clock.remaining() == 5.0
    time.now += 60.0
    (last,) = clock.take_due()
    assert (last.number, last.target) == (signal.SIGKILL, SignalTarget.GROUP)
    assert clock.remaining() is None


def test_a_new_timetable_replaces_the_old() -> None:
    clock = ShutdownClock(Time())
    clock.begin(graceful(60.0))
    clock.begin(KILL_NOW)
    assert [step.number for step in clock.take_due()] == [signal.SIGKILL]
    assert clock.remaining() is None


def test_ctrl_c_leaves_nothing_after_one_second() -> None:
    assert INTERRUPT[0].number == signal.SIGINT
    assert INTERRUPT[-1].number == signal.SIGKILL
    assert INTERRUPT[-1].delay < 0.8
