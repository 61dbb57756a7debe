"""The file behind FileStore: a journal of requests that processes append and replay.

The file has records (journal_records.py) of requests as on the wire: SET, APPEND, DELETE_KEY,
QUEUE_PUSH and QUEUE_POP, and a PING for every user that opened the file (the process) or closed it
(0). To read or write, a process locks the file, replays the requests that others have appended,
appends its own and unlocks. The next process cuts off a record whose writer died before the end; a
damaged record is an error.

Locks are open file description locks (fcntl(2)), so a killed process leaves none behind. Byte 0
locks access. Every user of the file holds byte 1 in shared mode. A stopped process keeps its lock,
so a wait for a lock has a deadline.
"""

# ruff: noqa: D102  (Values documents the methods)
from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import struct
import time
from collections.abc import Callable
from typing import TypeVar

from nc10d.base.deadline import Deadline
from nc10d.base.signal_errors import from_handler, raised_here
from nc10d.store import wire as m
from nc10d.store.journal_records import HEADER, record, records
from nc10d.store.values import Values

T = TypeVar("T")
_ACCESS, _USERS = 0, 1
_READ = 1 << 20
_DEPARTURE = 0  # no process has this number
_CLOSE_SECONDS = 1.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.0002, 0.005
_MOST_LINKS = 40  # as the kernel


class JournaledValues(Values):
    """Values that record every change as a request that repeats the change."""

    __slots__ = ("arrivals", "changes", "departures")

    def __init__(self) -> None:
        super().__init__()
        self.changes: list[bytes] = []
        self.arrivals = self.departures = 0

    def arrive(self) -> None:
        """Count another user."""
        self.arrivals += 1
        self.changes.append(m.with_u32(m.PING, os.getpid() & 0xFFFFFFFF))

    def depart(self) -> None:
        """Count a user that closes the file; the others that have gone were killed."""
        self.departures += 1
        self.changes.append(m.with_u32(m.PING, _DEPARTURE))

    def put(self, key: bytes, value: bytes) -> None:
        super().put(key, value)
        self.changes.append(m.with_values(m.SET, key, value))

    def extend(self, key: bytes, tail: bytes) -> None:
        super().extend(key, tail)
        self.changes.append(m.with_values(m.APPEND, key, tail))

    def remove(self, key: bytes) -> bool:
        self.changes.append(m.with_key(m.DELETE_KEY, key))
        return super().remove(key)

    def push(self, key: bytes, value: bytes) -> None:
        super().push(key, value)
        self.changes.append(m.with_values(m.QUEUE_PUSH, key, value))

    def pop(self, key: bytes) -> bytes | None:
        value = super().pop(key)
        if value is not None:
            self.changes.append(m.with_key(m.QUEUE_POP, key))
        return value

    def replay(self, request: m.Request) -> None:
        """Apply a change that another process has recorded."""
        kind, *fields = request
        if kind == m.PING:
            self.arrivals += fields[0] != _DEPARTURE
            self.departures += fields[0] == _DEPARTURE
        elif kind in _REPLAY:
            _REPLAY[kind](self, *fields)
        else:
            raise m.BadFrame(f"a record of kind {kind}")


_REPLAY: dict[int, Callable[..., object]] = {
    m.SET: Values.put,
    m.APPEND: Values.extend,
    m.DELETE_KEY: Values.remove,
    m.QUEUE_PUSH: Values.push,
    m.QUEUE_POP: Values.pop,
}


