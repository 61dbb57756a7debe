"""The watchdog: a thread per process that polls groups for ends, errors, deadlines, callbacks.

CUDA and NCCL can't wake a thread. So this thread polls 20 times a second, 1,000 times a second
while a callback is awaited, and not at all while no Work is pending and no captured graph exists.
The thread waits without a lock.

NC10D_NCCL_HEARTBEAT=seconds ends the process, with the stack of every thread, if the watchdog
could not run for so long, for example because a driver call is stuck with the GIL. The timer is
faulthandler's, which needs no GIL.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import threading
import weakref
from typing import Protocol

from nc10d.base.signal_errors import Event, Thread
from nc10d.cuda import captured_graphs
from nc10d.cuda.streams import relax_capture_mode

_log = logging.getLogger(__name__)
SLOW, FAST = 0.05, 0.001
"""Seconds between polls: usually, and while a callback is awaited."""
HEARTBEAT = "NC10D_NCCL_HEARTBEAT"


class Watched(Protocol):
    """An object that the watchdog polls."""

    def tick(self) -> float | None:
        """Poll once; return the seconds until the next poll, None if none is needed."""


class _Graphs:
    """The captured graphs of all groups, also of those that have ended."""

    def tick(self) -> float | None:
        """Release what graphs have used that are gone; see Watched."""
        return SLOW if captured_graphs.sweep() else None


class Watchdog:
    """The thread and the polled objects; started by the first `watch`."""

    def __init__(self) -> None:
        self._watched: weakref.WeakSet[Watched] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._wake = Event()
        self._thread: Thread | None = None
        self.idle = True

    def watch(self, watched_object: Watched) -> None:
        """Poll `watched_object` as long as it lives."""
        with self._lock:
            self._watched.add(watched_object)
            if self._thread is None:
                thread = Thread(target=self._run, name="nc10d-nccl", daemon=True)
                thread.start_in(self, "_thread")

    def wake(self) -> None:
        """Poll now: a Work has been launched, or a callback attached."""
        self._wake.set()

    def _run(self) -> None:
        relax_capture_mode()
        while True:
            # A thread that launches after this line sees `idle`, and at worst wakes it needlessly.
            self.idle = True
            self._wake.clear()
            pause = self._look()
            if pause is not None:
                self.idle = False
            self._wake.wait(pause)

    def _look(self) -> float | None:
        _set_heartbeat()
        with self._lock:
            objects = [*self._watched, _Graphs()]
        pauses = [pause for each in objects if (pause := _tick(each)) is not None]
        return min(pauses, default=None)


def _tick(watched_object: Watched) -> float | None:
    try:
        return watched_object.tick()
    except Exception:  # noqa: BLE001  (the other objects still need polls)
        _log.exception("looking after %r failed", watched_object)
        return SLOW


def _set_heartbeat() -> None:
    limit = float(os.environ.get(HEARTBEAT) or 0)
    if limit > 0:
        faulthandler.dump_traceback_later(limit, exit=True)


watchdog = Watchdog()


def _renew_after_fork() -> None:
    watchdog.__init__()  # type: ignore[misc]


os.register_at_fork(after_in_child=_renew_after_fork)
