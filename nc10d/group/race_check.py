"""The race check at the debug level DETAIL: programs must not touch arrays in flight.

An asynchronous operation works on copies. Meanwhile the program's own arrays are read-only, where
NumPy can make them writable again. A write may still get through, by a view made before or by
another library. Such a write shows in the array's checksum at the end and is an error that names
the operation. Without an error, results are copied into the program's arrays.

An operation waits for earlier operations on the same memory, unless all of them only read. Arrays
in a launch that overlap without being the same array are waited for, but not checked. A view of an
array in flight is read-only as the array is. The view becomes writable with the array if an
operation that is launched meanwhile writes to the view.

Arrays on a device are checked by their checksums alone. The launch waits for the work queued on
their current streams, and the operation's `wait` blocks the host, where it would order streams.
Strided arrays, and launches that a graph captures, are not checked.
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
import numpy.typing as npt

from nc10d.arrays import intervals
from nc10d.arrays.access import touched
from nc10d.arrays.buffer import Buffer, as_buffer, device_type, overlap
from nc10d.arrays.interop import map_arrays
from nc10d.base.deadline import NEVER, Deadline, Timeout
from nc10d.base.promise import FAILED, NoCallbacks
from nc10d.base.run_to_end import import_to_end
from nc10d.ops import Array, Op
from nc10d.ops.facts import name_of
from nc10d.work import Work


@dataclass(slots=True)
class ArrayUse:
    """An operation's array; if checked, with the copy that the operation uses, and a checksum."""

    memory: Buffer
    written: bool = False
    copy: Array = None
    checksum: int = 0
    before: Array = None
    """The contents before the launch, where the array is changed meanwhile."""

    device_array: object = None
    """The array, if on a device."""

    @property
    def array(self) -> Array:
        """The array itself."""
        return self.memory.owner if self.device_array is None else self.device_array


class RaceCheckedWork(Work):
    """A work on copies of arrays; when it ends, results are copied into the program's arrays."""

    __slots__ = ("_failure", "_inner", "_over", "checked", "uses")

    def __init__(
        self, ops: Sequence[Op], inner: Work, uses: Sequence[ArrayUse], checked: bool
    ) -> None:
        super().__init__(ops)
        self.uses, self.checked = uses, checked
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
        """Do nothing: `race_checked` has a thread call `_end`."""

    def _enter(self, use: ArrayUse) -> None:
        """Change an array while its operation is in flight; the base class changes nothing."""

    def _on_end(self) -> None:
        """Be called when the operation has ended, on any thread."""
        self._end()

    def _end(self) -> None:
        with _lock:  # waiting, polling and notifying threads may come at the same time
            if not self._over:
                self._over = True
                _in_flight.discard(self)
                self._failure = self._give_back() if self.checked else None
        # Not under the lock: a callback may wait for a thread that has just come here. Every
        # thread calls this, because a waiting thread leaves callbacks to the notifying thread.
        self._finish(self._inner._exception or self._failure, self._inner._result)

    def _give_back(self) -> ValueError | None:
        """Make the arrays writable and copy the results; return the error of a race, or None."""
        for use in self.uses:
            _unlock(use.array)
        if self._inner._exception is not None:
            return None
        for use in self.uses:
            if _checksum(use.array) != use.checksum:
                return _written_to(self.ops, use.array.size, use.array.dtype)
        try:
            for use in self.uses:
                if use.written and use.copy.flags.writeable:  # else read-only at the launch
                    np.copyto(use.array, use.copy)
        except ValueError as error:  # the program has made the array read-only meanwhile
            return error
        return None


