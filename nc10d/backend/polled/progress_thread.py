"""Progress for a library's traffic in this process: by waiting threads, by a thread if none waits.

Every poll advances all groups, because a peer may need this rank's part in another group's
operation before the peer can do its part in the operation that this rank waits for. A lock guards
the groups and all their calls to the library, none of which blocks. Works are finished outside the
lock, because callbacks are users' code.
"""

from __future__ import annotations

import atexit
import os
import threading
from typing import Protocol

from nc10d.base.deadline import Deadline
from nc10d.base.promise import PENDING
from nc10d.base.signal_errors import Event, Thread
from nc10d.work import Work

SPINS, YIELDS = 20, 2000  # polls at full speed, then polls that yield the core
POLL_SECONDS = 0.0005  # between later polls, and between the thread's polls


class ProgressedGroup(Protocol):
    """A group as the progress thread uses it."""

    @property
    def busy(self) -> bool:
        """Whether a call or a message is in flight."""

    def advance(self) -> None:
        """Advance calls and messages without blocking."""

    def close(self) -> None:
        """Leave the group."""

    def free(self) -> bool:
        """Free the group's resources in the library, if nothing can arrive; return if done."""

    def stop_listening(self) -> None:
        """Cancel every request that the library's end would wait for."""


class ProgressThread:
    """The process's groups on a library, and the thread, called `name`, that advances them."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.lock = threading.RLock()
        self._groups: list[ProgressedGroup] = []
        self._closed_groups: list[ProgressedGroup] = []
        self._ended: dict[Work, tuple[BaseException | None, object]] = {}
        self._watched: set[Work] = set()
        self._waiting = 0
        self._thread: Thread | None = None
        self._needed = Event()
        self._stopping = Event()

    def join(self, group: ProgressedGroup) -> None:
        """Advance a group from now on."""
        with self.lock:
            self._groups.append(group)
            self._sweep()

    def leave(self, group: ProgressedGroup) -> None:
        """Remove a group; the thread ends with the last group."""
        with self.lock:
            self._groups.remove(group)
            self._closed_groups.append(group)
            self._sweep()
            last = not self._groups
        self.finish_ended()
        if last:
            self.stop()

    def _sweep(self) -> None:
        """Free the closed groups' communicators that all ranks have left."""
        self._closed_groups = [group for group in self._closed_groups if not group.free()]

    def advance(self) -> None:
        """Poll all groups once; never blocks."""
        with self.lock:
            for group in tuple(self._groups):
                group.advance()
        self.finish_ended()

    def end(self, work: Work, error: BaseException | None, result: object = None) -> None:
        """Record how a work ended; `finish_ended` finishes the work."""
        self._ended[work] = error, result

    def finish_ended(self) -> None:
        """Finish the works that have ended, which wakes their waiters; call without the lock."""
        while self._ended:
            for work in tuple(self._ended):
                if (end := self._ended.get(work)) is not None:
                    work._finish(*end)
                # Only now: a handler's error must not lose it. Two threads may finish it.
                self._ended.pop(work, None)

    def wait(self, work: Work, until: Deadline) -> None:
        """Return when a work has ended or `until` has passed."""
        polls = 0
        with self.lock:
            self._waiting += 1
        try:
            while work._state == PENDING and not until.expired():
                polls += 1
                self.pause(work, polls, until)
        finally:
            with self.lock:
                self._waiting -= 1

    def pause(self, work: Work, polls: int, until: Deadline) -> None:
        """Poll all groups once, and then rest the longer, the more polls there have been."""
        self.advance()
        if polls > YIELDS:
            Work._block(work, Deadline.after(until.slice(POLL_SECONDS)))
        elif polls > SPINS:
            os.sched_yield()

    def watch(self, work: Work) -> None:
        """Have the thread finish a work that has callbacks."""
        self._watched.add(work)
        self.need_thread()

    def need_thread(self) -> None:
        """Start or wake the thread, for an operation that no thread may wait for."""
        with self.lock:
            if self._thread is None:
                self._stopping.clear()
                thread = Thread(target=self._run, name=self._name, daemon=True)
                thread.start_in(self, "_thread")
        self._needed.set()

    def _run(self) -> None:
        """Advance all groups while no other thread does."""
        while not self._stopping.wait(POLL_SECONDS):
            if not (self._watched or self._busy()):
                self._needed.wait()
                self._needed.clear()
            elif not self._waiting:
                self.advance()
            self._notify()

    def _busy(self) -> bool:
        with self.lock:
            return any(group.busy for group in self._groups)

    def _notify(self) -> None:
        """Run the callbacks of watched works that other threads have ended."""
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

    def forget(self) -> None:
        """Forget all groups, in a forked child, which must not call the library."""
        self.__init__(self._name)  # type: ignore[misc]

    def finalize(self) -> None:
        """Close all groups, and cancel every request that the library's end would wait for."""
        for group in tuple(self._groups):
            group.close()
        self.stop()
        with self.lock:
            for group in self._closed_groups:
                group.stop_listening()


def progress_thread(name: str) -> ProgressThread:
    """Make a library's ProgressThread, which forgets in a forked child and ends at exit."""
    made = ProgressThread(name)
    os.register_at_fork(after_in_child=made.forget)
    atexit.register(made.finalize)
    return made
