"""HashStore: a store in this process's memory, for ranks that are threads."""

# ruff: noqa: D102  (Store documents the methods)
from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from nc10d.base.deadline import Deadline
from nc10d.store.local import LocalStore
from nc10d.store.values import Values

T = TypeVar("T")


class HashStore(LocalStore):
    """A store that threads of one process share; a call that waits delays no other."""

    def __init__(self) -> None:
        self._values = Values()
        self._changed = threading.Condition()

    def _name(self) -> str:
        return "the hash store"

    @contextmanager
    def _access(self) -> Iterator[Values]:
        with self._changed:
            try:
                yield self._values
            finally:
                self._changed.notify_all()

    def _until(self, ready: Callable[[Values], T | None], deadline: Deadline) -> T | None:
        with self._changed:
            while (found := ready(self._values)) is None and not deadline.expired():
                self._changed.wait(deadline.slice(threading.TIMEOUT_MAX))
            return found

    def clone(self) -> HashStore:
        twin = HashStore()
        twin._values, twin._changed = self._values, self._changed
        twin._seconds = self._seconds
        return twin
