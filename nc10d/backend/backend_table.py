"""A group's backends: one for each kind of device, made when first needed, ended together.

The first failure (an abort, a close, a fork) stays: nothing is made or found after it. An abort
does not wait for a backend that is being made; that one is aborted as soon as it exists.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from nc10d.backend.base import Backend, OtherBackends
from nc10d.base.deadline import Deadline
from nc10d.base.promise import copy_to_raise
from nc10d.errors import DistError, ForkedGroupError, GroupClosed

Maker = Callable[[str, Deadline], Backend]
"""Called as maker(device, deadline); it may wait for the other ranks until then."""


class BackendTable:
    """Device → backend. All methods may be called by any thread.

    `ready` has those that are made, as long as nothing has failed.
    """

    def __init__(self) -> None:
        self.failure: DistError | None = None
        self.ready: dict[str, Backend] = {}
        self._made: dict[str, Backend] = {}
        self._lock = threading.RLock()

    def find(self, device: str) -> Backend | None:
        """Return a device's backend, None if it was not needed yet; raises the failure."""
        if self.failure is not None:
            raise copy_to_raise(self.failure)
        return self._made.get(device)

    def make(self, device: str, deadline: Deadline, maker: Maker) -> Backend:
        """Return a device's backend; if need be one thread makes it while others wait."""
        with self._lock:
            backend = self.find(device)
            if backend is None:
                backend = self._made[device] = self.ready[device] = maker(device, deadline)
        if self.failure is not None:
            self.ready.clear()
            backend.abort(self.failure)
            raise copy_to_raise(self.failure)
        return backend

    def usable(self, device: str) -> Backend | None:
        """Return a device's backend if it is there and nothing has failed."""
        return self.ready.get(device)

    def others(self, device: str) -> OtherBackends:
        """Return the backends of all devices but one, those that are made later among them."""
        return _OthersThan(device, self._made)

    def fail(self, reason: DistError) -> None:
        """Let nothing be found or made any more; the first reason stays."""
        self.failure = self.failure or reason
        self.ready.clear()

    def abort(self, reason: DistError) -> None:
        """Fail everything, here and on every peer, with `reason`; never blocks."""
        self.fail(reason)
        made = tuple(self._made.values())
        for backend in made:
            backend.abort(reason)
        if self.failure is reason:  # all ranks raise what was the cause before, if anything was
            causes = [_cause_of(backend) for backend in made if hasattr(backend, "failure")]
            earlier = (cause for cause in causes if cause and str(cause) != str(reason))
            self.failure = next(earlier, reason)

    def close(self, reason: DistError) -> None:
        """Give all backends back; idempotent. A forked child has none to give."""
        self.fail(reason)
        with self._lock:
            made, self._made = self._made, {}
        if not self.inherited:
            # The latest first: those made before it may know why others have left.
            for backend in reversed(made.values()):
                backend.close()

    @property
    def inherited(self) -> bool:
        """Say whether the backends belong to the process that forked this one."""
        return isinstance(self.failure, ForkedGroupError)

    def disown(self, reason: ForkedGroupError) -> None:
        """Be over in a forked child, whose parent may have held the lock."""
        self._lock = threading.RLock()
        self.failure = reason
        self.ready.clear()


class _OthersThan(OtherBackends):
    """What backends of other devices know; only those that have a `failure()` can tell."""

    def __init__(self, device: str, made: Mapping[str, Backend]) -> None:
        self._device = device
        self._made = made

    def _knowing(self) -> Iterator[Any]:
        for device, backend in tuple(self._made.items()):
            if device != self._device and hasattr(backend, "failure"):
                yield backend

    @property
    def agree(self) -> bool:
        return any(True for _ in self._knowing())

    def note(self) -> int:
        return next((int(backend.note) for backend in self._knowing()), 0)

    def whereabouts(self) -> tuple[str, dict[int, int]]:
        found = next(self._knowing(), None)
        return ("", {}) if found is None else found.whereabouts()

    def cause(self) -> DistError | None:
        return next(filter(None, map(_cause_of, self._knowing())), None)

    def tell(self, error: DistError) -> DistError | None:
        for backend in self._knowing():
            backend.abort(error)
        return self.cause()


def _cause_of(backend: Any) -> DistError | None:
    """Return why a backend has failed; that it was closed is no cause for others."""
    found = backend.failure()
    failed = isinstance(found, DistError) and not isinstance(found, GroupClosed)
    return found if failed else None
