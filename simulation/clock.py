"""Virtual time, and ranks that run in turn, in an order that a seed decides.

Contract: each rank is a thread, but only a single thread runs at any moment. It runs until it
waits for a signal of the simulation. Time stands still while a rank runs. When all ranks wait,
time jumps to the next due event. So a run depends on its seed alone. The run ends in NoProgress if
a rank waits and no event is due, or if the bound of virtual time is over.
"""

from __future__ import annotations

import contextlib
import heapq
import importlib
import math
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from nc10d.base.deadline import Deadline

T = TypeVar("T")
_BEGIN = 1000.0
_MOST_READS = 10_000
_here = threading.local()


class NoProgress(AssertionError):
    """A rank waits, and neither an answer nor an error has come within the bound."""


class Killed(BaseException):
    """The rank is dead; only the simulation catches this."""


class Signal:
    """An event that ranks wait for."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Actor, Callable[[], bool]]] = []

    def notify(self) -> None:
        """Wake the ranks whose condition holds now."""
        # Ranks that would only wait again stay asleep: switching threads costs the most.
        waiting, self.waiting = self.waiting, []
        for actor, ready in waiting:
            if ready():
                actor.wake()
            else:
                self.waiting.append((actor, ready))


def _always() -> bool:
    return True


class Actor:
    """A rank: a function that runs in a thread of its own, when its turn comes."""

    def __init__(self, sim: Simulation, name: str, body: Callable[[], Any]) -> None:
        self.sim, self.name, self._body = sim, name, body
        self.dead = self.done = False
        self.paused_until = -math.inf
        self.result: Any = None
        self.error: BaseException | None = None
        self.ended_at = math.inf
        self._ticket = 0
        self._go, self._back = threading.Lock(), threading.Lock()
        self._go.acquire()
        self._back.acquire()
        self._thread = threading.Thread(target=self._main, daemon=True, name=f"simulated {name}")
        self._thread.start()

    def _main(self) -> None:
        self._go.acquire()
        _here.sim, _here.actor = self.sim, self
        try:
            if not self.dead:
                self.result = self._body()
        except Killed:
            pass
        except BaseException as error:  # noqa: BLE001  (the scenario's laws check it later)
            self.error = error
        self.done, self.ended_at = True, self.sim.now
        self.sim.unfinished -= 1
        if not self.dead:
            self.sim.note(f"{self.name} ends: {self.error or self.result!r}")
        self._back.release()

    def wake(self) -> None:
        """Let the rank go on soon, unless its present wait has ended by then."""
        self.sim.after(self.sim.random.random() * 1e-5, self._resumption())

    def _resumption(self) -> Callable[[], None]:
        ticket = self._ticket
        return lambda: self._resume(ticket)

    def _resume(self, ticket: int) -> None:
        if self.done or ticket != self._ticket:
            return
        late = self.paused_until - self.sim.now
        if late > 0 and not self.dead:
            self.sim.after(late, lambda: self._resume(ticket))
            return
        self._ticket += 1
        self._go.release()
        self._back.acquire()

    def block(self, until: float) -> None:
        """Let other ranks run until this rank is woken, or until `until`; its own thread calls."""
        if self.dead:
            raise Killed
        if until < math.inf:
            self.sim.after(max(0.0, until - self.sim.now), self._resumption())
        self._back.release()
        self._go.acquire()
        if self.dead:
            raise Killed

    def kill(self) -> None:
        """End the rank as kill -9 does."""
        self.dead = True
        self._resume(self._ticket)
        self._thread.join()


class Simulation:
    """A run: virtual seconds in `now`, random numbers in `random`, and a trace of its events."""

    def __init__(self, seed: int, bound: float = 30.0, *, verbose: bool = False) -> None:
        self.seed, self.verbose = seed, verbose
        self.random = random.Random(seed)
        self.nonces = random.Random(seed)  # a generator of their own: schedules stay as they are
        self.now = _BEGIN
        self.end = _BEGIN + bound
        self.over = False
        self.unfinished = 0
        self.trace: list[str] = []
        self.actors: list[Actor] = []
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = self._clock_reads = 0

    def note(self, text: str) -> None:
        """Add a line to the trace."""
        self.trace.append(f"{self.now - _BEGIN:9.4f} s  {text}")

    def after(self, delay: float, act: Callable[[], None]) -> None:
        """Call `act` in `delay` virtual seconds."""
        self._count += 1
        heapq.heappush(self._due, (self.now + delay, self._count, act))

    def start(self, name: str, body: Callable[[], Any], delay: float = 0.0) -> Actor:
        """Add a rank that begins after `delay` virtual seconds."""
        actor = Actor(self, name, body)
        self.actors.append(actor)
        self.unfinished += 1
        self.after(delay, actor._resumption())
        return actor

    def wait(self, signal: Signal, until: float, ready: Callable[[], bool] = _always) -> None:
        """Wait for a signal, or until `until`; a rank calls. It may also return without either.

        The signal wakes this rank only if `ready()`; any thread may call that.
        """
        waiting = (_here.actor, ready)
        signal.waiting.append(waiting)
        waiting[0].block(until)
        if waiting in signal.waiting:
            signal.waiting.remove(waiting)

    def sleep(self, seconds: float) -> None:
        """Let virtual time go by; a rank calls."""
        until = self.now + seconds
        while self.now < until:
            _here.actor.block(until)

    def read_clock(self) -> float:
        """Return the time; NoProgress if a rank polls the clock for ever and never waits."""
        self._clock_reads += 1
        if self._clock_reads > _MOST_READS:
            raise NoProgress("a rank polls the clock again and again, and never waits")
        return self.now

    def running(self) -> Actor | None:
        """Return the rank of the calling thread, or None."""
        return getattr(_here, "actor", None)

    def run(self) -> None:
        """Run until all ranks have ended; NoProgress if that does not happen."""
        _here.sim = self
        try:
            while self.unfinished:
                self._next()
        finally:
            for actor in self.actors:
                if not actor.done:
                    actor.kill()
            self.over = True
            self._due.clear()
            _here.sim = None

    def _next(self) -> None:
        if not self._due:
            raise NoProgress(f"{self._waiting()} wait, and nothing will ever come")
        due, _, act = heapq.heappop(self._due)
        if due > self.end:
            bound = f"{self.end - _BEGIN:g} virtual seconds"
            raise NoProgress(f"{self._waiting()} still wait after {bound}")
        self.now, self._clock_reads = due, 0
        act()

    def _waiting(self) -> list[str]:
        return [actor.name for actor in self.actors if not actor.done]


class VirtualClock:
    """Replacement of the module `time` in simulated modules: real time outside a simulation."""

    def monotonic(self) -> float:
        """Return the simulation's time in its threads, real time in others."""
        sim: Simulation | None = getattr(_here, "sim", None)
        return time.monotonic() if sim is None else sim.read_clock()

    def sleep(self, seconds: float) -> None:
        """Sleep in the simulation's time in its threads, in real time in others."""
        sim: Simulation | None = getattr(_here, "sim", None)
        if sim is None:
            time.sleep(seconds)
        else:
            sim.sleep(seconds)


