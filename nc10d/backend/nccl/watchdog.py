"""One thread a process that looks after what is under way: ends, errors, deadlines, callbacks.

CUDA and NCCL wake nobody, so it looks: twenty times a second, or a thousand times while somebody
waits for a callback, and not at all while nothing is under way. It holds no lock while it waits.

NC10D_NCCL_HEARTBEAT=seconds ends the process, with the stack of every thread, if the thread
has not been able to run for so long: a thread that holds the GIL for good (stuck in a driver call,
say) is ended by faulthandler's own timer, which needs no GIL.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import threading
import weakref
from typing import Protocol

from nc10d.cuda.streams import spoil_no_capture

_log = logging.getLogger(__name__)
SLOW, FAST = 0.05, 0.001
"""Seconds from look to look: usually, and while a callback is waited for."""
HEARTBEAT = "NC10D_NCCL_HEARTBEAT"


class Watched(Protocol):
    """What is looked after."""

    def tick(self) -> float | None:
        """Look once; return in how many seconds to look again, or None for nothing under way."""
        ...


class Watchdog:
    """The thread and what it looks at; started by the first `watch`."""

    def __init__(self) -> None:
        self._watched: weakref.WeakSet[Watched] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self.idle = True

    def watch(self, watched_object: Watched) -> None:
        """Look after `one` as long as it lives."""
        with self._lock:
            self._watched.add(watched_object)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="nc10d-nccl", daemon=True)
                self._thread.start()

    def wake(self) -> None:
        """Look now: something has been launched, or is waited for."""
        self._wake.set()

    def _run(self) -> None:
        spoil_no_capture()
        while True:
            # Whoever launches behind this line finds it idle, and wakes it once too often at worst.
            self.idle = True
            self._wake.clear()
            pause = self._look()
            if pause is not None:
                self.idle = False
            self._wake.wait(pause)

    def _look(self) -> float | None:
        _set_heartbeat()
        with self._lock:
            objects = list(self._watched)
        pauses = [
            pause for watched_object in objects if (pause := _tick(watched_object)) is not None
        ]
        return min(pauses, default=None)


def _tick(watched_object: Watched) -> float | None:
    try:
        return watched_object.tick()
    except Exception:  # noqa: BLE001  (the others still need looking after)
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
