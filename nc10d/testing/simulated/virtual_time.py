"""A scheduler of tasks in virtual time: a single task runs at a time, chosen by a seed.

Each task is a thread that runs while it holds the baton. A task gives the baton away where it waits
or pauses. Then the scheduler picks a runnable task; if there is none, time moves to the next event.
If there is no event either, no task can go on: each waiting task raises `stuck`'s error.

| a task's state | entered when |
|---|---|
| runnable | initially; what the task waited for has come, or the time has |
| running | the scheduler picks the task, which alone has the baton |
| waiting | the task waits for a change, or until a time |
| ended | the function has returned or raised |

While tasks run, `time.sleep`, `time.monotonic`, `time.time`, `time.perf_counter`, the clocks of
base/deadline.py, `threading.Event`, and Event and Condition of base/signal_errors.py are virtual
for them, and real for other threads.
"""

from __future__ import annotations

import bdb
import contextlib
import heapq
import itertools
import sys
import threading
import time
import traceback
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from typing import Any

from nc10d.base import deadline
from nc10d.base.call_site import frames_of_threads
from nc10d.base.deadline import Deadline
from nc10d.base.signal_errors import _Awaited

Label = Hashable
"""Names a step that can come next: ("rank", 2), or a message on its way."""
Choose = Callable[[Sequence[Label]], int]
"""Picks a label's place in a list of at least two."""
CLOCKS = "monotonic", "time", "perf_counter"
OWN_CLOCKS = "monotonic", "monotonic_ns", "time_of_day_ns"
REAL = {name: getattr(time, name) for name in ("sleep", *CLOCKS)}
REAL |= {name: getattr(deadline, name) for name in OWN_CLOCKS}
STACK_BYTES = 512 << 10
"""The stack for a task's thread: a thousand fit into a small machine's memory."""
POLL_SECONDS = 1e-5
"""Seconds that a look at an unfinished Work takes, so that a loop of looks ends."""
SPINS, GROWTH, MOST_GROWTHS = 100, 1.1, 150
"""Looks while nothing happens, after which each look takes longer than the last; up to 16 s."""
PATIENCE = 60.0
"""Real seconds for which a task may keep the baton."""


class Killed(BaseException):
    """The end of a task that a plan kills; not an Exception, so that programs let it pass."""


