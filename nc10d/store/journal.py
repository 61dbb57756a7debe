"""The file behind FileStore: a journal of requests that processes append and replay.

The file begins with VALIDATE and goes on with SET, APPEND, DELETE_KEY, QUEUE_PUSH and QUEUE_POP,
as on the wire, and a PING for every user that came. Who wants to read or write locks it, replays
what others have appended, and appends its own before it unlocks; a record that its writer did not
live to complete is cut off by the next one. Locks are the kernel's (open file description locks),
so a killed process leaves none behind: byte 0 is for access, byte 1 is held in shared mode by
every user of the file.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from nc10d.store import wire as m
from nc10d.store.values import Values

_ACCESS, _USERS = 0, 1
_HEADER = m.with_u32(m.VALIDATE, m.MAGIC)
_UNBOUNDED = m.Limits(key=1 << 40, value=1 << 40, total=1 << 50, items=1 << 40)
_READ = 1 << 20


class JournaledValues(Values):
    """Values that write down every change as the request that makes it again."""

    __slots__ = ("arrivals", "changes")

    def __init__(self) -> None:
        super().__init__()
        self.changes: list[bytes] = []
        self.arrivals = 0

    def arrive(self) -> None:
        """Count one more user."""
        self.arrivals += 1
        self.changes.append(m.with_u32(m.PING, os.getpid() & 0xFFFFFFFF))

    def put(self, key: bytes, value: bytes) -> None:
        """Store and note it."""
        super().put(key, value)
        self.changes.append(m.with_values(m.SET, key, value))

    def extend(self, key: bytes, tail: bytes) -> None:
        """Append and note it."""
        super().extend(key, tail)
        self.changes.append(m.with_values(m.APPEND, key, tail))

    def remove(self, key: bytes) -> bool:
        """Remove and note it."""
        self.changes.append(m.with_key(m.DELETE_KEY, key))
        return super().remove(key)

    def push(self, key: bytes, value: bytes) -> None:
        """Push and note it."""
        super().push(key, value)
        self.changes.append(m.with_values(m.QUEUE_PUSH, key, value))

    def pop(self, key: bytes) -> bytes | None:
        """Pop and note it, unless there is nothing to pop."""
        value = super().pop(key)
        if value is not None:
            self.changes.append(m.with_key(m.QUEUE_POP, key))
        return value

    def replay(self, request: m.Request) -> None:
        """Make the change that another process has noted."""
        kind, *fields = request
        if kind == m.PING:
            self.arrivals += 1
        elif kind != m.VALIDATE:
            _REPLAY[kind](self, *fields)


_REPLAY: dict[int, Callable[..., object]] = {
    m.SET: Values.put,
    m.APPEND: Values.extend,
    m.DELETE_KEY: Values.remove,
    m.QUEUE_PUSH: Values.push,
    m.QUEUE_POP: Values.pop,
}


class Journal:
    """One user's open journal; not for several threads at once.

    `world_size` is how many users there will be, -1 if that is not known; with it the file's
    first user knows an abandoned file, and its last one that the file has served its purpose.
    """

    def __init__(self, path: str, world_size: int) -> None:
        self.path = path
        self.values = JournaledValues()
        self._world_size = world_size
        self._parser = m.Parser(_UNBOUNDED)
        self._read = 0
        self._fd = self._open()

    def _open(self) -> int:
        while True:
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
            with contextlib.ExitStack() as undo:
                undo.callback(os.close, fd)
                _lock(fd, fcntl.F_WRLCK, _ACCESS)
                # The last user may have removed the file between our opening and our lock.
                if _same_file(fd, self.path):
                    self._enter(fd)
                    undo.pop_all()
                    return fd

    def _enter(self, fd: int) -> None:
        """Become a user, with access locked; begin an abandoned file anew."""
        alone = _lock(fd, fcntl.F_WRLCK, _USERS, wait=False)
        if alone:
            self._fd = fd
            self._catch_up()
            if self._complete():
                os.ftruncate(fd, 0)
                self._start_over()
        _lock(fd, fcntl.F_RDLCK, _USERS)
        _lock(fd, fcntl.F_UNLCK, _ACCESS)

    def _complete(self) -> bool:
        return 0 < self._world_size <= self.values.arrivals

    @contextmanager
    def access(self) -> Iterator[JournaledValues]:
        """Give the values as they are now; changes made to them are kept for all at the end."""
        _lock(self._fd, fcntl.F_WRLCK, _ACCESS)
        try:
            self._catch_up()
            yield self.values
            self._append()
        finally:
            # What was not appended did not happen; the values are read anew from the file.
            if self.values.changes:
                self._start_over()
            _lock(self._fd, fcntl.F_UNLCK, _ACCESS)

    @property
    def position(self) -> int:
        """The number of the file's bytes that are in the values."""
        return self._read

    def grown_from(self, position: int) -> bool:
        """Say, without locking, whether the file has changed since it was read to `position`."""
        return os.fstat(self._fd).st_size != position

    def close(self) -> None:
        """Let go of the file; the last user of a complete world removes it. Idempotent."""
        if self._fd < 0:
            return
        fd = self._fd
        try:
            _lock(fd, fcntl.F_WRLCK, _ACCESS)
            self._catch_up()
            if self._complete() and _lock(fd, fcntl.F_WRLCK, _USERS, wait=False):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self.path)
        finally:
            self._fd = -1
            os.close(fd)

    def abandon(self) -> None:
        """In a forked child: close the parent's descriptor, and nothing else."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _catch_up(self) -> None:
        while data := os.pread(self._fd, _READ, self._read):
            self._read += len(data)
            for request in self._parser.feed(data):
                self.values.replay(request)
        if self._parser.pending:
            self._cut_torn_record()

    def _cut_torn_record(self) -> None:
        self._read -= self._parser.pending
        os.ftruncate(self._fd, self._read)
        self._parser = m.Parser(_UNBOUNDED)
        self._parser.validated = self._read > 0

    def _append(self) -> None:
        data = b"".join(self.values.changes)
        if not data:
            return
        data = data if self._read else _HEADER + data
        at = self._read
        while at < self._read + len(data):
            at += os.pwrite(self._fd, memoryview(data)[at - self._read :], at)
        self._read = at
        self._parser.validated = True
        self.values.changes.clear()

    def _start_over(self) -> None:
        self.values = JournaledValues()
        self._parser = m.Parser(_UNBOUNDED)
        self._read = 0


def _lock(fd: int, kind: int, byte: int, wait: bool = True) -> bool:
    """Lock or unlock one byte; without `wait`, say whether it could be had."""
    # struct flock: type, whence, start, length, pid; a description's lock must have pid 0.
    request = struct.pack("hhqqi4x", kind, os.SEEK_SET, byte, 1, 0)
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLKW if wait else fcntl.F_OFD_SETLK, request)
    except (BlockingIOError, PermissionError):
        return False
    return True


def _same_file(fd: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False