class DeviceRaceCheckedWork(RaceCheckedWork):
    """A work on copies of device arrays; a thread that waits or polls ends the work."""

    __slots__ = ()

    def _watch(self) -> None:
        self._inner._attach(lambda _: self._end())

    def wait_blocking(self, timeout: Timeout = None) -> bool:
        """Block the host until the operation has ended; as `wait`."""
        return self.wait(timeout)

    def join(self, stream: object = None) -> None:
        """Block the host until the operation has ended: later work on any stream comes after."""
        self.wait()

    def _give_back(self) -> ValueError | None:
        if self._inner._exception is not None:
            return None
        for use in self.uses:
            if _device_checksum(use.array) != use.checksum:
                return _written_to(self.ops, use.memory.count, use.memory.dtype.label)
        for use in self.uses:
            if use.written:
                _device_memory().copy_now(use.array, use.copy)
        return None


kind_of_work: type[RaceCheckedWork] = RaceCheckedWork
"""The class of checked works; may be replaced."""


def race_checked(ops: Sequence[Op], launch: Callable[[Sequence[Op]], Work | None]) -> Work | None:
    """Launch operations on copies of their NumPy arrays, and check the arrays; return the work."""
    # Blocks until conflicting operations in flight have ended.
    wait_for_conflicts(ops)
    uses = _arrays_used(ops)
    if not uses:
        return launch(ops)
    if any(use.device_array is not None for use in uses.values()):
        return _device_checked(ops, uses, launch)
    checked = _disjoint([use.memory for use in uses.values()])
    inner = launch(_on_copies(ops, uses) if checked else ops)
    if inner is None or inner._state == FAILED:
        return inner
    work = kind_of_work(ops, inner, [*uses.values()], checked)
    if checked:
        for use in work.uses:
            work._enter(use)
            use.checksum = _checksum(use.array)
            _make_read_only(use.array)
    with _lock:
        _in_flight.add(work)
    # The arrays become writable again even if no thread waits for the work.
    inner._attach(lambda _: work._on_end())
    return work


def _device_checked(
    ops: Sequence[Op], uses: dict[int, ArrayUse], launch: Callable[[Sequence[Op]], Work | None]
) -> Work | None:
    """Launch operations on copies of their device arrays; return the work that checks them."""
    memory = _device_memory()
    keys = [memory.current_stream_key(use.array) for use in uses.values()]
    plain = all(use.memory.contiguous for use in uses.values())
    if not plain or any(map(memory.in_capture, keys)):
        return launch(ops)
    checked = _disjoint([use.memory for use in uses.values()])
    for key in keys if checked else ():
        memory.synchronize_stream(key)
    for use in uses.values() if checked else ():
        use.checksum, use.copy = _device_checksum(use.array), memory.copy_of(use.array)
    inner = launch(_with_copies(ops, uses) if checked else ops)
    if inner is None or inner._state == FAILED:
        return inner
    work = DeviceRaceCheckedWork(ops, inner, [*uses.values()], checked)
    with _lock:
        _in_flight.add(work)
    return work


def _device_memory() -> Any:
    # Imported late: jobs without a device do without the driver.
    return import_to_end("nc10d.cuda.memory")


def _device_checksum(x: Array) -> int:
    return zlib.crc32(_device_memory().bytes_now(x).data)


def _written_to(ops: Sequence[Op], count: int, dtype: npt.DTypeLike) -> ValueError:
    names = ", ".join(name_of(op) for op in ops)
    return ValueError(
        f"{names}: an array of {count} {dtype} was written to while the operation was in flight "
        "(seen because of the debug level DETAIL)"
    )


def wait_for_conflicts(ops: Sequence[Op]) -> None:
    """Wait for operations in flight that share memory with `ops`, where either writes there."""
    with _lock:
        in_flight = list(_in_flight)
    uses = [*_arrays_used(ops).values()] if in_flight else []
    inherited: list[object] = []
    for work in in_flight:
        pairs = itertools.product(work.uses, uses)
        found = [
            (a, b) for a, b in pairs if (a.written or b.written) and overlap(a.memory, b.memory)
        ]
        if found:
            inherited += [b.array for a, b in found if _inherits(b, a)]
            with NoCallbacks():  # the launching thread must not run the work's callbacks
                work._block(NEVER)
    for x in inherited:
        _set_writable(x)


