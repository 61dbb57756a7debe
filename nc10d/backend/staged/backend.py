"""The staged backend: a launch goes down to the host, through the inner backend, and up again.

A group has two threads. The down thread takes launches in their order. For each, the thread queues
the copies to the host after the work on the caller's stream, waits for them, and launches the
operations on the inner backend without waiting for their end. The up thread takes launches as they
end, and queues the copies to the device. A blocking call does all of that in its own thread if no
other launch is in flight. A launch that uses memory that an earlier launch will write waits until
the earlier launch's copies to the device are queued.
"""

from __future__ import annotations

import functools
import logging
import os
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from nc10d.arrays.access import first_array
from nc10d.arrays.buffer import device_type
from nc10d.arrays.validate import validate
from nc10d.backend.protocol import Backend, BackendSetup, Options
from nc10d.backend.registry import find_backend, load_factory
from nc10d.backend.staged.copies import Copies, StagedWork
from nc10d.backend.staged.staging import Staging
from nc10d.base.deadline import Deadline
from nc10d.base.run_to_end import import_to_end
from nc10d.base.signal_errors import Event, Thread
from nc10d.cuda.driver import device_at
from nc10d.cuda.streams import stream_of
from nc10d.errors import Aborted, CollectiveTimeout, CudaError, DistError, GroupClosed
from nc10d.ops import MessageInfo, Op
from nc10d.store.base import Store
from nc10d.work import Work

_log = logging.getLogger(__name__)
Task = Callable[[], None]


class CopyWorker:
    """A thread that runs tasks in their order, started by the first; see `close`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._thread: Thread | None = None
        self._lock = threading.Lock()

    def give(self, task: Task) -> None:
        """Have `task` run on the thread; a task handles its own errors."""
        self._tasks.put(task)
        if self._thread is None:
            self._start()

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                thread = Thread(target=self._main, name=self._name, daemon=True)
                thread.start_in(self, "_thread")

    def _main(self) -> None:
        while True:
            task = self._tasks.get()
            if task is None:
                return
            try:
                task()
            except Exception:  # noqa: BLE001  (a faulty task must not stop later tasks)
                _log.exception("a task of %s failed", self._name)

    def close(self) -> None:
        """Wait until all given tasks have run; no task may be given afterwards."""
        self._tasks.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()


@dataclass(frozen=True, slots=True)
class StagedOptions:
    """`pg_options` of a staged group: the backend for host memory, by name, and its own options."""

    inner: str = "cpu"
    options: Options = None


def make(setup: BackendSetup) -> StagedBackend:
    """Make a group's backend; blocks until all ranks have arrived."""
    options = _checked(setup.options)
    factory = load_factory(find_backend(options.inner))
    # The group's own `cpu` backend meets in the same store.
    store = import_to_end("nc10d.store.prefix").PrefixStore("staged", setup.store)
    place = setup.group_name, setup.rank, setup.size
    inner = BackendSetup(*place, store, setup.deadline, options.options)
    return StagedBackend(setup.group_name, factory(inner))


def _checked(options: StagedOptions | None) -> StagedOptions:
    if options is None:
        return StagedOptions()
    entry = find_backend(options.inner)
    entry.check_options(options.options)
    if "cpu" not in entry.devices:
        raise ValueError(f"the inner backend must serve host memory, got {options.inner!r}")
    return options


class _Launch(NamedTuple):
    """A launch in flight; copies to the host begin after `event`; no `copies`: no elements."""

    work: StagedWork
    staging: Staging
    copies: Copies | None
    event: int


