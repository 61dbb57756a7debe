"""FileStore: a store in a file that processes share, on one host or over a network file system.

The last user to close the store, or to end, removes the file if all `world_size` users had opened
it. With an unknown world size the file stays. If users were killed, the file stays too, and the
next job starts it anew once no user is left, whatever that job's size. Users that close the store
before all have come leave their values to those that come later.
"""

# ruff: noqa: D102  (Store documents the methods)
from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from nc10d.base.deadline import Deadline, Timeout, seconds
from nc10d.base.run_to_end import off_main, run_to_end
from nc10d.base.signal_errors import raised_here
from nc10d.errors import StoreError, StoreTimeout
from nc10d.store.base import DEFAULT_TIMEOUT
from nc10d.store.journal import Journal, JournaledValues
from nc10d.store.local import LocalStore
from nc10d.store.values import Values
from nc10d.store.wire import BadFrame

T = TypeVar("T")
_FIRST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.01


class FileStore(LocalStore):
    """A store in the file `path`, used by `world_size` processes (None or -1: not known).

    Several threads may share the store; a call that waits delays no other. Every call, and the
    constructor, ends within the store's timeout, also if another process is stopped in the middle
    of its own call. Any failure of the file system is a StoreError. So is a file that another user
    than this one or root owns or could write to, and a link of another user.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        world_size: int | None = None,
        *,
        timeout: Timeout = DEFAULT_TIMEOUT,
    ) -> None:
        if world_size == 0:
            raise ValueError("FileStore world size cannot be 0")
        self._path = os.fspath(path)
        self._world_size = -1 if world_size is None else world_size
        self._seconds = seconds(timeout)
        self._lock = threading.RLock()
        self._journal: Journal | None = None
        self._closed = False
        deadline = Deadline.after(self._seconds)
        self._exclusively(JournaledValues.arrive, deadline)
        self._opened(deadline).counted = True

    @property
    def path(self) -> str:
        """The file."""
        return self._path

    def _name(self) -> str:
        return f"store {self._path}"

    def __repr__(self) -> str:
        return f"FileStore({self._path!r}, {self._world_size})"

    def _exclusively(
        self, act: Callable[[JournaledValues], T], deadline: Deadline | None = None
    ) -> T:
        deadline = deadline or Deadline.after(self._seconds)
        try:
            if not self._lock.acquire(timeout=deadline.slice(threading.TIMEOUT_MAX)):
                raise StoreTimeout(f"{self._name()}: timeout: another thread's call was under way")
            journal = self._opened(deadline)
            with self._errors():
                return journal.change(act, deadline)
        finally:
            try:  # at once: a handler's error may come out of any earlier call
                self._lock.release()
            except raised_here(RuntimeError):
                pass  # the lock was not taken

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except raised_here(OSError, BadFrame) as error:
            if isinstance(error, TimeoutError):
                raise StoreTimeout(f"{self._name()}: timeout: {error}") from error
            raise StoreError(f"{self._name()}: {error}") from error

    def _opened(self, deadline: Deadline) -> Journal:
        if self._closed:
            raise StoreError(f"{self._name()} is closed on this rank")
        if self._journal is None:
            with self._errors():
                opening = partial(Journal, self._path, self._world_size, deadline)
                self._journal = run_to_end(opening, deadline.cancel, Journal.abandon)
            # Runs when this store is dropped or the interpreter ends, whichever is first.
            self._finalizer = weakref.finalize(self, _close, self._journal)
            _stores.add(self)
        return self._journal

    def _until(self, ready: Callable[[Values], T | None], deadline: Deadline) -> T | None:
        def look(values: Values) -> tuple[int, T | None]:
            return self._opened(deadline).position, ready(values)

        pause, seen, found = _FIRST_PAUSE, -1, None
        while True:
            if self._grown_from(seen, deadline):
                pause = _FIRST_PAUSE
                seen, found = self._exclusively(look, deadline)
            if found is not None or deadline.expired():
                return found
            # A network file system sends no notifications: check whether the file has grown.
            time.sleep(deadline.slice(pause))
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _grown_from(self, position: int, deadline: Deadline) -> bool:
        with self._errors():
            return self._opened(deadline).grown_from(position)

    def clone(self) -> FileStore:
        twin = object.__new__(FileStore)
        twin._path, twin._world_size = self._path, self._world_size
        twin._lock, twin._journal, twin._closed = threading.RLock(), None, False
        twin._seconds = self._seconds
        twin._opened(Deadline.after(self._seconds))
        return twin

    def close(self) -> None:
        with self._lock:
            self._closed = True
            journal, self._journal = self._journal, None
            if journal is not None:
                self._finalizer.detach()
                _close(journal)

    def after_fork(self) -> None:
        """In a forked child, drop the parent's file description; the next call opens its own."""
        self._lock = threading.RLock()
        journal, self._journal = self._journal, None
        if journal is not None:
            self._finalizer.detach()
            journal.abandon()


@off_main
def _close(journal: Journal) -> None:
    with contextlib.suppress(TimeoutError, BadFrame):  # then the file stays as after a death
        journal.close()


_stores: weakref.WeakSet[FileStore] = weakref.WeakSet()


def _after_fork() -> None:
    for store in [*_stores]:
        store.after_fork()


os.register_at_fork(after_in_child=_after_fork)
