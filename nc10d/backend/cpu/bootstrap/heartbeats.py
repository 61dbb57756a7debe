"""Heartbeats in the store from ranks that compile, so that the other ranks go on waiting for them.

A host whose kernel cache is empty compiles for seconds, and for minutes beside other programs. The
ranks on a host with a full cache wait meanwhile, and have no other way to know that peers work.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from nc10d.base.deadline import Deadline, monotonic
from nc10d.base.signal_errors import Thread
from nc10d.errors import DistError

if TYPE_CHECKING:
    from nc10d.store.base import Store

LONGEST_PAUSE = 5.0
"""Seconds between two heartbeats from a rank, if its timeout is not short."""
RENEWED_SECONDS = 15.0
"""Seconds that a rank waits on after a heartbeat."""
_MOST_BEATS = 720
"""The most heartbeats of a rank: if its compiler hangs, the other ranks do not wait for ever."""
BEATS_KEY = "compiling"
"""The key that counts all ranks' heartbeats."""


@contextlib.contextmanager
def compiling(store: Store, deadline: Deadline) -> Iterator[None]:
    """Send heartbeats while the block runs; that time does not count for the deadline."""
    begun, ended = monotonic(), threading.Event()
    pause = min(LONGEST_PAUSE, deadline.limit / 4)
    thread = Thread(target=_beat, args=(store, ended, pause), name="nc10d-compiles", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        deadline.excuse(monotonic() - begun)


def _beat(store: Store, ended: threading.Event, pause: float) -> None:
    with contextlib.suppress(DistError):  # from the store: the rank's next call there meets it
        for _ in range(_MOST_BEATS):
            if ended.wait(pause):
                return
            store.add(BEATS_KEY, 1)


class Renewal:
    """Moves a deadline that has passed, if heartbeats have come since the last call.

    Earlier heartbeats may be this rank's own.
    """

    def __init__(self, store: Store, deadline: Deadline) -> None:
        self._store, self._deadline = store, deadline
        self._beats = store.add(BEATS_KEY, 0)

    def __call__(self) -> bool:
        """Return whether the deadline has been moved."""
        before, self._beats = self._beats, self._store.add(BEATS_KEY, 0)
        if before == self._beats or self._deadline.cancelled():
            return False
        late = max(0.0, monotonic() - self._deadline.at)  # if this process was stopped
        self._deadline.excuse(late + RENEWED_SECONDS)
        return True