def _inherits(view: ArrayUse, use: ArrayUse) -> bool:
    """Return whether an array may be read-only as a view of an array in flight."""
    locked = id(use.array) in _read_only and id(view.array) not in _read_only
    return locked and view.written and not view.memory.writable


def _arrays_used(ops: Iterable[Op]) -> dict[int, ArrayUse]:
    """Return the NumPy arrays and the device arrays of operations by their ids."""
    found: dict[int, ArrayUse] = {}
    try:
        for op in ops:
            for x, written in touched(op):
                on_device = not isinstance(x, np.ndarray) and device_type(x) == "cuda"
                if on_device or isinstance(x, np.ndarray):
                    use = ArrayUse(as_buffer(x), device_array=x if on_device else None)
                    use = found.setdefault(id(x), use)
                    use.written = use.written or written
    except TypeError:  # not an array that can be sent: the launch will raise
        return {}
    return found


def _on_copies(ops: Iterable[Op], uses: dict[int, ArrayUse]) -> list[Op]:
    for use in uses.values():
        use.copy = np.array(use.array, order="K", subok=True)
        use.copy.flags.writeable = use.memory.writable
    return _with_copies(ops, uses)


def _with_copies(ops: Iterable[Op], uses: dict[int, ArrayUse]) -> list[Op]:
    return [map_arrays(op, lambda x: uses[id(x)].copy if id(x) in uses else x) for op in ops]


def _disjoint(memory: Sequence[Buffer]) -> bool:
    """Return whether no two arrays share a byte."""
    if intervals.disjoint(buffer.span for buffer in memory):  # quicker than byte by byte
        return True
    return not any(overlap(x, y) for x, y in itertools.combinations(memory, 2))


def _checksum(x: Array) -> int:
    return zlib.crc32(np.ascontiguousarray(x).view(np.uint8).data) if x.size else 0


_in_flight: set[RaceCheckedWork] = set()
# By id, the arrays made read-only here, with the number of operations in flight on each.
_read_only: dict[int, tuple[int, Array]] = {}
# Views without operations in flight whose base array still is read-only.
_waiting_views: list[Array] = []
# Guards these tables and works' ends; re-entrant, because a finalizer may run inside.
_lock = threading.RLock()


def _make_read_only(x: Array) -> None:
    with _lock:
        count, _ = _read_only.get(id(x), (0, x))
        if count or (x.flags.writeable and _can_be_restored(x)):
            _read_only[id(x)] = (count + 1, x)
            x.flags.writeable = False


def _can_be_restored(x: Array) -> bool:
    """Return whether NumPy can make `x` writable again: the memory must be writable."""
    base = x.base
    while isinstance(base, np.ndarray):
        if base.flags.writeable:
            return True
        base = base.base
    if base is None:
        return x.base is None
    try:
        return not memoryview(base).readonly
    except TypeError:  # no buffer: NumPy would not make its views writable again
        return False


def _set_writable(x: Array) -> bool:
    try:
        x.flags.writeable = True
    except ValueError:
        return False
    return True


def _unlock(x: Array) -> None:
    with _lock:
        count, _ = _read_only.pop(id(x), (0, x))
        if count > 1:
            _read_only[id(x)] = (count - 1, x)
        elif count:
            _make_writable([x])


def _make_writable(arrays: Sequence[object]) -> None:
    """Make arrays without operations in flight writable; a view waits for its base array."""
    _waiting_views.extend(arrays)
    _waiting_views.sort(key=lambda x: x.base is not None)
    _waiting_views[:] = [x for x in _waiting_views if not _set_writable(x)]
    if not _read_only:  # the program itself has made the base arrays of these views read-only
        _waiting_views.clear()


def _renew_after_fork() -> None:
    """Make all arrays writable in a forked child, which has no operations in flight."""
    global _lock
    _lock = threading.RLock()
    arrays = [x for _, x in _read_only.values()]
    _in_flight.clear()
    _read_only.clear()
    _make_writable(arrays)


os.register_at_fork(after_in_child=_renew_after_fork)
