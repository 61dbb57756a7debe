"""Signs in the store of ranks that compile, so that the other ranks go on waiting for them.

A host whose kernel cache is empty compiles for seconds, and for minutes beside other programs. The
ranks of a host with a full cache wait meanwhile, and have no other way to know that peers work.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from nc10d.base.deadline import Deadline, monotonic
from nc10d.base.signal_errors import Event, Thread, suppress_here
from nc10d.errors import DistError

if TYPE_CHECKING:
    from nc10d.store.base import Store

SECONDS = 5.0
"""Seconds between two signs of a rank."""
RENEWED_SECONDS = 15.0
"""Seconds that a rank waits on after a sign."""
_MOST = 720
KEY = "ranks/compiling"


@contextlib.contextmanager
def compiling(store: Store, deadline: Deadline) -> Iterator[None]:
    """Give signs, for at most an hour, while the block runs; its time is none of the deadline's."""
    begun, ended = monotonic(), Event()
    thread = Thread(target=_give_signs, args=(store, ended), name="nc10d-compiles", daemon=True)
    try:
        thread.start()
        yield
    finally:
        ended.set()
        deadline.excuse(monotonic() - begun)


def _give_signs(store: Store, ended: Event) -> None:
    with suppress_here(DistError):  # of the store: the rank's own next call there meets it
        for _ in range(_MOST):
            if ended.wait(SECONDS):
                return
            store.add(KEY, 1)


class Renewal:
    """Moves a deadline that has passed, if a rank has given a sign since the last call."""

    def __init__(self, store: Store, deadline: Deadline) -> None:
        self._store, self._deadline, self._seen = store, deadline, 0

    def __call__(self) -> bool:
        """Return whether the deadline has been moved."""
        seen, self._seen = self._seen, self._store.add(KEY, 0)
        if seen == self._seen:
            return False
        self._deadline.excuse(RENEWED_SECONDS)
        return True
