"""Virtual time, and ranks that run one at a time in an order that a seed decides.

Contract: a rank is a thread, but only one thread runs at any moment, and it runs until it waits
for something of the simulation. Time stands still while anybody runs and jumps to what is due
next when everybody waits. So a run depends on its seed alone. A run in which somebody waits and
nothing is due any more, or whose bound of virtual time is over, ends in Silence.
"""

from __future__ import annotations

import contextlib
import heapq
import importlib
import math
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

_BEGIN = 1000.0
_MOST_LOOKS = 10_000
_here = threading.local()


class Silence(AssertionError):
    """Somebody waits, and neither an answer nor an error has come within the bound."""


class Killed(BaseException):
    """The rank is dead; nothing but the simulation may hold on to this."""


class Signal:
    """Something that ranks wait for."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Actor, Callable[[], bool]]] = []

    def notify(self) -> None:
        """Wake who waits for something that is there now: to change threads costs the most."""
        waiting, self.waiting = self.waiting, []
        for actor, ready in waiting:
            if ready():
                actor.wake()
            else:
                self.waiting.append((actor, ready))


def _always() -> bool:
    return True


class Actor:
    """One rank: a body that runs in a thread of its own, when it is its turn."""

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
        except BaseException as error:  # noqa: BLE001  (what a rank ends with is judged later)
            self.error = error
        self.done, self.ended_at = True, self.sim.now
        self.sim.unfinished -= 1
        if not self.dead:
            self.sim.note(f"{self.name} ends: {self.error or self.result!r}")
        self._back.release()

    def wake(self) -> None:
        """Let the rank go on soon, if it still waits for what it waits for now."""
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
        """In the rank's own thread: let others run until something wakes it, or until then."""
        if self.dead:
            raise Killed
        if until < math.inf:
            self.sim.after(max(0.0, until - self.sim.now), self._resumption())
        self._back.release()
        self._go.acquire()
        if self.dead:
            raise Killed

    def kill(self) -> None:
        """End the rank as kill -9 does: nothing of it runs any more."""
        self.dead = True
        self._resume(self._ticket)
        self._thread.join()


class Simulation:
    """One run: virtual seconds in `now`, chance in `random`, and a trace of what happened."""

    def __init__(self, seed: int, bound: float = 30.0, *, verbose: bool = False) -> None:
        self.seed, self.verbose = seed, verbose
        self.random = random.Random(seed)
        self.now = _BEGIN
        self.end = _BEGIN + bound
        self.over = False
        self.unfinished = 0
        self.trace: list[str] = []
        self.actors: list[Actor] = []
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = self._looks = 0

    def note(self, text: str) -> None:
        """Add a line to the trace."""
        self.trace.append(f"{self.now - _BEGIN:9.4f} s  {text}")

    def after(self, delay: float, act: Callable[[], None]) -> None:
        """Have something done in so many virtual seconds."""
        self._count += 1
        heapq.heappush(self._due, (self.now + delay, self._count, act))

    def start(self, name: str, body: Callable[[], Any], delay: float = 0.0) -> Actor:
        """Add a rank that begins after a while."""
        actor = Actor(self, name, body)
        self.actors.append(actor)
        self.unfinished += 1
        self.after(delay, actor._resumption())
        return actor

    def wait(self, signal: Signal, until: float, ready: Callable[[], bool] = _always) -> None:
        """In a rank: wait for a signal, or until then; it may also come back for nothing.

        A signal is not for this rank unless `ready()`, which any thread may ask.
        """
        waiting = (_here.actor, ready)
        signal.waiting.append(waiting)
        waiting[0].block(until)
        if waiting in signal.waiting:
            signal.waiting.remove(waiting)

    def sleep(self, seconds: float) -> None:
        """In a rank: let virtual time go by."""
        until = self.now + seconds
        while self.now < until:
            _here.actor.block(until)

    def looked(self) -> float:
        """Return the time to who asks for it; Silence if somebody asks for ever and never waits."""
        self._looks += 1
        if self._looks > _MOST_LOOKS:
            raise Silence("somebody looks at the clock again and again, and never waits")
        return self.now

    def running(self) -> Actor | None:
        """Return the rank in whose thread this is called, if it is one's."""
        return getattr(_here, "actor", None)

    def run(self) -> None:
        """Run until all ranks have ended; Silence if that does not happen."""
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
            raise Silence(f"{self._waiting()} wait, and nothing will ever come")
        due, _, act = heapq.heappop(self._due)
        if due > self.end:
            bound = f"{self.end - _BEGIN:g} virtual seconds"
            raise Silence(f"{self._waiting()} still wait after {bound}")
        self.now, self._looks = due, 0
        act()

    def _waiting(self) -> list[str]:
        return [actor.name for actor in self.actors if not actor.done]


class VirtualClock:
    """Stands in for the module `time` in what is simulated; elsewhere it is the real one."""

    def monotonic(self) -> float:
        """Return the simulation's time in its threads."""
        sim: Simulation | None = getattr(_here, "sim", None)
        return time.monotonic() if sim is None else sim.looked()

    def sleep(self, seconds: float) -> None:
        """Let time go by."""
        sim: Simulation | None = getattr(_here, "sim", None)
        if sim is None:
            time.sleep(seconds)
        else:
            sim.sleep(seconds)


class Condition:
    """A threading.Condition among ranks, of which only one runs: there is no lock to hold."""

    def __init__(self) -> None:
        self._signal = Signal()

    def __enter__(self) -> Condition:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def notify_all(self) -> None:
        """Wake all who wait."""
        self._signal.notify()

    def wait_for(self, ready: Callable[[], bool], timeout: float) -> bool:
        """Wait until `ready()`, at most so many virtual seconds."""
        sim: Simulation = _here.sim
        until = sim.now + timeout
        while not ready() and sim.now < until:
            sim.wait(self._signal, until, ready)
        return ready()


class VirtualThreading:
    """Stands in for the module `threading` in what is simulated."""

    Condition = Condition
    Lock = threading.Lock
    RLock = threading.RLock


_TIMED = (
    "nc10d.base.deadline",
    "nc10d.store.session",
    "nc10d.store.client_connect",
    "nc10d.store.connection",
    "nc10d.store.auth_server",
    "nc10d.backend.cpu.control.group_control",
)


def _death(mate: object) -> str:
    return "killed by signal 9"


@contextlib.contextmanager
def virtual() -> Iterator[None]:
    """Let the product see virtual time in the threads of a simulation."""
    clock = VirtualClock()
    changes: list[tuple[str, str, Any]] = [(name, "time", clock) for name in _TIMED]
    changes.append(("nc10d.store.session", "monotonic", clock.monotonic))
    changes.append(("nc10d.backend.cpu.membership.formation", "death", _death))
    changes.append(("nc10d.backend.cpu.control.group_control", "threading", VirtualThreading))
    with contextlib.ExitStack() as stack:
        for name, attribute, value in changes:
            module = importlib.import_module(name)
            stack.callback(setattr, module, attribute, getattr(module, attribute))
            setattr(module, attribute, value)
        yield
