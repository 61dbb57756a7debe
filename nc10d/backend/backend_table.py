"""A group's backends: a backend for each kind of device, made when first needed, ended together.

The first failure (an abort, a close, a fork) stays: no backend is made or found afterwards. An
abort does not wait for a backend that is being made; that backend is aborted once it exists.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator

from nc10d.backend.abilities import FailureDetector, OtherBackends, cause_of
from nc10d.backend.protocol import Backend
from nc10d.base.deadline import Deadline
from nc10d.base.promise import copy_to_raise
from nc10d.errors import DistError, ForkedGroupError

Maker = Callable[[str, Deadline], Backend]
"""Called as maker(device, deadline); the maker may wait for the other ranks until then."""


class BackendTable:
    """Maps devices to backends, for any thread; `ready` has those that exist, none once failed."""

    def __init__(self) -> None:
        self.failure: DistError | None = None
        self.ready: dict[str, Backend] = {}
        self._made: dict[str, Backend] = {}
        self._closed: list[weakref.ref[Backend]] = []
        self._lock = threading.RLock()

    def find(self, device: str) -> Backend | None:
        """Return a device's backend, None if none was needed yet; raises the failure."""
        if self.failure is not None:
            raise copy_to_raise(self.failure)
        return self._made.get(device)

    def make(self, device: str, deadline: Deadline, maker: Maker) -> Backend:
        """Return a device's backend; the first caller makes it while others wait."""
        with self._lock:
            backend = self.find(device)
            if backend is None:
                backend = self._made[device] = self.ready[device] = maker(device, deadline)
        if self.failure is not None:
            self.ready.clear()
            backend.abort(self.failure)
            raise copy_to_raise(self.failure)
        return backend

    def others(self, device: str) -> OtherBackends:
        """Return a live view of all other devices' backends, also those made later."""
        made = self._made
        return OtherBackends(lambda: _detectors(b for d, b in tuple(made.items()) if d != device))

    def fail(self, reason: DistError) -> None:
        """Refuse to find or make backends from now on; the first reason stays."""
        self.failure = self.failure or reason
        self.ready.clear()

    def known_failure(self) -> BaseException | None:
        """Return the first failure, also one that a detector of dead ranks alone has seen."""
        if self.failure is not None:
            return self.failure
        found = (detector.failure() for detector in _detectors(self.ready.values()))
        return next((error for error in found if error is not None), None)

    def abort(self, reason: DistError) -> None:
        """Fail all backends, here and on every peer, with `reason`; blocks as Backend.abort."""
        self.fail(reason)
        made = tuple(self._made.values())
        for backend in made:
            backend.abort(reason)
        if self.failure is reason:  # a cause that ranks had agreed on before wins
            causes = map(cause_of, _detectors(made))
            earlier = (cause for cause in causes if cause and str(cause) != str(reason))
            self.failure = next(earlier, reason)

    def close(self, reason: DistError) -> None:
        """Close all backends; idempotent. In a forked child it closes none."""
        self.fail(reason)
        with self._lock:
            made, self._made = self._made, {}
        if not self.inherited:
            # Latest first: an earlier backend may know why peers have left.
            for backend in reversed(made.values()):
                backend.close()
                self._closed.append(weakref.ref(backend))

    @property
    def closing(self) -> bool:
        """Whether a closed backend may not have released everything yet."""
        return any(backend() is not None for backend in self._closed)

    def await_close(self, deadline: Deadline) -> None:
        """Wait until all backends have released everything, or until `deadline`."""
        for backend in [found for each in self._closed if (found := each()) is not None]:
            if not self.inherited:
                backend.await_close(deadline)

    def droppable(self) -> bool:
        """Return whether all backends may be dropped now; see Backend."""
        return self.failure is not None or all(
            backend.droppable() for backend in tuple(self._made.values())
        )

    @property
    def inherited(self) -> bool:
        """Whether the backends belong to the process that forked this process."""
        return isinstance(self.failure, ForkedGroupError)

    def disown(self, reason: ForkedGroupError) -> None:
        """Mark the table as failed in a forked child, whose parent may have held the lock."""
        self._lock = threading.RLock()
        self.failure = reason
        self.ready.clear()


def _detectors(backends: Iterable[Backend]) -> Iterator[FailureDetector]:
    found = (backend.failure_detector for backend in backends)
    return (detector for detector in found if detector is not None)
