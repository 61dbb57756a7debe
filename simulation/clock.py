"""A run in virtual time: its ranks are tasks of the test kit's scheduler, its events are traced.

Contract: a single rank runs at a time, until it waits. Time stands still while a rank runs. When
all ranks wait, time moves to the next event. The seed decides all choices, so a run depends on its
seed alone. The run ends in NoProgress if ranks wait and no event is due, or if the bound of virtual
time is over.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest import mock

from nc10d.auth import handshake
from nc10d.backend.cpu.membership import formation
from nc10d.init_methods import meeting
from nc10d.testing.simulated.virtual_time import Killed, RankTask, Scheduler

_MOMENT = 1e-5


class NoProgress(AssertionError):
    """A rank waits, and neither an answer nor an error has come within the bound."""


class Actor:
    """A rank: its function, and how it has ended."""

    def __init__(self, sim: Simulation, name: str, body: Callable[[], Any], delay: float) -> None:
        self.sim, self.name, self._body, self._delay = sim, name, body, delay
        self._number = len(sim.actors)
        self.dead = self.done = False
        self.result: Any = None
        self.error: BaseException | None = None
        self.ended_at = math.inf

    def play(self) -> None:
        """Call the function, after the delay; the rank's task calls this."""
        try:
            self.sim.sleep(self._delay)
            if not self.dead:
                self.result = self._body()
        except Killed:
            pass
        except BaseException as error:  # noqa: BLE001  (the scenario's laws check it later)
            self.error = error
        self.done, self.ended_at = True, self.sim.now
        if not self.dead:
            self.sim.note(f"{self.name} ends: {self.error or self.result!r}")

    def kill(self) -> None:
        """End the rank as kill -9 does."""
        self.dead = True
        self.sim.scheduler.kill(self._number)

    @property
    def paused_until(self) -> float:
        """The time at which the rank goes on after its last pause; 0 if it was never paused."""
        return self.sim.scheduler.tasks[self._number].paused_until

    def pause(self, seconds: float) -> None:
        """Stop the rank for some time."""
        self.sim.scheduler.pause(self._number, seconds)


class LateWaking(Scheduler):
    """A scheduler whose tasks go on a moment after the change that they wait for."""

    def __init__(self, random: Random) -> None:
        super().__init__(lambda labels: random.randrange(len(labels)))
        self._random = random

    def wake_all(self, changed: list[RankTask]) -> None:
        """Wake the tasks that wait for a change, each after a delay: other events may be first."""
        tasks, changed[:] = [*changed], []
        for task in tasks:
            when = self.now + self._random.random() * _MOMENT
            self.at(when, partial(self._end_wait, task, task.turn))


class Simulation:
    """A run: virtual seconds in `now`, random numbers in `random`, and a trace of its events."""

    def __init__(self, seed: int, bound: float = 30.0, *, verbose: bool = False) -> None:
        self.seed, self.end, self.verbose = seed, bound, verbose
        self.random = Random(seed)
        self.scheduler = LateWaking(self.random)
        self.trace: list[str] = []
        self.actors: list[Actor] = []
        self._failure: Exception | None = None

    @property
    def now(self) -> float:
        """The virtual time, in seconds; a run begins at 0."""
        return self.scheduler.now

    def note(self, text: str) -> None:
        """Add a line to the trace."""
        self.trace.append(f"{self.now:9.4f} s  {text}")

    def after(self, delay: float, act: Callable[[], None]) -> None:
        """Call `act` in `delay` virtual seconds, unless all ranks have ended by then."""
        self.at(self.now + delay, act)

    def at(self, when: float, act: Callable[[], None]) -> None:
        """Call `act` at a time, and in the order of these calls where times are equal."""
        self.scheduler.at(when, partial(self._happen, act))

    def _happen(self, act: Callable[[], None]) -> None:
        if self._unfinished():
            try:
                act()
            except Exception as error:  # noqa: BLE001  (`run` raises it)
                self._give_up(error)

    def start(self, name: str, body: Callable[[], Any], delay: float = 0.0) -> Actor:
        """Add a rank that begins after `delay` virtual seconds."""
        actor = Actor(self, name, body, delay)
        self.actors.append(actor)
        return actor

    def wait(self, ready: Callable[[], bool], until: float, changed: list[RankTask]) -> bool:
        """Wait until `ready()`, or a time; return whether it is ready. A rank calls.

        `notify(changed)` has the rank look again.
        """
        return self.scheduler.wait(ready, until, changed)

    def notify(self, changed: list[RankTask]) -> None:
        """Have the ranks that wait for a change look again."""
        self.scheduler.wake_all(changed)

    def sleep(self, seconds: float) -> None:
        """Let virtual time go by; a rank calls."""
        self.scheduler.sleep(seconds)

    def acting(self) -> Actor | None:
        """Return the rank that acts now; None for an event."""
        task = None if self.scheduler.in_event else self.scheduler.current()
        return None if task is None else self.actors[task.number]

    def run(self) -> None:
        """Run until all ranks have ended; raise what an event has raised, or NoProgress."""
        self.scheduler.stuck = self._stuck
        self.scheduler.at(self.end, self._end, limit=True)
        with contextlib.ExitStack() as stack:
            for module, name, fake in self._fakes():
                stack.enter_context(mock.patch.object(module, name, fake))
            self.scheduler.run([actor.play for actor in self.actors])
        if self._failure is not None:
            raise self._failure

    def _fakes(self) -> list[tuple[Any, str, Any]]:
        """Return what the seed could not decide otherwise, and what takes its place."""
        return [
            (handshake, "os", SimpleNamespace(urandom=Random(self.seed).randbytes)),
            (meeting, "os", SimpleNamespace(getpid=lambda: 1)),
            (meeting, "socket", SimpleNamespace(gethostname=lambda: "host")),
            (formation, "death", lambda peer: "killed by signal 9"),
            (logging.getLogger("nc10d"), "disabled", True),  # the reports of long waits
        ]

    def _stuck(self) -> BaseException:
        self._give_up(NoProgress(f"{self._unfinished()} wait, and nothing will ever come"))
        return Killed()

    def _end(self) -> None:
        if waiting := self._unfinished():
            bound = f"{self.end:g} virtual seconds"
            self._give_up(NoProgress(f"{waiting} still wait after {bound}"))

    def _give_up(self, failure: Exception) -> None:
        """End all ranks, for the first failure."""
        self._failure = self._failure or failure
        for number in range(len(self.actors)):
            self.scheduler.kill(number)

    def _unfinished(self) -> list[str]:
        return [actor.name for actor in self.actors if not actor.done]
