"""Arrays in flight, watched: what DETAIL does about programs that touch them too early.

An asynchronous operation works on copies. Meanwhile the program's own arrays are read-only, where
NumPy can make them writable again; what gets past that (a view that was made before, another
library) shows in their checksums at the end, which is an error that names the operation. Then
results are copied to where they belong. Of operations on the same memory each waits for those
before it, unless all only read; where arrays of one launch overlap without being the same, they are
waited for, but not watched.
"""

from __future__ import annotations

import itertools
import os
import threading
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nc10d.arrays import intervals
from nc10d.arrays.access import touched
from nc10d.arrays.buffer import Buffer, as_buffer, overlap
from nc10d.arrays.interop import map_arrays
from nc10d.base.deadline import NEVER, Deadline
from nc10d.base.promise import FAILED, NoCallbacks
from nc10d.ops import OP_NAMES, Op
from nc10d.work import Work


@dataclass(slots=True)
class ArrayUse:
    """An array of the program, and whether its operation writes it on some rank.

    If it is watched, it has a stand-in in the operation, and a checksum.
    """

    memory: Buffer
    written: bool = False
    copy: Any = None
    checksum: int = 0

    @property
    def array(self) -> Any:
        """The array itself."""
        return self.memory.owner

    def stand_in(self) -> None:
        """Make the copy that the operation works on."""
        self.copy = np.array(self.array, order="K", subok=True)
        self.copy.flags.writeable = self.memory.writable

    def hold(self) -> None:
        """Make the array read-only, and note what it looks like."""
        self.checksum = _checksum(self.array)
        _make_read_only(self.array)

    def touched(self) -> bool:
        """Say whether somebody has written to the array."""
        return _checksum(self.array) != self.checksum

    def deliver(self) -> None:
        """Copy the result; an array that was read-only at the launch is none on this rank."""
        if self.written and self.copy.flags.writeable:
            np.copyto(self.array, self.copy)

    def clashes(self, other: ArrayUse) -> bool:
        """Say whether one of the two writes what both use."""
        return (self.written or other.written) and overlap(self.memory, other.memory)


class RaceCheckedWork(Work):
    """A work on copies of arrays; when it has ended, results go to the arrays themselves."""

    __slots__ = ("_failure", "_inner", "_over", "used", "watched")

    def __init__(
        self, ops: Sequence[Op], inner: Work, used: Sequence[ArrayUse], watched: bool
    ) -> None:
        super().__init__(ops)
        self.used, self.watched = used, watched
        self._inner = inner
        self._over = False
        self._failure: ValueError | None = None

    def _poll(self) -> None:
        if self._inner._look():
            self._end()

    def _block(self, deadline: Deadline) -> None:
        if not self._inner._look():
            self._inner._block(deadline)
        self._poll()

    def _watch(self) -> None:
        """Do nothing: `race_checked` sees to it that a thread comes to the end."""

    def _end(self) -> None:
        with _lock:  # whoever waits, polls and hears may come at once
            if not self._over:
                self._over = True
                _in_flight.discard(self)
                self._failure = self._give_back() if self.watched else None
        # Not under the lock: a callback may wait for a thread that has just come here. It is
        # left to the thread that nobody waits in, which comes whether it is the first or not.
        self._finish(self._inner._exception or self._failure, self._inner._result)

    def _give_back(self) -> ValueError | None:
        """Give the arrays back with their results; return what the program has done to them."""
        for one in self.used:
            _unlock(one.array)
        if self._inner._exception is not None:
            return None
        for one in self.used:
            if one.touched():
                return ValueError(self._told(one))
        try:
            for one in self.used:
                one.deliver()
        except ValueError as error:  # the program has made it read-only meanwhile
            return error
        return None

    def _told(self, one: ArrayUse) -> str:
        names = ", ".join(OP_NAMES[type(op)] for op in self.ops)
        return (
            f"{names}: an array of {one.array.size} {one.array.dtype} was written to while the "
            "operation was in flight (seen because of the debug level DETAIL)"
        )


