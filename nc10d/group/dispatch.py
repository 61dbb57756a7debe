"""From a call to the backend that runs it: coalescing blocks, observers, numbers, prepared calls.

`_call` runs a call that the CPU's backend has prepared, if nothing stands between the call and the
backend. Every other call makes an operation, which joins this thread's open block or is
launched: numbered, shown to the observers, and run by the backend of its array's device.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np

from nc10d.arrays.arguments import check_probe
from nc10d.arrays.buffer import device_type
from nc10d.arrays.fields import with_fields
from nc10d.arrays.interop import lend, map_to_numpy, unowned_views, use_unowned_views
from nc10d.arrays.validate import validate
from nc10d.backend.backend_table import BackendTable
from nc10d.backend.config import BackendConfig
from nc10d.backend.prepared_protocol import Arguments, PreparedCall, Preparing
from nc10d.backend.protocol import Backend
from nc10d.base.callable_values import CallableInt, CallableStr
from nc10d.base.deadline import Deadline, Timeout, seconds
from nc10d.base.debug_level import DebugLevel, get_debug_level
from nc10d.base.signal_errors import raised_here
from nc10d.group.collectives import Collectives, OpenBatch
from nc10d.group.point_to_point import PointToPoint
from nc10d.group.race_check import race_checked, wait_for_conflicts
from nc10d.kernels.hooks import ALL_DONE, REFUSED, UNFINISHED
from nc10d.ops import Array, Barrier, MessageInfo, Op, Recv, ReduceOp, Send
from nc10d.ops.facts import FACTS
from nc10d.work import Work

if TYPE_CHECKING:
    from nc10d.codec.openings import Openings, OpeningsPool

R = TypeVar("R")
Originals = tuple[Arguments, Arguments] | None
Attempt = Callable[[Preparing, Any, Arguments, Arguments, float, Originals], R | None]
"""Called as attempt(backend, prepared, x, y, timeout, originals); see Dispatcher._attempt."""

Observer = Callable[[Any, Sequence[Op], int], object]
"""Called as observer(group, ops, number of this launch) before each launch."""


def _run(
    backend: Preparing, call: Any, x: Arguments, y: Arguments, timeout: float, _: Originals
) -> Literal[True] | None:
    answer = call.run(call.words, x, y)
    done = not (answer or call.in_flight) or backend.finish(call, answer, x, y, timeout)
    return True if done else None


def _start(
    backend: Preparing, call: Any, x: Arguments, y: Arguments, timeout: float, originals: Originals
) -> Work | None:
    started: Work | None = call.start(backend.waiter, x, y, timeout, False, originals)
    return started


def _start_messages(
    backend: Preparing, _call: object, ops: Sequence[Op], _y: object, timeout: float, _: Originals
) -> list[Work] | None:
    return backend.start_messages(ops, timeout)


def _exchange(
    backend: Preparing, route: Any, x: Arguments, y: Arguments, timeout: float, _: Originals
) -> Literal[True] | None:
    dst, tag, src, take = route
    return True if backend.exchange(dst, x, tag, src, y, take, timeout) else None


class Dispatcher(Collectives, PointToPoint):
    """The part of a group that launches; a subclass makes backends in `_new_backend`."""

    watch_work: Callable[[Dispatcher, Sequence[Op], Work | None], Work | None] = staticmethod(
        lambda group, ops, work: work
    )
    """At the debug level DETAIL, returns the Work that a caller gets; may be replaced."""
    rank: CallableInt
    size: CallableInt

    def __init__(self, name: str, config: BackendConfig, timeout: float) -> None:
        self.name = CallableStr(name)
        self.config = config
        self.timeout = timeout
        self._backends = BackendTable()
        self._ready = self._backends.ready
        self._lock = threading.RLock()
        self._batches: dict[int, OpenBatch] = {}
        self._observers: tuple[Observer, ...] = ()
        self._launches = itertools.count()
        self._looks = 0
        # Arrays whose views were lent to calls that failed: a peer may still read them, until the
        # group is closed.
        self._stranded: list[object] = []
        # The CPU's backend while nothing stands between a call and it: the group is usable,
        # nobody observes, no block is open. None sends every call the long way.
        self._preparing: Preparing | None = None
        self._race_check = get_debug_level() is DebugLevel.DETAIL
        self.direct = np.zeros(1, np.int64)
        """A word for compiled code: 1 while prepared calls may pass everything by."""

    def set_timeout(self, timeout: Timeout) -> None:
        """Set the timeout of this rank's later operations: seconds, a timedelta, or None: never."""
        self.timeout = seconds(timeout)

    def _new_backend(self, device: str, deadline: Deadline) -> Backend:
        """Make a device's backend; may wait for the other ranks until `deadline`."""
        raise NotImplementedError

    def _backend_made(self, device: str) -> None:
        """Called when a device's backend has been made."""

    def _call(
        self, kind: type[Op], extra: object, x: Array, y: object, async_op: bool, timeout: Timeout
    ) -> Work | None:
        backend = self._preparing
        if async_op:
            return self._start(kind, extra, x, y, timeout)
        if backend is None or type(x) in unowned_views:
            if self._attempt(_run, kind, extra, x, y, timeout):
                return None
            return self._run(FACTS[kind].make(extra, x, y), x, False, timeout)
        limit = self.timeout if timeout is None else seconds(timeout)
        # One frame for everything: each frame costs a small call a twentieth of its time.
        try:
            prepared = backend.latest[kind].get(extra)
        except TypeError:  # as in `_attempt`
            prepared = None
        if prepared is not None:
            try:
                answer = prepared.run(prepared.words, x, y)
                done = not (answer or prepared.in_flight) or backend.finish(
                    prepared, answer, x, y, limit
                )
            except BaseException:
                backend.abandon(prepared, x, y)
                raise
            if done:
                next(self._launches)
                return None
        return self._run(FACTS[kind].make(extra, x, y), x, async_op, timeout)

    def _attempt(
        self, run: Attempt[R], kind: type[Op] | None, extra: Any, x: Any, y: Any, timeout: Timeout
    ) -> R | None:
        """Return `run(backend, prepared, x, y, timeout, originals)`; None: nothing has happened.

        `prepared` is the prepared call of `kind` and `extra`; without a kind, `extra` itself. Other
        libraries' arrays are lent: `run` gets views of them, and `originals` are the arrays, which
        the caller or a Work keeps alive. Otherwise `originals` is None.
        """
        backend, prepared = self._preparing, extra
        if backend is None:
            return None
        if kind is not None:
            try:
                prepared = backend.latest[kind].get(extra)
            except TypeError:  # what was passed as `op` is no key: the checks say what is wrong
                prepared = None
            if prepared is None:
                return None
        a, b, originals = x, y, None
        if unowned_views and (type(x) in unowned_views or type(y) in unowned_views):
            views = lend(x, y)
            if views is None:
                return None
            (a, b), originals = views, (x, y)
        limit = self.timeout if timeout is None else seconds(timeout)
        try:
            result = run(backend, prepared, a, b, limit, originals)
        except BaseException:
            if originals is not None:
                self._stranded.append(originals)  # first: a second Ctrl-C may come
            if kind is not None:
                backend.abandon(prepared, a, b)
            raise
        if result is not None:
            next(self._launches)
        return result

    def run_hooked(
        self, kind: type[Op], extra: Any, pool: OpeningsPool, task: int, value: Any, places: Any
    ) -> Openings | None:
        """Run a prepared call between its openings' hooks (nc10d.kernels.hooks); blocks.

        `kind` and `extra` are as in Parts; `task`, `value` and `places` are the hooks' arguments.
        Returns None if all is done. Otherwise returns the openings, after `begin_fallback`: the
        caller does the rest, and gives them back. Raises what a signal's handler raises, or the
        group's failure; then no call uses these openings again.
        """
        try:
            openings = pool.pop()
        except IndexError:
            openings = pool.make()
        backend, prepared = self._preparing, None
        x, y = openings.arrays[task]
        if backend is not None:
            prepared = backend.hooked.get((kind, extra)) or backend.find_hooked(kind, extra, x, y)
        if backend is None or prepared is None:
            openings.begin_fallback(None)
            return openings
        block = openings.make_block() if openings.block is None else openings.block
        try:
            try:
                answer = prepared.run_hooked(prepared.words, x, y, block, task, value, places)
            except raised_here(Exception) as error:
                answer = openings.answer_to(error)
            if answer < ALL_DONE or prepared.in_flight:
                self._finish_hooked(backend, prepared, answer, openings, (x, y))
        except BaseException:
            backend.abandon(prepared, x, y)
            raise
        if answer < ALL_DONE:
            return openings
        while answer > ALL_DONE:  # each piece of a message is a launch, as without hooks
            next(self._launches)
            answer -= 1
        pool.append(openings)
        return None

    def _finish_hooked(
        self,
        backend: Preparing,
        prepared: PreparedCall[Any],
        answer: int,
        openings: Openings,
        arguments: tuple[Arguments, Arguments],
    ) -> None:
        """Complete the operation at which the hooks have stopped, if that has begun; may block."""
        x, y = arguments
        if answer >= ALL_DONE:
            backend.finish(prepared, 0, x, y, self.timeout)
            return
        openings.begin_fallback(answer)
        if answer not in (REFUSED, UNFINISHED):
            if type(y) is int:  # messages
                x, y = x[openings.ran], openings.tag if openings.ran else y
            if backend.finish(prepared, answer, x, y, self.timeout):
                openings.ran += 1
        for _ in range(openings.ran):
            next(self._launches)

    def _start(self, kind: type[Op], extra: Any, x: Array, y: Any, timeout: Timeout) -> Work | None:
        """Start an asynchronous call, if possible as a prepared call; arguments as `_call`'s."""
        work = self._attempt(_start, kind, extra, x, y, timeout)
        if work is not None:
            return work
        return self._run(FACTS[kind].make(extra, x, y), x, True, timeout)

    def _exchange(self, dst: int, x: Array, tag: int, src: int, y: Array, take: int) -> bool:
        """Send x while receiving y, if both are prepared; False: nothing has happened."""
        route = dst, tag, src, take
        return self._attempt(_exchange, None, route, x, y, None) is not None

    def _probe(self, src: int | None, tag: int | None, deadline: Deadline) -> MessageInfo | None:
        check_probe(src, tag, self.rank, self.size)
        self.refuse_in_batch("a probe")
        device = self.config.first
        backend = self._ready.get(device) or self.backend(device)
        return backend.probe(src, tag, deadline)

    def try_prepared_messages(self, ops: Sequence[Send | Recv]) -> list[Work] | None:
        """Start a batch of messages if all are prepared; None: nothing has happened."""
        seen = [op if type(op.x) is np.ndarray else map_to_numpy(op) for op in ops]
        works = self._attempt(_start_messages, None, None, seen, None, None)
        if works is not None:
            for work, op, view in zip(works, ops, seen, strict=True):
                if view is not op:
                    work.ops = (op,)  # the caller sees its own arrays
        return works

    def _run(self, op: Op, array: Array, async_op: bool, timeout: Timeout) -> Work | None:
        """Run `op`, or add it to this thread's open block; `array` is any array in it."""
        # The CPU's backend gets NumPy views of other libraries' arrays, see arrays.interop.
        facts = FACTS[type(op)]
        given = op
        if facts.reduces:
            if type(getattr(op, "op", None)) is not ReduceOp:
                validate(op, self.rank, self.size)
            if isinstance(array, tuple):
                op = with_fields(op)
                array = getattr(op, facts.arrays[0])
        batch = self._batches.get(get_ident()) if self._batches else None
        if (
            batch is not None
            and not async_op
            and timeout is None
            and batch.array_type is type(array)
        ):
            batch.append(op)
            return None
        if type(array) in (list, tuple) and array:
            array = array[0]
        device = self.config.first if type(op) is Barrier else device_type(array)
        if batch is not None:
            return batch.add(op, device, async_op, timeout)
        seen, lent = op, None
        if device == "cpu" and not (type(array) is np.ndarray and facts.on_one_array):
            # A lent view costs less, but the array must be held until the call is over.
            may_lend = not async_op and self._preparing is not None
            lent = None if not may_lend else use_unowned_views(op)
            seen = map_to_numpy(op) if lent is None else op
        try:
            work = self.launch((seen,), device, async_op, timeout)
        except BaseException:
            if lent is not None:
                self._stranded.append(lent)
            raise
        if work is not None and seen is not given:
            work.ops = (given,)  # the caller sees its own arrays in the results
        return work

    def launch(
        self,
        ops: Sequence[Op],
        device: str = "cpu",
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Work | None:
        """Run `ops` in order, as a single submission, on the backend for `device`.

        Blocks and returns None, or returns a Work with `async_op`. An open block is passed by.
        `timeout` (seconds or timedelta) replaces the group's.
        """
        backend = self._ready.get(device) or self.backend(device)
        number = next(self._launches)
        for observe in self._observers:
            observe(self, ops, number)
        limit = self.timeout if timeout is None else seconds(timeout)
        if self._race_check:
            if async_op:
                work = race_checked(ops, lambda copies: backend.launch(copies, limit, async_op))
                return self.watch_work(self, ops, work)
            wait_for_conflicts(ops)
        return backend.launch(ops, limit, async_op)

    def backend(self, device: str, deadline: Deadline | None = None) -> Backend:
        """Return the backend for a kind of device ("cpu", "cuda"), made if need be.

        Making a backend may block until the other ranks come, or until `deadline` (by default, the
        group's timeout). ValueError if none is configured for the device.
        """
        found = self._backends.find(device)
        if found is None:
            until = deadline or Deadline.after(self.timeout)
            found = self._backends.make(device, until, self._new_backend)
            self._refresh()
            self._backend_made(device)
        return found

    def _refresh(self) -> None:
        with self._lock:
            self._race_check = get_debug_level() is DebugLevel.DETAIL
            free = not (self._observers or self._batches or self._race_check)
            usable = self._ready.get("cpu") if free else None
            self._preparing = None if usable is None else usable.preparing
            self.direct[0] = self._preparing is not None

    @property
    def seq(self) -> int:
        """The number of launches so far on this rank; a coalesced batch is a single launch."""
        with self._lock:
            # Looking at the counter advances it; that is subtracted again.
            self._looks += 1
            return next(self._launches) - self._looks + 1

    def observe(self, observer: Observer) -> Callable[[], None]:
        """Call `observer(group, ops, number)` before each launch; return a function to stop it."""
        with self._lock:
            self._observers = (*self._observers, observer)
            self._refresh()

        def stop() -> None:
            with self._lock:
                self._observers = tuple(each for each in self._observers if each is not observer)
                self._refresh()

        return stop

    def open_batch(self, batch: OpenBatch) -> None:
        """Let `batch` take this thread's calls; ValueError if a block is open already."""
        self.refuse_in_batch("a nested coalescing block")
        with self._lock:
            self._batches[get_ident()] = batch
            self._preparing = None
            self.direct[0] = 0

    def close_batch(self) -> None:
        """Let this thread's calls go through again."""
        with self._lock:
            self._batches.pop(get_ident(), None)
            self._refresh()

    def refuse_in_batch(self, what: str) -> None:
        """Raise ValueError if this thread has a coalescing block open on the group."""
        if get_ident() in self._batches:
            message = f"{what} is not possible inside a coalescing block of group {self.name!r}"
            raise ValueError(message)
