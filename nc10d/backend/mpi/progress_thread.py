"""What moves this process's MPI traffic: whoever waits, and a thread when nobody does.

Every look advances all groups, because a peer may need this rank's part of another group's
operation before it can do what this rank waits for. One lock guards the groups and all of their
calls of MPI, none of which blocks. Works are finished outside the lock: callbacks are users' code.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

from nc10d.base.deadline import Deadline
from nc10d.base.promise import PENDING
from nc10d.work import Work

if TYPE_CHECKING:
    from nc10d.backend.mpi.group import MpiGroup

SPINS, YIELDS = 20, 2000  # looks at full speed, then looks that let others have the core
SLICE = 0.0005  # seconds from look to look after that, and of the thread's


class ProgressThread:
    """The process's groups that talk by MPI, and the thread that moves them along."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._lanes: list[MpiGroup] = []
        self._leaving: list[MpiGroup] = []
        self._ended: deque[tuple[Work, BaseException | None, Any]] = deque()
        self._watched: set[Work] = set()
        self._waiting = 0
        self._thread: threading.Thread | None = None
        self._needed = threading.Event()
        self._stopping = threading.Event()

    def join(self, lane: MpiGroup) -> None:
        """Take a group in."""
        with self.lock:
            self._lanes.append(lane)
            self._sweep()

    def leave(self, lane: MpiGroup) -> None:
        """Forget a group; the last one takes the thread with it."""
        with self.lock:
            self._lanes.remove(lane)
            self._leaving.append(lane)
            self._sweep()
            last = not self._lanes
        self.publish()
        if last:
            self.stop()

    def _sweep(self) -> None:
        """Give back what closed groups held, where all ranks have left."""
        self._leaving = [lane for lane in self._leaving if not lane.let_go()]

    def advance(self) -> None:
        """Look at everything once; never blocks."""
        with self.lock:
            for lane in tuple(self._lanes):
                lane.advance()
        self.publish()

    def end(self, work: Work, error: BaseException | None, result: Any = None) -> None:
        """Remember how a work ended; `publish` tells."""
        self._ended.append((work, error, result))

    def publish(self) -> None:
        """Tell whoever waits for works that have ended; not with the lock held."""
        while self._ended:
            try:
                work, error, result = self._ended.popleft()
            except IndexError:  # another thread tells of the last one
                return
            work._finish(error, result)

    def wait(self, work: Work, until: Deadline) -> None:
        """Return when a work has ended or `until` has passed."""
        looks = 0
        with self.lock:
            self._waiting += 1
        try:
            while work._state == PENDING and not until.expired():
                self.advance()
                looks += 1
                if looks > YIELDS:
                    Work._block(work, Deadline.after(until.slice(SLICE)))
                elif looks > SPINS:
                    os.sched_yield()
        finally:
            with self.lock:
                self._waiting -= 1

    def watch(self, work: Work) -> None:
        """Have the thread finish a work that has callbacks."""
        self._watched.add(work)
        self.need_thread()

    def need_thread(self) -> None:
        """Start the thread, or wake it: something is on its way that nobody may wait for."""
        with self.lock:
            if self._thread is None:
                self._stopping.clear()
                name = "nc10d-mpi"
                self._thread = threading.Thread(target=self._move, name=name, daemon=True)
                self._thread.start()
        self._needed.set()

    def _move(self) -> None:
        """Advance what nobody waits for."""
        while not self._stopping.wait(SLICE):
            if not (self._watched or self._busy()):
                self._needed.wait()
                self._needed.clear()
            elif not self._waiting:
                self.advance()
            self._notify()

    def _busy(self) -> bool:
        with self.lock:
            return any(lane.busy for lane in self._lanes)

    def _notify(self) -> None:
        """Run the callbacks of watched works that others have found ended."""
        for work in tuple(self._watched):
            if work._state != PENDING:
                self._watched.discard(work)
                work._finish()

    def stop(self) -> None:
        """End the thread, after the callbacks that are due; idempotent."""
        with self.lock:
            thread, self._thread = self._thread, None
        if thread is None:
            return
        self._stopping.set()
        self._needed.set()
        if thread is not threading.current_thread():
            thread.join()
        self._notify()

    def finalize(self) -> None:
        """Leave nothing that MPI's end would wait for."""
        for lane in tuple(self._lanes):
            lane.close()
        self.stop()
        with self.lock:
            for lane in self._leaving:
                lane.stop_listening()


engine = ProgressThread()


def _renew_after_fork() -> None:
    """In a child nothing of this is usable: MPI knows one process only."""
    engine.__init__()  # type: ignore[misc]


os.register_at_fork(after_in_child=_renew_after_fork)
# MPI is finalised behind this: no thread may call it then.
atexit.register(engine.finalize)