class Journal:
    """A user's open journal; only one thread at a time may use a journal.

    `world_size` is the number of users, -1 if unknown. If all have opened the file, the last user
    removes it. If a known number of users is expected and no user is left, the file begins anew: if
    all had opened it, or if one was killed.

    TimeoutError if another process holds the file's lock until the deadline. OSError for a file
    that another user could write to.
    """

    def __init__(self, path: str, world_size: int, deadline: Deadline) -> None:
        self.path = path
        self.values = JournaledValues()
        self.counted = False  # whether this user is among the arrivals
        self._world_size = world_size
        self.position = 0  # the bytes of the file that the values include
        self._fd = self._open(deadline)

    def _open(self, deadline: Deadline) -> int:
        while True:
            fd = _open_own(self.path)
            with contextlib.ExitStack() as undo:
                undo.callback(os.close, fd)
                _lock(fd, fcntl.F_WRLCK, _ACCESS, deadline)
                # The last user may have removed the file between our open and our lock.
                if _same_file(fd, self.path):
                    self._enter(fd, deadline)
                    undo.pop_all()
                    return fd

    def _enter(self, fd: int, deadline: Deadline) -> None:
        """Become a user, with access locked; empty an abandoned file first."""
        if _try_lock(fd, fcntl.F_WRLCK, _USERS):
            self._fd = fd
            self._catch_up()
            killed = self._world_size > 0 and self.values.departures < self.values.arrivals
            if killed or self._complete():
                os.ftruncate(fd, 0)
                self._start_over()
        _lock(fd, fcntl.F_RDLCK, _USERS, deadline)
        _try_lock(fd, fcntl.F_UNLCK, _ACCESS)

    def _complete(self) -> bool:
        return 0 < self._world_size <= self.values.arrivals

    def change(self, act: Callable[[JournaledValues], T], deadline: Deadline) -> T:
        """Lock the file, return `act` of the current values, and append the changes made."""
        fd, unlock = self._fd, _request(fcntl.F_UNLCK, _ACCESS)
        try:
            _lock(fd, fcntl.F_WRLCK, _ACCESS, deadline)
            whole = False
            try:
                self._catch_up()
                whole = True
                result = act(self.values)
                self._append()
            except BaseException as error:
                # Half a replay must not stay, nor changes that were not appended: read anew.
                interrupted = from_handler(error) or not isinstance(error, Exception)
                if not whole or self.values.changes or interrupted:
                    self._start_over()
                raise
            return result
        finally:  # without a Python call before, which a signal's handler may interrupt
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, unlock)

    def grown_from(self, position: int) -> bool:
        """Return whether the file has changed since a read to `position`; takes no lock."""
        return os.fstat(self._fd).st_size != position

    def close(self) -> None:
        """Close the file; the last user of a complete world also removes the file. Idempotent.

        Blocks for a second at most; after that the file stays as if the user had died.
        """
        if self._fd < 0:
            return
        fd = self._fd
        try:
            _lock(fd, fcntl.F_WRLCK, _ACCESS, Deadline.after(_CLOSE_SECONDS))
            self._catch_up()
            if self._complete() and _try_lock(fd, fcntl.F_WRLCK, _USERS):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self.path)
            elif self.counted:
                self.values.depart()
                self._append()
        finally:
            self._fd = -1
            os.close(fd)

    def abandon(self) -> None:
        """In a forked child, close the inherited descriptor and change nothing else."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _catch_up(self) -> None:
        held = bytearray()
        while data := os.pread(self._fd, _READ, self.position + len(held)):
            held += data
            done = 0
            for request, end in records(held, self.position):
                self.values.replay(request)
                done = end
            del held[:done]
            self.position += done
        if held:  # the writer died before the record was complete
            os.ftruncate(self._fd, self.position)

    def _append(self) -> None:
        data = b"".join(map(record, self.values.changes))
        if not data:
            return
        data = data if self.position else HEADER + data
        at = self.position
        while at < self.position + len(data):
            at += os.pwrite(self._fd, memoryview(data)[at - self.position :], at)
        self.position = at
        self.values.changes.clear()

    def _start_over(self) -> None:
        self.values, self.position = JournaledValues(), 0


def _open_own(path: str) -> int:
    """Open or make a file; OSError if another user owns it, could write to it or has linked it.

    The owner must be this user or root, and so must the owner of a link at `path`.
    """
    for _ in range(_MOST_LINKS):
        try:
            # A pipe is no store; O_NONBLOCK opens a pipe without a wait for the other end.
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
            fd = os.open(path, flags, 0o600)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            _check_owner(os.lstat(path), f"the link {path}")
            path = os.path.join(os.path.dirname(path), os.readlink(path))
            continue
        try:
            _check_writers(os.fstat(fd))
        except BaseException:
            os.close(fd)
            raise
        return fd
    raise OSError(f"more than {_MOST_LINKS} links follow each other")


def _check_owner(found: os.stat_result, what: str) -> None:
    if found.st_uid not in (os.geteuid(), 0):
        raise OSError(f"{what} belongs to another user (number {found.st_uid}); give another path")


def _check_writers(found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise OSError("it is not an ordinary file")
    _check_owner(found, "the file")
    if found.st_mode & 0o022:
        mode = stat.S_IMODE(found.st_mode)
        raise OSError(
            f"others than its owner may write to it (mode {mode:04o}): chmod 600, or "
            "give another path"
        )


def _lock(fd: int, kind: int, byte: int, deadline: Deadline) -> None:
    """Lock a byte; TimeoutError if another process holds its lock until the deadline."""
    pause = _FIRST_PAUSE
    # The kernel's own wait for a lock knows no deadline.
    while not _try_lock(fd, kind, byte):
        if deadline.expired():
            raise TimeoutError("another process holds the file's lock; is it stopped?")
        time.sleep(deadline.slice(pause))
        pause = min(2 * pause, _LONGEST_PAUSE)


def _try_lock(fd: int, kind: int, byte: int) -> bool:
    """Lock or unlock a byte; return whether that worked."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _request(kind, byte))
    except raised_here(BlockingIOError, PermissionError):
        return False
    return True


def _request(kind: int, byte: int) -> bytes:
    # struct flock: type, whence, start, length, pid; a description's lock must have pid 0.
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, byte, 1, 0)


def _same_file(fd: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False