class VirtualOs:
    """Replacement of the module `os` in the handshake, whose errors show nonces."""

    def urandom(self, count: int) -> bytes:
        """Return bytes that the seed decides in a simulation, random ones elsewhere."""
        sim: Simulation | None = getattr(_here, "sim", None)
        return os.urandom(count) if sim is None else sim.nonces.randbytes(count)


class Condition:
    """A signal_errors.Condition among ranks; it needs no lock, because ranks run in turn."""

    def __init__(self) -> None:
        self._signal = Signal()

    def notify_all(self) -> None:
        """Wake all waiting ranks."""
        self._signal.notify()

    def until(self, ready: Callable[[], T | None], deadline: Deadline) -> T | None:
        """Wait in virtual time until `ready` does not return None; return its last result."""
        sim: Simulation = _here.sim
        until = sim.now + deadline.remaining()
        while (found := ready()) is None and sim.now < until:
            sim.wait(self._signal, until, lambda: ready() is not None)
        return found


_TIMED = (
    "nc10d.base.deadline",
    "nc10d.store.session",
    "nc10d.store.client_connect",
    "nc10d.store.connection",
    "nc10d.store.server",
    "nc10d.backend.cpu.control.group_control",
)


def _death(peer: object) -> str:
    return "killed by signal 9"


@contextlib.contextmanager
def virtual() -> Iterator[None]:
    """Give the product virtual time in the threads of a simulation."""
    clock = VirtualClock()
    changes: list[tuple[str, str, Any]] = [(name, "monotonic", clock.monotonic) for name in _TIMED]
    changes.append(("nc10d.store.client_connect", "time", clock))  # it sleeps
    changes.append(("nc10d.auth.handshake", "os", VirtualOs()))
    changes.append(("nc10d.backend.cpu.membership.formation", "death", _death))
    changes.append(("nc10d.backend.cpu.control.group_control", "Condition", Condition))
    with contextlib.ExitStack() as stack:
        for name, attribute, value in changes:
            module = importlib.import_module(name)
            stack.callback(setattr, module, attribute, getattr(module, attribute))
            setattr(module, attribute, value)
        yield