class RankTask:
    """A scheduler's task; `skew`, in seconds, is added to what `time.time` returns there."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.baton = threading.Semaphore(0)
        self.at = ""
        """The kind of the next step, if the task has given way."""
        self.looking = False
        self.waiting = False
        self.ended = False
        self.turn = 0
        """How often the task has been woken: a limit is for the wait in which it was set."""
        self.skew = 0.0
        self.paused_until = 0.0
        self.killed = False
        self.error: BaseException | None = None
        self.thread: threading.Thread | None = None


class Scheduler:
    """Tasks, events and the time."""

    def __init__(self, choose: Choose) -> None:
        self.choose = choose
        self.now = 0.0
        self.tasks: list[RankTask] = []
        self.stuck: Callable[[], BaseException] = lambda: RuntimeError("no task can go on")
        self.runnable: list[RankTask] = []
        self._events: list[tuple[float, int, bool, Callable[[], object]]] = []
        self._real = 0
        """Events that are no limits."""
        self._pauses = self.in_event = False
        self._looks = 0
        """Looks, and accesses to the store, since anything has happened."""
        self._numbers = itertools.count()
        self._done = threading.Semaphore(0)
        self._local = threading.local()

    def at(self, when: float, action: Callable[[], object], limit: bool = False) -> None:
        """Call `action` at a time; `action` must not wait.

        A `limit` only ends a wait that was in vain: where nothing else can happen, tasks are stuck.
        """
        self._real += not limit
        heapq.heappush(self._events, (when, next(self._numbers), limit, action))

    def run(self, functions: Sequence[Callable[[], object]]) -> None:
        """Run functions as tasks until all have ended; TimeoutError if a task never gives way."""
        self.tasks = [RankTask(number) for number in range(len(functions))]
        self.runnable = [*self.tasks]
        before = threading.stack_size(STACK_BYTES)
        try:
            for task, function in zip(self.tasks, functions, strict=True):
                name = "nc10d-rank"
                task.thread = threading.Thread(
                    target=self._main, args=(task, function), name=name, daemon=True
                )
                task.thread.start()
        finally:
            threading.stack_size(before)
        with self._virtual_time():
            self._pass_on(None)
            picked = self.now, self.running()
            while not self._done.acquire(timeout=PATIENCE):
                if picked == (self.now, self.running()) and not self._is_debugged():
                    raise TimeoutError(f"task {picked[1]} has not given way for {PATIENCE:g} s")
                picked = self.now, self.running()
        for task in self.tasks:
            assert task.thread is not None, "all have been started"
            task.thread.join()

    def _is_debugged(self) -> bool:
        """Return whether the running task is in a debugger."""
        thread = self.tasks[self.running()].thread
        frame = frames_of_threads().get((thread and thread.ident) or 0)
        return any(f.f_code.co_filename == bdb.__file__ for f, _ in traceback.walk_stack(frame))

    def running(self) -> int:
        """Return the number of the task that has the baton; -1 if none has."""
        return getattr(self, "_running", -1)

    def current(self) -> RankTask | None:
        """Return this thread's task."""
        return getattr(self._local, "task", None)

    def _main(self, task: RankTask, function: Callable[[], object]) -> None:
        self._local.task = task
        task.baton.acquire()
        try:
            function()
        finally:
            task.ended = True
            self._pass_on(task)

    def _pass_on(self, task: RankTask | None) -> None:
        """Give the baton to the next task; return when `task` has it again, if it has not ended."""
        following = self._next()
        if following is None:
            self._running = -1
            self._done.release()
            return
        self._running = following.number
        if following is task:
            return
        following.baton.release()
        if task is not None and not task.ended:
            task.baton.acquire()

    def _next(self) -> RankTask | None:
        while True:
            task = self._pick()
            if task is not None:
                self.runnable.remove(task)
                return task
            if self._real:
                self.next_event()
                continue
            left = [task for task in self.tasks if not task.ended]
            if not left:
                return None
            for task, error in [(task, self.stuck()) for task in left]:
                task.error = error  # a separate error: each raise adds to a traceback
                self.wake(task)

    def _pick(self) -> RankTask | None:
        """Return the runnable task that runs next; None if there is none now."""
        ready = self.runnable
        if self._pauses:
            ready = [task for task in ready if task.paused_until <= self.now]
        if len(ready) < 2:
            return ready[0] if ready else None
        return ready[self.choose([("rank", task.number) for task in ready])]

    def next_event(self) -> None:
        """Move the time to the next event, and let that happen."""
        when, _, limit, action = heapq.heappop(self._events)
        self.now = max(self.now, when)
        self._real -= not limit
        self.act(action)

    def event_is_due(self) -> bool:
        """Return whether the time has passed an event that is no limit."""
        return self._real > 0 and self._events[0][0] < self.now

    def act(self, action: Callable[[], object]) -> None:
        """Let an event happen."""
        self.in_event = True
        try:
            action()
        finally:
            self.in_event = False

    def wake(self, task: RankTask) -> None:
        """Make a waiting task runnable."""
        if task.waiting:
            task.waiting = False
            task.turn += 1
            if not task.looking:
                self._looks = 0
            self.runnable.append(task)

    def give_way(self, at: str) -> None:
        """Let other tasks run, if the choice falls on them, before this task's "call" or "store".

        A "call" posts an operation; "store" reads or changes the store.
        """
        task = self.current()
        if task is not None and not self.in_event:
            task.at = at
            self.runnable.append(task)
            self._pass_on(task)
            task.at = ""
            self._check(task)
            if at == "store" and self.spins():
                self.nap(task)

    def look(self) -> None:
        """Let a little time pass: a task looks whether something has come."""
        task = self.current()
        if task is not None:
            self.spins()
            self.nap(task)

    def spins(self) -> bool:
        """Count a look; return whether there have been many since anything has happened."""
        self._looks += 1
        return self._looks > SPINS

    def nap(self, task: RankTask) -> None:
        """Let time pass for a task that looks again and again: in the end a tenth of the wait."""
        growths = min(max(0, self._looks - SPINS), MOST_GROWTHS)
        task.looking = True
        self.sleep(POLL_SECONDS * GROWTH**growths)
        task.looking = False

    def wait(
        self, ready: Callable[[], bool], until: float, changed: list[RankTask], limit: bool = False
    ) -> bool:
        """Wait until `ready()`, or a time; return whether `ready()` is true. `limit` as in `at`.

        The task is in `changed` meanwhile; a change wakes the tasks there.
        """
        task = self.current()
        assert task is not None, "only a task waits in virtual time"
        if self.in_event and not ready():
            raise RuntimeError("a callback must not wait: it runs beside the ranks")
        while not ready():
            if until <= self.now:
                return False
            task.waiting = True
            changed.append(task)
            if until < float("inf"):
                self.at(until, partial(self._end_wait, task, task.turn), limit)
            self._pass_on(task)
            if task in changed:  # the time is over, or the task was killed
                changed.remove(task)
            self._check(task)
        return True

    def _end_wait(self, task: RankTask, turn: int) -> None:
        if task.turn == turn:
            self.wake(task)

    def wake_all(self, changed: list[RankTask]) -> None:
        """Wake the tasks that wait for a change."""
        tasks, changed[:] = [*changed], []
        for task in tasks:
            self.wake(task)

    def sleep(self, seconds: float) -> None:
        """Let virtual time pass for this task."""
        self.wait(lambda: False, self.now + seconds, [])

    def pause(self, number: int, seconds: float) -> None:
        """Let a task not run for some time."""
        self._pauses = True
        self.tasks[number].paused_until = self.now + seconds
        self.at(self.now + seconds, lambda: None)

    def kill(self, number: int) -> None:
        """End a task where it waits next, also if it is paused."""
        task = self.tasks[number]
        task.killed, task.paused_until = True, 0.0
        self.wake(task)

    def _check(self, task: RankTask) -> None:
        if task.killed:
            raise Killed
        if task.error is not None:
            error, task.error = task.error, None
            raise error

    @contextlib.contextmanager
    def _virtual_time(self) -> Iterator[None]:
        def clock(name: str) -> Callable[[], float]:
            def read() -> float:
                task = self.current()
                if task is None:
                    real: float = REAL[name]()
                    return real
                now = self.now + (task.skew if name.startswith("time") else 0.0)
                return int(now * 1e9) if name.endswith("_ns") else now

            return read

        changed: list[RankTask] = []

        def then_wake(real: Callable[[Any], None]) -> Callable[[Any], None]:
            def change(event: Any) -> None:
                real(event)
                if self.current() is not None:
                    self.wake_all(changed)

            return change

        real_wait, real_wait_until = threading.Event.wait, _Awaited._wait_until

        def wait(event: threading.Event, timeout: float | None = None) -> bool:
            if self.current() is None:
                return real_wait(event, timeout)
            endless = timeout is None or timeout >= threading.TIMEOUT_MAX
            until = float("inf") if endless else self.now + (timeout or 0.0)
            return self.wait(event.is_set, until, changed)

        def wait_until(awaited: _Awaited, ready: Callable[[], object], limit: Deadline) -> object:
            if self.current() is None:
                return real_wait_until(awaited, ready, limit)
            found: list[Any] = []

            def look() -> bool:
                value = None if found else ready()
                found.extend([] if value is None else [value])
                return bool(found)

            self.wait(look, limit.at, changed)
            return found[0] if found else None

        def sleep(seconds: float) -> None:
            REAL["sleep"](seconds) if self.current() is None else self.sleep(seconds)

        fakes: list[tuple[Any, str, Any]] = [(time, name, clock(name)) for name in CLOCKS]
        fakes.append((time, "sleep", sleep))
        for module, loaded in list(sys.modules.items()):
            if module.startswith("nc10d.") and loaded is not sys.modules[__name__]:
                fakes += [
                    (loaded, name, clock(name)) for name in OWN_CLOCKS if name in vars(loaded)
                ]
        fakes += [(threading.Event, "wait", wait), (_Awaited, "_wait_until", wait_until)]
        fakes += [(threading.Event, "set", then_wake(threading.Event.set))]
        fakes += [(_Awaited, "_wake", then_wake(_Awaited._wake))]
        with contextlib.ExitStack() as stack:
            for owner, name, fake in fakes:
                stack.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, fake)
            yield