def race_checked(ops: Sequence[Op], launch: Callable[[Sequence[Op]], Work | None]) -> Work | None:
    """Launch operations on copies of their NumPy arrays, and watch these; returns the work.

    Blocks until operations in flight have ended whose results these need, or write over.
    """
    wait_for_conflicts(ops)
    used = _arrays_used(ops)
    if not used:
        return launch(ops)
    watched = _disjoint([one.memory for one in used.values()])
    work = launch(_on_copies(ops, used) if watched else ops)
    if work is None or work._state == FAILED:
        return work
    found = RaceCheckedWork(ops, work, [*used.values()], watched)
    if watched:
        for one in found.used:
            one.hold()
    with _lock:
        _in_flight.add(found)
    # Also if nobody waits for it, it ends, and gives the arrays back.
    work._attach(lambda _: found._end())
    return found


def wait_for_conflicts(ops: Sequence[Op]) -> None:
    """Wait for operations in flight that share memory with these, where either writes there."""
    with _lock:
        flying = list(_in_flight)
    mine = [*_arrays_used(ops).values()] if flying else []
    for work in flying:
        if any(one.clashes(other) for one in work.used for other in mine):
            with NoCallbacks():  # its callbacks are not for the thread that launches
                work._block(NEVER)


def _arrays_used(ops: Iterable[Op]) -> dict[int, ArrayUse]:
    """Return the NumPy arrays of operations by their ids."""
    found: dict[int, ArrayUse] = {}
    try:
        for op in ops:
            for x, written in touched(op):
                if isinstance(x, np.ndarray):
                    one = found.setdefault(id(x), ArrayUse(as_buffer(x)))
                    one.written = one.written or written
    except TypeError:  # no array that can be sent: a mistake, which the launch will name
        return {}
    return found


def _on_copies(ops: Iterable[Op], used: dict[int, ArrayUse]) -> list[Op]:
    for one in used.values():
        one.stand_in()
    return [map_arrays(op, lambda x: used[id(x)].copy if id(x) in used else x) for op in ops]


def _disjoint(memory: Sequence[Buffer]) -> bool:
    """Say whether no two arrays share a byte; spans, which are quickly told apart, come first."""
    if intervals.disjoint(one.span for one in memory):
        return True
    return not any(overlap(x, y) for x, y in itertools.combinations(memory, 2))


def _checksum(x: Any) -> int:
    return zlib.crc32(np.ascontiguousarray(x).view(np.uint8).data) if x.size else 0


_in_flight: set[RaceCheckedWork] = set()
# Arrays that are read-only by us: how many operations hold each.
_read_only: dict[int, tuple[int, Any]] = {}
# Views that no operation holds any more, but read-only as long as one holds the array below.
_waiting_views: list[Any] = []
# For all of these and for all ends: re-entrant, because a finalizer may run inside.
_lock = threading.RLock()


def _make_read_only(x: Any) -> None:
    with _lock:
        count, _ = _read_only.get(id(x), (0, x))
        if count or (x.flags.writeable and _can_be_restored(x)):
            _read_only[id(x)] = (count + 1, x)
            x.flags.writeable = False


def _can_be_restored(x: Any) -> bool:
    """Say whether NumPy can make a read-only `x` writable: its memory is so without it."""
    base = x.base
    while isinstance(base, np.ndarray):
        if base.flags.writeable:
            return True
        base = base.base
    if base is None:
        return x.base is None
    try:
        return not memoryview(base).readonly
    except TypeError:  # no buffer: only its first array is writable, once
        return False


def _set_writable(x: Any) -> bool:
    try:
        x.flags.writeable = True
    except ValueError:
        return False
    return True


def _unlock(x: Any) -> None:
    with _lock:
        count, _ = _read_only.pop(id(x), (0, x))
        if count > 1:
            _read_only[id(x)] = (count - 1, x)
        elif count:
            _make_writable([x])


def _make_writable(arrays: Sequence[Any]) -> None:
    """Make arrays writable that nobody holds; a view has to wait for the array below it."""
    _waiting_views.extend(arrays)
    _waiting_views.sort(key=lambda x: x.base is not None)
    _waiting_views[:] = [x for x in _waiting_views if not _set_writable(x)]
    if not _read_only:  # whose read-only base is not by us
        _waiting_views.clear()


def _renew_after_fork() -> None:
    """Give the child its arrays and a lock of its own: what is in flight is the parent's."""
    global _lock
    _lock = threading.RLock()
    held = [x for _, x in _read_only.values()]
    _in_flight.clear()
    _read_only.clear()
    _make_writable(held)


os.register_at_fork(after_in_child=_renew_after_fork)
