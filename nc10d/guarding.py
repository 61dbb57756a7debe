"""Arrays in flight, watched: what DETAIL does about programs that touch them too early.

An asynchronous operation works on copies. Meanwhile the program's own arrays are read-only, and
what gets past that (a view that was made before, another library) shows in their checksums at the
end, which is an error that names the operation. Then results are copied to where they belong. Of
operations on the same memory each waits for those before it, unless all only read; where arrays of
one launch overlap without being the same, they are not watched.
"""

from __future__ import annotations

import itertools
import threading
import zlib
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nc10d.access import outputs
from nc10d.deadline import NEVER, Deadline
from nc10d.ops import OP_NAMES, Op
from nc10d.outcome import FAILED, PENDING
from nc10d.views import on_each
from nc10d.work import Work


@dataclass(slots=True)
class Watched:
    """An array of the program: its stand-in in the operation, and what it looked like."""

    array: Any
    copy: Any
    checksum: int

    def touched(self) -> bool:
        """Say whether somebody has written to the array."""
        return _checksum(self.array) != self.checksum


class Guarded(Work):
    """A work on copies of arrays; when it has ended, results go to the arrays themselves."""

    __slots__ = ("_ending", "_inner", "_seen")

    def __init__(self, ops: Sequence[Op], inner: Work, seen: Sequence[Watched]) -> None:
        super().__init__(ops)
        self._inner = inner
        self._seen = seen
        self._ending = threading.RLock()

    def _poll(self) -> None:
        if self._inner._look():
            self._end()

    def _block(self, deadline: Deadline) -> None:
        if not self._inner._look():
            self._inner._block(deadline)
        self._poll()

    def _watch(self) -> None:
        """Do nothing: `guarded` sees to it that a thread comes to the end."""

    def is_in_the_way(self, arrays: Sequence[Any], written: Container[int]) -> bool:
        """Say whether arrays depend on this one's end; `written` (ids) are to be written."""
        mine = {id(x) for x in outputs(self.ops)}
        return any(
            (x is one.array or _overlap(x, one.array))
            and (id(x) in written or id(one.array) in mine)
            for x in arrays
            for one in self._seen
        )

    def _end(self) -> None:
        with self._ending:  # whoever waits, polls and hears may come at once
            if self._state != PENDING:
                self._finish()  # callbacks are left to the thread that nobody waits in
                return
            seen, inner = self._seen, self._inner
            error = inner._exception
            for one in seen:
                _release(one.array)
            touched = [one for one in seen if error is None and one.touched()]
            if touched:
                error = ValueError(self._told(touched[0]))
            elif error is None:
                self._deliver(seen)
            with _holding:
                _flying.discard(self)
            self._finish(error, inner._result)

    def _deliver(self, seen: Sequence[Watched]) -> None:
        written = {id(x) for x in outputs(self._inner.ops)}
        for one in seen:
            if id(one.copy) in written:
                np.copyto(one.array, one.copy)

    def _told(self, one: Watched) -> str:
        names = ", ".join(OP_NAMES[type(op)] for op in self.ops)
        return (
            f"{names}: an array of {one.array.size} {one.array.dtype} was written to while the "
            "operation was in flight (seen because of the debug level DETAIL)"
        )


def guarded(ops: Sequence[Op], launch: Callable[[Sequence[Op]], Work | None]) -> Work | None:
    """Launch operations on copies of their NumPy arrays, and watch these; returns the work.

    Blocks until operations in flight have ended whose results these need, or write over.
    """
    stand_ins: dict[int, tuple[Any, Any]] = {}

    def stand_in(x: Any) -> Any:
        if not isinstance(x, np.ndarray):
            return x
        if id(x) not in stand_ins:
            copy = np.array(x, order="K", subok=True)
            copy.flags.writeable = x.flags.writeable or id(x) in _held
            stand_ins[id(x)] = (x, copy)
        return stand_ins[id(x)][1]

    settle(ops)
    copies = [on_each(op, stand_in) for op in ops]
    arrays = [x for x, _ in stand_ins.values()]
    if not arrays or any(_overlap(x, y) for x, y in itertools.combinations(arrays, 2)):
        return launch(ops)
    work = launch(copies)
    if work is None or work._state == FAILED:
        return work
    seen = [Watched(x, copy, _checksum(x)) for x, copy in stand_ins.values()]
    for one in seen:
        _hold(one.array)
    found = Guarded(ops, work, seen)
    with _holding:
        _flying.add(found)
    # Also if nobody waits for it, it ends, and gives the arrays back.
    work._attach(lambda _: found._end())
    return found


def settle(ops: Sequence[Op]) -> None:
    """Wait for operations in flight that share memory with these, where either writes there."""
    arrays: list[Any] = []
    for op in ops:
        on_each(op, lambda x: arrays.append(x) if isinstance(x, np.ndarray) else None)
    written = {id(x) for x in outputs(ops)}
    with _holding:
        flying = list(_flying)
    for work in flying:
        if work.is_in_the_way(arrays, written):
            work._block(NEVER)


def _overlap(x: Any, y: Any) -> bool:
    if x is y or not (x.size and y.size):
        return False
    (a, b), (c, d) = np.lib.array_utils.byte_bounds(x), np.lib.array_utils.byte_bounds(y)
    return bool(a < d and c < b)


def _checksum(x: Any) -> int:
    return zlib.crc32(np.ascontiguousarray(x).view(np.uint8).data) if x.size else 0


_flying: set[Guarded] = set()
# Arrays that are read-only by us: how many operations hold each.
_held: dict[int, tuple[int, Any]] = {}
_holding = threading.RLock()


def _hold(x: Any) -> None:
    with _holding:
        count, _ = _held.get(id(x), (0, x))
        if count or x.flags.writeable:
            _held[id(x)] = (count + 1, x)
            x.flags.writeable = False


def _release(x: Any) -> None:
    with _holding:
        count, _ = _held.pop(id(x), (0, x))
        if count > 1:
            _held[id(x)] = (count - 1, x)
        elif count:
            x.flags.writeable = True
