"""The NCCL backend: a group's operations on its first array's device.

The ranks first meet at the first operation, or at once with init_process_group's `device_id`. The
first launch begins to form the group's communicator; launches are submitted once that exists.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

from nc10d.arrays.access import first_array
from nc10d.backend.nccl.any_source import QueuedNcclReceive, checked
from nc10d.backend.nccl.bindings.header_table import FUNCTIONS
from nc10d.backend.nccl.bindings.library import Library, library
from nc10d.backend.nccl.comm.comm_meeting import Parent
from nc10d.backend.nccl.comm.comm_streams import COLLECTIVES, NcclGroup
from nc10d.backend.nccl.comm.communicator import Communicator
from nc10d.backend.nccl.comm.options import NcclOptions, as_struct, read_options
from nc10d.backend.nccl.device_group import DeviceGroup
from nc10d.backend.nccl.failure import GroupFailure
from nc10d.backend.nccl.records import NcclRecords
from nc10d.backend.nccl.watchdog import watchdog
from nc10d.backend.nccl.works import NcclWork
from nc10d.backend.protocol import Backend, BackendSetup
from nc10d.base.deadline import Deadline
from nc10d.base.signal_errors import raised_here, suppress_here
from nc10d.base.wait_report import WaitReport
from nc10d.cuda.driver import current_device, device_count, ordinal
from nc10d.cuda.memory import device_of
from nc10d.errors import Aborted, CudaError, DistError, GroupClosed, NCCLError
from nc10d.ops import Barrier, Op, Recv
from nc10d.store.base import Store
from nc10d.store.prefix import PrefixStore
from nc10d.work import Work

_ABORT_PATIENCE = 5.0  # seconds for operations to end, before their waiters raise
_SLICE = 0.2  # seconds between looks at the ranks that a group's end waits for
_log = logging.getLogger(__name__)


def make(setup: BackendSetup) -> NcclBackend:
    """Make a group's backend; waits for other ranks only if the group has a device already.

    UnsupportedPlatform if there is no libnccl or no driver.
    """
    options, nccl = read_options(setup.options), library()
    as_struct(options.config, nccl)  # a mistake is raised here, and not while ranks wait
    backend = NcclBackend(setup, options, nccl)
    if setup.device is not None:
        number, count = ordinal(setup.device), device_count()
        if number >= count:
            raise ValueError(f"device_id {setup.device!r}: this machine has {count} devices")
        backend.bind(number, setup.deadline)
    return backend


class NcclBackend(Backend):
    """A group on NCCL. Only `bind`, `await_close` and a first synchronous call wait for ranks."""

    name = "nccl"
    device_type = "cuda"

    def __init__(self, setup: BackendSetup, options: NcclOptions, library: Library) -> None:
        self.rank = setup.rank
        self.size = setup.size
        self._others = setup.others
        store = PrefixStore("nccl", setup.store)
        self._failure = GroupFailure(
            store, setup.others, self._refuse_launches, self._end, self._graphs_text
        )
        self._group = NcclGroup(
            setup.group_name,
            setup.rank,
            setup.size,
            store,
            library,
            options,
            self._failure.fail,
            self._failure.check_peers,
            self._others,
            None if options.grow_from is None else _parent_of(options.grow_from),
            setup.split_off,
        )
        self.device_group: DeviceGroup | None = None
        self._binding = threading.RLock()
        self._closed = False
        self._ended_here = False  # whether a caller on this rank was the first to end the group
        self._cut_off = False  # whether a failure has ended an operation, or may end a graph's
        self._records = NcclRecords(setup.rank, setup.size)

    def bind(self, device: int, deadline: Deadline) -> None:
        """Choose the device and form the communicator; blocks until all ranks have, or raises."""
        device_group = self._on_device(device)
        device_group.launch((Barrier(),), deadline.remaining(), join=False).wait_blocking()

    def communicator(self, deadline: Deadline) -> Communicator:
        """Return the group's communicator; blocks until all ranks have called."""
        self.bind(self.started.device, deadline)
        main = self.started.comm_streams.find(COLLECTIVES)
        assert main is not None
        return main.formed

    @property
    def group_name(self) -> str:
        """The group's name, for errors."""
        return self._group.name

    @property
    def library(self) -> Library:
        """The group's libnccl."""
        return self._group.library

    @property
    def nonblocking(self) -> bool:
        """Whether the group's communicators are nonblocking."""
        return self._group.options.config.blocking == 0

    @property
    def started(self) -> DeviceGroup:
        """The group on its device: the current device, if none yet."""
        return self.device_group or self._on_device(current_device())

    @property
    def device(self) -> int:
        """The number of the group's device; of the current device, if none yet."""
        return current_device() if self.device_group is None else self.device_group.device

    def launch(self, ops: Sequence[Op], timeout: float, async_op: bool) -> Work | None:
        """Queue `ops` on the device; see Backend."""
        # Without `async_op` the current stream waits for them. The host does not, except for a
        # barrier, and for the ranks to meet.
        device_group = self.device_group or self._on_device(_device_of(ops))
        op = ops[0] if len(ops) == 1 else None
        if isinstance(op, Recv) and (op.peer is None or device_group.senders.advance(op.tag)):
            return self._receive_in_order(device_group, op, timeout, async_op)
        try:
            work = device_group.launch(ops, timeout, not async_op)
        except raised_here(DistError):
            self._failure.check()  # raises the agreed cause, if another rank failed first
            raise
        if async_op:
            return work
        if work.blocks or work.submitted is not None:
            self._wait_unless_interrupted(work)
        return None

    def _receive_in_order(
        self, device_group: DeviceGroup, op: Recv, timeout: float, async_op: bool
    ) -> Work | None:
        """Receive from any rank, or behind such a receive."""
        checked(op, self.rank, self.size, device_group.senders)
        senders = device_group.senders
        work = QueuedNcclReceive(
            op, timeout, senders, self._launch_receive, self._failure.check_peers
        )
        if async_op:
            return work
        self._wait_unless_interrupted(work)
        return None

    def _launch_receive(self, op: Recv, timeout: float) -> NcclWork:
        assert self.device_group is not None
        return self.device_group.launch((op,), timeout, join=False)

    def _wait_unless_interrupted(self, work: Work) -> None:
        try:
            work.wait()
        except KeyboardInterrupt:
            text = f"rank {self.rank} was interrupted in {work._describe()}"
            self.abort(Aborted(text, rank=self.rank, pid=os.getpid(), group=self._group.name))
            raise

    def _on_device(self, device: int) -> DeviceGroup:
        """Return the group on its device, which is the first `device` that was given."""
        self._failure.check()
        with self._binding:
            if self.device_group is None:
                self._failure.connect()
                self.device_group = DeviceGroup(self._group, device)
                if self._failure.error is not None:  # the failure came after the check
                    self.device_group.failed = True
                self._records.board = self.device_group.board
                self._records.sweep = partial(self.device_group.pending.sweep, wait=False)
                watchdog.watch(self)
            return self.device_group

    @property
    def call_records(self) -> NcclRecords:
        """The log of launches."""
        return self._records

    def split(
        self, ranks: Sequence[int], name: str, store: Store, deadline: Deadline, options: Any = None
    ) -> NcclBackend:
        """Make the backend for a group of `ranks`, which meet at the first operation."""
        self._failure.check()
        setup = BackendSetup(name, ranks.index(self.rank), len(ranks), store, deadline, options)
        return make(setup)

    def split_off(
        self, ranks: Sequence[int], deadline: Deadline, options: Any = None
    ) -> Communicator | None:
        """Split the new groups' communicators off the group's, if all ranks can; see Backend."""
        given = read_options(options)
        as_struct(given.config, self.library)  # a mistake is raised before ranks wait in NCCL
        return self.started.split_off(ranks, given, deadline)

    def abort(self, reason: BaseException) -> None:
        """Fail the group with `reason` here and on every peer; never blocks, from any thread."""
        self._ended_here = self._ended_here or self._failure.error is None
        self.fail(reason if isinstance(reason, DistError) else Aborted(str(reason)))

    def fail(self, error: DistError) -> None:
        """End the group with `error`; the first error wins, and peers are notified."""
        self._failure.fail(error)

    def _refuse_launches(self) -> None:
        if self.device_group is not None:
            self.device_group.failed = True

    def _end(self, error: DistError) -> None:
        """Abort communicators, then end Works, after at most a few seconds."""
        device_group = self.device_group
        if device_group is not None:
            self._cut_off = bool(device_group.pending.busy or device_group.graphs_alive)
            device_group.pending.freeze()
            cut_off = device_group.pending.first_calls()
            deadline, abort = Deadline.after(_ABORT_PATIENCE), device_group.comm_streams.abort
            aborted = device_group.pending.end(error, abort, deadline)
            with contextlib.suppress(DistError, OSError):  # the store may be gone
                device_group.comm_streams.leave(self._failure.store, cut_off)
            if not device_group.graphs_alive:
                aborted.wait(deadline.remaining())
        if not isinstance(error, GroupClosed):
            self._records.failed(error)

    def _graphs_text(self) -> str:
        """Return what captured graphs of the group keep, "" without any."""
        alive = 0 if self.device_group is None else self.device_group.graphs_alive
        if not alive:
            return ""
        end = "1 captured CUDA graph is" if alive == 1 else f"{alive} captured CUDA graphs are"
        return f"NCCL keeps the communicators of group {self._group.name!r} until {end} destroyed"

    def tick(self) -> float | None:
        """Check for ended works and for failures, on the watchdog's thread; see Watched."""
        device_group = self.device_group
        if device_group is None or self._failure.error is not None:
            return None
        try:
            device_group.pending.sweep(wait=False)
            different = device_group.board.compare_hosts() if device_group.pending.busy else None
            if different is not None:
                self.fail(different)
                return None
            self._check_communicators(device_group)
        except (CudaError, NCCLError) as error:
            self.fail(error)
            return None
        except GroupClosed:  # another thread has closed the group meanwhile
            return None
        late = device_group.pending.late()
        if late is not None:
            self.fail(device_group.awaited.timeout(late))
        elif device_group.pending.busy or device_group.graphs_alive:
            self._failure.poll()
            left = device_group.awaited.left(self._failure.store)
            if left is not None:
                self.fail(left)
        return device_group.pending.pause()

    def _check_communicators(self, device_group: DeviceGroup) -> None:
        for comm_stream in device_group.comm_streams.all():
            comm = comm_stream.comm
            # A thread that holds the lock is in NCCL, which will return the error to that thread.
            if comm is not None and comm.lock.acquire(blocking=False):
                try:
                    comm_stream.check()
                finally:
                    comm.lock.release()

    def close(self) -> None:
        """Close the communicators; idempotent. Operations in flight fail with GroupClosed.

        NCCL's destroy waits for the ranks of a node, so that goes on in the background.
        """
        name = self._group.name
        gone = GroupClosed(f"group {name!r} has been closed", group=name)
        device_group = self.device_group
        if device_group is None:
            self._failure.close(gone, lambda: None)
            return
        failed = self._failure.error
        told = failed is None or failed._told or self._ended_here or self._closed
        if self._cut_off and not told:
            _log.error("nc10d: %s; no call has raised this error", failed)
        self._closed = True
        with suppress_here(DistError):
            device_group.pending.sweep(wait=False)  # a thread may be stuck in NCCL
        idle = not device_group.pending.busy
        if not (idle and self._failure.close(gone, partial(self._release, device_group))):
            self._failure.fail(gone, notify=False)

    def await_close(self, deadline: Deadline) -> None:
        """Wait until all ranks have closed the group, and NCCL has released it; see Backend.

        While captured CUDA graphs of the group exist, the communicators stay: no wait then.
        """
        group, over = self._group, self._failure.over
        report = WaitReport(f"rank {group.rank} of {group.size}", deadline)
        while not (over.wait(deadline.slice(_SLICE)) or self._graphs_text() or deadline.expired()):
            report.look(self._end_waits_for)
        if not over.is_set():
            kept = f"group {group.name!r} keeps its communicators: {self._end_waits_for()}"
            _log.warning("nc10d: %s", self._graphs_text() or kept)

    def _end_waits_for(self) -> str:
        missing = ""
        if self.device_group and isinstance(self._failure.error, GroupClosed):
            # A failed group meets no rank.
            missing = self.device_group.comm_streams.missing(self._failure.store)
        return missing or "NCCL has not let go"

    def _release(self, device_group: DeviceGroup) -> None:
        device_group.pending.freeze()  # waits for a launch that has just begun
        try:
            device_group.comm_streams.close(self._failure.store, self._check_others)
        except (DistError, OSError) as error:  # a rank has died, or the store is gone
            _log.info("group %r: no more ranks come to its end: %s", self._group.name, error)
            device_group.comm_streams.abort()

    def _check_others(self) -> None:
        cause = self._failure.cause_of_peers()
        if cause is not None:
            raise cause


def _parent_of(group: Any) -> Parent:
    """Return a growing group's communicator; TypeError or ValueError if it can't grow."""
    if not hasattr(group, "backend"):
        raise TypeError(f"grow_from: expected a group, got {group!r}")
    backend = group.backend("cuda")
    if not isinstance(backend, NcclBackend):
        raise TypeError(f"grow_from: {group!r} has {backend.name!r} for device arrays, not NCCL")
    backend.library.require(FUNCTIONS["ncclCommGrow"].since, "grow_from")
    return backend.started.as_parent()


def _device_of(ops: Sequence[Op]) -> int:
    array = first_array(ops)
    return current_device() if array is None else device_of(array)
