"""From a call to the backend that carries it: open blocks, observers, numbers, and the short way.

An operation joins this thread's open block if there is one. Else it is numbered, shown to the
observers and launched on the backend of its array's device. Where nothing of this stands between
a call and the CPU's backend, the call goes straight there.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from threading import get_ident
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np

from nc10d.arrays.arguments import LARGEST_TAG
from nc10d.arrays.buffer import device_type
from nc10d.arrays.interop import borrow, lend, lenders, on_views, view_of
from nc10d.backend.backend_table import BackendTable
from nc10d.backend.base import Backend
from nc10d.backend.config import BackendConfig
from nc10d.base.deadline import Deadline, Timeout, seconds
from nc10d.base.debug_level import DebugLevel, get_debug_level
from nc10d.errors import DistError
from nc10d.group.collectives import Collectives, OpenBatch
from nc10d.group.point_to_point import PointToPoint
from nc10d.group.race_check import guarded, settle
from nc10d.ops import Array, Barrier, Op, Recv, Send
from nc10d.work import Work

if TYPE_CHECKING:
    from nc10d.group.process_group import ProcessGroup

Observer = Callable[["ProcessGroup", Sequence[Op], int], object]
"""Called as observer(group, ops, number of this launch) before each launch."""


class PreparedCall(Protocol):
    """What a backend knows of an operation that has passed all checks: a way to run it again.

    run(words, x, y) answers 0 if it has run; any other answer is for PreparingBackend.finish, and
    so is
    0 while there is something `flying`. x and y are input and output (output and input of a
    ReduceScatter), or one array twice, or array and tag; the arrays may be any objects.
    """

    run: Callable[[Any, Any, Any], int]
    words: Any
    flying: Any


class PreparingBackend(Backend, Protocol):
    """A backend with short ways for operations that come again. Their arrays may be any objects."""

    latest: Mapping[type[Op], Mapping[Any, PreparedCall]]
    """By type of operation and what it has besides arrays (reduction, root, (root, reduction), or
    peer): what is known of the latest one.
    """

    def finish(self, known: Any, answer: int, x: Array, y: Any, timeout: float) -> bool:
        """See to what is left of an operation after `known.run`, which answered this; may block.

        False: nothing has happened, and it has to go the long way.
        """
        ...

    def let_go(self, known: Any, x: Array, y: Any) -> None:
        """Be told that an exception (Ctrl-C, say) is to leave `run` or `finish`."""
        ...

    def quick_start(self, kind: type[Send | Recv], peer: int, x: Array, tag: int) -> Work | None:
        """Send or receive as the latest message if that ends at once; None: nothing happened."""
        ...

    def quick_batch(self, ops: Sequence[Op], timeout: float) -> list[Work] | None:
        """Start messages, sends first, if all are known; None: none has been started."""
        ...

    def launch_one(self, op: Op, timeout: float, async_op: bool) -> Work | None:
        """Do as `launch` with one operation on a NumPy array."""
        ...


class Dispatcher(Collectives, PointToPoint):
    """The part of a group that launches; a subclass says in `_new_backend` how one is made."""

    name: str

    def __init__(self, config: BackendConfig, timeout: float) -> None:
        self.config = config
        self.timeout = timeout
        self._backends = BackendTable()
        self._ready = self._backends.ready
        self._lock = threading.RLock()
        self._batches: dict[int, OpenBatch] = {}
        self._observers: tuple[Observer, ...] = ()
        self._launches = itertools.count()
        self._looks = 0
        # Arrays that were lent to calls that failed: a peer may still look at them, until the
        # group is closed. (Each of the three who lend says so itself: a context manager would
        # cost a short call a fifth of its time.)
        self._stranded: list[Any] = []
        # The CPU's backend while nothing stands between a call and it: the group is usable,
        # nobody observes, no block is open. None sends every call the long way.
        self._hot: PreparingBackend | None = None
        self._watched = get_debug_level() is DebugLevel.DETAIL

    def _new_backend(self, device: str, deadline: Deadline) -> Backend:
        """Make the backend of a device; may wait for the other ranks until `deadline`."""
        raise NotImplementedError

    def _quick(self, kind: type[Op], extra: Any, x: Array, y: Any) -> bool:
        # All in one frame: each costs a small call a twentieth of its time.
        if lenders and type(x) in lenders:
            return self._quick_lent(kind, extra, x, y)
        hot = self._hot
        if hot is None:
            return False
        known = hot.latest[kind].get(extra)
        if known is None:
            return False
        try:
            answer = known.run(known.words, x, y)
            if (answer or known.flying) and not hot.finish(known, answer, x, y, self.timeout):
                return False
        except BaseException:
            hot.let_go(known, x, y)
            raise
        next(self._launches)
        return True

    def _quick_lent(self, kind: type[Op], extra: Any, x: Array, y: Any) -> bool:
        """Do as `_quick` on lent views of another library's arrays."""
        a = lenders[type(x)](x)
        b = a if y is x else y if type(y) is int else lend(y)
        if a is None or b is None:
            return False
        try:
            return self._quick(kind, extra, a, b)
        except (DistError, KeyboardInterrupt):
            self._stranded.append((x, y))
            raise

    def _quick_start(self, kind: type[Send | Recv], peer: int, x: Array, tag: int) -> Work | None:
        hot = self._hot
        if hot is None or type(peer) is not int or type(tag) is not int:
            return None
        work = hot.quick_start(kind, peer, x, tag) if 0 <= tag <= LARGEST_TAG else None
        if work is not None:
            next(self._launches)
        return work

    def _quick_batch(self, ops: Sequence[Send | Recv]) -> list[Work] | None:
        hot = self._hot
        if hot is None:
            return None
        seen = [op if type(op.x) is np.ndarray else on_views(op) for op in ops]
        works = hot.quick_batch(seen, self.timeout)
        if works is not None:
            next(self._launches)
            for work, op, view in zip(works, ops, seen, strict=True):
                if view is not op:
                    work.ops = (op,)
        return works

    def _run(self, op: Op, array: Array, async_op: bool, timeout: Timeout) -> Work | None:
        if type(array) is not np.ndarray:
            return self._run_foreign(op, array, async_op, timeout)
        if timeout is not None:
            return self._run_any(op, array, async_op, timeout)
        backend = self._hot
        if backend is not None:
            next(self._launches)
            return backend.launch_one(op, self.timeout, async_op)
        batch = self._batches.get(get_ident())
        if batch is None or async_op or batch.plain is not np.ndarray:
            return self._run_any(op, array, async_op, timeout)
        batch.append(op)
        return None

    def _run_foreign(self, op: Op, array: Array, async_op: bool, timeout: Timeout) -> Work | None:
        """Run an operation on another library's arrays, as one on NumPy's where it has views."""
        backend = self._hot
        if backend is None or async_op or timeout is not None or type(array) not in lenders:
            return self._run_viewed(op, array, async_op, timeout)
        arrays = borrow(op)
        if arrays is None:
            return self._run_viewed(op, array, async_op, timeout)
        next(self._launches)
        try:
            return backend.launch_one(op, self.timeout, False)
        except (DistError, KeyboardInterrupt):
            self._stranded.append(arrays)
            raise

    def _run_viewed(self, op: Op, array: Array, async_op: bool, timeout: Timeout) -> Work | None:
        batch = self._batches.get(get_ident())
        if batch is not None and batch.plain is type(array) and not async_op and timeout is None:
            batch.append(op)
            return None
        if type(array) in (list, tuple) and array:
            array = array[0]
        seen = view_of(array)
        if seen is array:
            return self._run_any(op, array, async_op, timeout)
        work = self._run(on_views(op), seen, async_op, timeout)
        if work is not None:
            work.ops = (op,)  # the results that its user sees are the arrays of the call
        return work

    def _run_any(self, op: Op, array: Array, async_op: bool, timeout: Timeout) -> Work | None:
        device = self.config.first if type(op) is Barrier else device_type(array)
        batch = self._batches.get(get_ident())
        if batch is not None:
            return batch.add(op, device, async_op, timeout)
        return self.launch((op,), device, async_op, timeout)

    def launch(
        self,
        ops: Sequence[Op],
        device: str = "cpu",
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Work | None:
        """Run `ops` in order, as one submission, on the backend of `device`.

        Blocks and returns None, or returns a Work with `async_op`. An open block is passed by.
        `timeout` (seconds or timedelta) replaces the group's.
        """
        backend = self._ready.get(device) or self.backend(device)
        number = next(self._launches)
        for observe in self._observers:
            observe(self, ops, number)  # type: ignore[arg-type]
        limit = self.timeout if timeout is None else seconds(timeout)
        if self._watched:
            if async_op:
                return guarded(ops, lambda copies: backend.launch(copies, limit, async_op))
            settle(ops)
        return backend.launch(ops, limit, async_op)

    def backend(self, device: str, deadline: Deadline | None = None) -> Backend:
        """Return the backend for a kind of device ("cpu", "cuda"), made if need be.

        Making one may wait for the other ranks, until `deadline` (without it, for the group's
        timeout). ValueError if none is configured for the device.
        """
        found = self._backends.find(device)
        if found is None:
            until = deadline or Deadline.after(self.timeout)
            found = self._backends.make(device, until, self._new_backend)
            self._refresh()
        return found

    def _refresh(self) -> None:
        with self._lock:
            self._watched = get_debug_level() is DebugLevel.DETAIL
            free = not (self._observers or self._batches or self._watched)
            usable = self._backends.usable("cpu") if free else None
            self._hot = cast(PreparingBackend, usable) if hasattr(usable, "launch_one") else None

    @property
    def seq(self) -> int:
        """The number of launches so far on this rank; a coalesced batch is one."""
        with self._lock:
            # Looking at the counter advances it; that is subtracted again.
            self._looks += 1
            return next(self._launches) - self._looks + 1

    def observe(self, observer: Observer) -> Callable[[], None]:
        """Call `observer(group, ops, number)` before each launch; returns what ends that."""
        with self._lock:
            self._observers = (*self._observers, observer)
            self._refresh()
        return lambda: self._unobserve(observer)

    def _unobserve(self, observer: Observer) -> None:
        with self._lock:
            self._observers = tuple(one for one in self._observers if one is not observer)
            self._refresh()

    def open_batch(self, batch: OpenBatch) -> None:
        """Let `batch` take this thread's calls; ValueError if a block is open already."""
        self.refuse_in_batch("a nested coalescing block")
        with self._lock:
            self._batches[get_ident()] = batch
            self._hot = None

    def close_batch(self) -> None:
        """Let this thread's calls go through again."""
        with self._lock:
            self._batches.pop(get_ident(), None)
            self._refresh()

    def refuse_in_batch(self, what: str) -> None:
        """Raise ValueError if a coalescing block of this thread is open on the group."""
        if get_ident() in self._batches:
            message = f"{what} is not possible inside a coalescing block of group {self.name!r}"
            raise ValueError(message)

    def in_batch(self) -> bool:
        """Say whether a coalescing block of this thread is open on the group."""
        return get_ident() in self._batches