class StagedBackend(Backend):
    """One rank's end of a group; a method's docstring states if it blocks."""

    name = "staged"
    device_type = "cuda"

    def __init__(self, group_name: str, inner: Backend) -> None:
        """Stage the arrays of a group for `inner`, which this object now owns."""
        self.rank = inner.rank
        self.size = inner.size
        self.inner = inner
        self._name = group_name
        self._down_thread = CopyWorker("nc10d-staged-down")
        self._up_thread = CopyWorker("nc10d-staged-up")
        self._copies: dict[int, Copies] = {}
        self._in_flight: dict[StagedWork, Staging] = {}
        self._lock = threading.RLock()
        self._closing = Event()

    def launch(self, ops: Sequence[Op], timeout: float, async_op: bool) -> Work | None:
        """Run `ops`; see Backend. A sync call returns when the copies to the device are queued."""
        for op in ops:
            validate(op, self.rank, self.size)
        array = first_array(ops)
        if array is not None and device_type(array) != "cuda":
            raise TypeError(f"the staged backend takes device arrays, got {type(array).__name__}")
        staging, work = Staging(ops, self.rank), StagedWork(ops, Deadline.after(timeout))
        with self._lock:
            if self._closing.is_set():
                raise GroupClosed(f"group {self._name!r} has been closed", group=self._name)
            copies = self._copies_for(staging)
            event = 0 if copies is None else copies.record_event(stream_of(array))
            launch = _Launch(work, staging, copies, event)
            in_caller = not async_op and all(other.queued.is_set() for other in self._in_flight)
            self._in_flight[work] = staging
            if not in_caller:
                self._down_thread.give(functools.partial(self._start_down, launch))
        if async_op:
            return work
        if in_caller:
            self._run_in_caller(launch)
        self._wait_unless_interrupted(work)
        return None

    def _run_in_caller(self, launch: _Launch) -> None:
        """Run a launch in the caller's thread, while no other launch is in flight on the host."""
        # The up thread waits for the launch's copies to the device.
        work, staging, copies, _ = launch
        try:
            self._copy_down_after_earlier(launch)
            self.inner.launch(staging.on_host(), work.deadline.remaining(), False)
            if copies is not None:
                copies.copy_up(staging, work)
        except BaseException as error:
            self._finish_work(work, error)
            self.abort(error)
            raise
        self._up_thread.give(functools.partial(self._wait_until_copied, launch, None))

    def _copies_for(self, staging: Staging) -> Copies | None:
        """Return the Copies for a launch's device; None if it has no elements to copy."""
        sample = staging.sample
        if sample is None:
            return None
        device = device_at(sample.address)
        found = self._copies.get(device)
        if found is None:
            found = self._copies[device] = Copies(device, self._closing)
        return found

    def _wait_unless_interrupted(self, work: StagedWork) -> None:
        try:
            work.wait()
        except BaseException:
            if not work.queued.is_set():  # such as by Ctrl-C
                name = work._describe()
                text = f"rank {self.rank} was interrupted in {name}"
                self.abort(Aborted(text, rank=self.rank, pid=os.getpid(), op=name))
            raise

    def probe(self, peer: int | None, tag: int | None, deadline: Deadline) -> MessageInfo | None:
        """Return the inner backend's next message; see Backend."""
        return self.inner.probe(peer, tag, deadline)

    # To the host, on the down thread

    def _start_down(self, launch: _Launch) -> None:
        work, staging = launch.work, launch.staging
        try:
            self._copy_down_after_earlier(launch)
            inner = self.inner.launch(staging.on_host(), work.deadline.remaining(), True)
            assert inner is not None
        except BaseException as error:  # noqa: BLE001  (the Work carries it, and the other ranks)
            self._finish_work(work, error)
            self.abort(error)
            return
        inner.add_done_callback(
            lambda ended: self._up_thread.give(lambda: self._finish(launch, ended))
        )

    def _copy_down_after_earlier(self, launch: _Launch) -> None:
        work, staging, copies, event = launch
        if copies is not None:
            self._follow_earlier(work, staging, copies)
            if not copies.copy_down(staging, event, work.deadline):
                raise self._timeout_error(work)

    def _follow_earlier(self, work: StagedWork, staging: Staging, copies: Copies) -> None:
        """Wait for earlier launches that write this launch's memory."""
        with self._lock:
            in_flight = list(self._in_flight.items())
        for earlier, earlier_staging in in_flight:
            if earlier is work:
                return
            if staging.follows(earlier_staging):
                earlier.queued.wait(min(work.deadline.remaining(), threading.TIMEOUT_MAX))
                copies.wait_for_copies_of(earlier)

    def _timeout_error(self, work: StagedWork) -> DistError:
        name = work._describe()
        if self._closing.is_set():
            return GroupClosed(f"group {self._name!r} was closed", group=self._name, op=name)
        message = f"{name}: its arrays were not computed within the operation's timeout"
        return CollectiveTimeout(message, rank=self.rank, group=self._name, op=name)

    # To the device, on the up thread

    def _finish(self, launch: _Launch, inner: Work) -> None:
        work, staging, copies, _ = launch
        if inner.exception() is not None:
            self._finish_work(work, inner.exception())
            return
        try:
            if copies is not None:
                copies.copy_up(staging, work)
        except CudaError as error:
            self._finish_work(work, error)
            self.abort(error)
            return
        self._wait_until_copied(launch, inner._result)

    def _wait_until_copied(self, launch: _Launch, result: object) -> None:
        """Wait until the copies to the device end; the launch keeps the host memory until then."""
        error = None
        try:
            if launch.copies is not None:
                launch.copies.wait_until_copied(launch.work)
        except CudaError as failure:
            error = failure
            self.abort(failure)
        self._finish_work(launch.work, error, result)

    def _finish_work(
        self, work: StagedWork, error: BaseException | None, result: object = None
    ) -> None:
        with self._lock:
            self._in_flight.pop(work, None)
        work.end(error, result)

    # Groups and ends

    def split(
        self, ranks: Sequence[int], name: str, store: Store, deadline: Deadline, options: Any = None
    ) -> StagedBackend:
        """Make the backend for a subgroup of `ranks`; blocks until all have arrived."""
        inner = self.inner.split(ranks, name, store, deadline, _checked(options).options)
        return StagedBackend(name, inner)

    def abort(self, reason: BaseException) -> None:
        """Fail the group with `reason` on every rank; the first reason wins."""
        self.inner.abort(reason)

    def close(self) -> None:
        """Leave the group; idempotent. Operations still in flight fail with GroupClosed."""
        with self._lock:
            if self._closing.is_set():
                return
            self._closing.set()
        self.inner.close()
        self._down_thread.close()
        self._up_thread.close()
        closed = GroupClosed(f"group {self._name!r} was closed", group=self._name)
        for work in list(self._in_flight):
            self._finish_work(work, closed)
