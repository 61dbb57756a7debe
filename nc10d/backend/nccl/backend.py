"""The NCCL backend: one group's operations on the device that its first array is on.

Nothing is met or formed before the first operation (or at once, with init_process_group's
`device_id`): the first launch begins to form the group's communicator, and what is launched until
then is submitted when it is there.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from nc10d.arrays.access import first_array
from nc10d.backend.base import BackendSetup
from nc10d.backend.nccl import failure
from nc10d.backend.nccl.bindings.library import RESULT, library
from nc10d.backend.nccl.comm_streams import ALL, GroupIdentity
from nc10d.backend.nccl.communicator import Communicator
from nc10d.backend.nccl.device_group import DeviceGroup
from nc10d.backend.nccl.options import NcclOptions, read_options
from nc10d.backend.nccl.watchdog import watchdog
from nc10d.backend.nccl.works import NcclWork
from nc10d.base.deadline import Deadline
from nc10d.base.promise import copy_to_raise
from nc10d.cuda.driver import current_device, ordinal
from nc10d.cuda.memory import device_of
from nc10d.errors import Aborted, CudaError, DistError, GroupClosed, NCCLError
from nc10d.ops import Barrier, Op
from nc10d.store.prefix import PrefixStore
from nc10d.work import Work

if TYPE_CHECKING:
    from nc10d.store.base import Store

_WITNESSED = frozenset({RESULT["ncclRemoteError"], RESULT["ncclSystemError"]})
_GRACE, _LOOK = 0.5, 0.01  # seconds for the cause of such an error to become known; between looks

_PATIENCE = 10.0  # seconds for NCCL to let go of communicators
_log = logging.getLogger(__name__)


def make(setup: BackendSetup) -> NcclBackend:
    """Make the backend of a group; meets nobody unless the group has a device already.

    UnsupportedPlatform if there is no libnccl or no driver.
    """
    options = read_options(setup.options)
    library()
    backend = NcclBackend(setup, options)
    if setup.device is not None:
        backend.bind(ordinal(setup.device), setup.deadline)
    return backend


class NcclBackend:
    """One group by NCCL. Only `bind`, `close` and a first synchronous call wait for others."""

    name = "nccl"
    device_type = "cuda"

    def __init__(self, setup: BackendSetup, options: NcclOptions) -> None:
        self.rank = setup.rank
        self.size = setup.size
        self._who = GroupIdentity(setup.group_name, setup.rank, setup.size)
        self._options = options
        self._keys = PrefixStore("nccl", setup.store)
        self._others = setup.others
        self._store: Store | None = None
        self._site: DeviceGroup | None = None
        self._binding = threading.RLock()
        self._failure: DistError | None = None
        self._agreed = threading.Event()
        self._ended = threading.Event()

    def bind(self, device: int, deadline: Deadline) -> None:
        """Take a device and form the communicator; blocks until all ranks have, or raises."""
        site = self._on(device)
        site.launch((Barrier(),), deadline.remaining(), join=False).wait_blocking()

    def communicator(self, deadline: Deadline) -> Communicator:
        """Return the group's communicator; all ranks call, and it blocks until they have met."""
        self.bind(self._on(current_device()).device, deadline)
        assert self._site is not None
        main = self._site.lanes.find(ALL)
        assert main is not None
        assert main.comm is not None, "a barrier has run on it"
        return main.comm

    @property
    def device(self) -> int:
        """The number of the group's device; the current one, if it has none yet."""
        return current_device() if self._site is None else self._site.device

    def launch(self, ops: Sequence[Op], timeout: float, async_op: bool) -> Work | None:
        """Queue `ops` on the device; see Backend.

        Without `async_op` the current stream waits for them and the host goes on, except behind a
        barrier, and where the ranks have not met yet.
        """
        site = self._site or self._on(_device_of(ops))
        try:
            work = site.launch(ops, timeout, not async_op)
        except DistError:
            self._check()  # the cause that holds for all ranks, if this one's is not the first
            raise
        if async_op:
            return work
        if work.blocks or work.submitted is not None:
            self._wait_here(work)
        return None

    def _wait_here(self, work: NcclWork) -> None:
        try:
            work.wait()
        except KeyboardInterrupt:
            text = f"rank {self.rank} was interrupted in {work._describe()}"
            self.abort(Aborted(text, rank=self.rank, pid=os.getpid(), group=self._who.group))
            raise

    def _on(self, device: int) -> DeviceGroup:
        """Return the group's place, which is on the device that was named first."""
        self._check()
        with self._binding:
            if self._site is None:
                self._store = self._keys.clone()
                self._site = DeviceGroup(
                    self._who,
                    device,
                    self._keys,
                    library(),
                    self._options,
                    self.fail,
                    self._check,
                    self._others.note(),
                )
                watchdog.watch(self)
            return self._site

    def _check(self) -> None:
        """Raise what has made the group fail; waits until the ranks have agreed on it."""
        if self._failure is not None:
            self._agreed.wait()
            raise copy_to_raise(self._failure)

    def split(
        self,
        ranks: Sequence[int],
        name: str,
        store: Store,
        deadline: Deadline,
        options: Any = None,
    ) -> NcclBackend:
        """Make the backend of a group of some of my ranks; it meets them when it is used.

        ncclCommSplit is not used: every rank of the whole group would have to call it.
        """
        self._check()
        setup = BackendSetup(name, ranks.index(self.rank), len(ranks), store, deadline, options)
        return make(setup)

    def abort(self, reason: BaseException) -> None:
        """Fail the group with `reason` here and on every peer; never blocks, from any thread."""
        self.fail(reason if isinstance(reason, DistError) else Aborted(str(reason)))

    def fail(self, error: DistError, tell: bool = True) -> None:
        """End the group with `error`; the first wins, and is told to the others."""
        with self._binding:
            if self._failure is not None:
                return
            self._fall(error)
        end = threading.Thread(target=self._end, args=(error, tell), name="nc10d-nccl-end")
        end.daemon = True
        end.start()

    def _fall(self, error: DistError) -> None:
        """Let nothing be launched any more."""
        self._failure = error
        if self._site is not None:
            self._site.failed = True

    def _end(self, error: DistError, tell: bool) -> None:
        """End communicators, then Works: only then nothing touches their arrays any more.

        If NCCL never comes back from its abort, the Works stay pending for good, and keep their
        arrays.
        """
        error = self._root_of(error)
        if tell:
            error = self._tell(error)
        self._failure = error
        self._agreed.set()
        site = self._site
        if site is not None:
            site.flights.freeze()
            site.lanes.abort()
            site.flights.end(error)
        self._ended.set()

    def _tell(self, error: DistError) -> DistError:
        """Tell the others a cause; return the one that holds for all."""
        found = self._others.tell(error)
        if found is None:  # nobody else knows them, so the store has to do
            with contextlib.suppress(DistError, OSError):  # one that is gone tells nobody
                found = failure.told(self._store or self._keys.clone(), error)
        return found or error

    def _root_of(self, error: DistError) -> DistError:
        """Return what an error of NCCL's about a peer comes from, if another backend can tell."""
        if isinstance(error, NCCLError) and error.code in _WITNESSED:
            grace = Deadline.after(_GRACE)
            while not grace.expired():
                found = self._others.cause()
                if found is not None:
                    return found
                self._ended.wait(_LOOK)
        return error

    def tick(self) -> float | None:
        """Look for what has ended or failed, as the watchdog does; see Watched."""
        site = self._site
        if site is None or self._failure is not None:
            return None
        try:
            site.flights.sweep(wait=False)
            self._look_at_nccl(site)
        except (CudaError, NCCLError) as error:
            self.fail(error)
            return None
        except GroupClosed:  # ended by another thread meanwhile
            return None
        late = site.flights.late()
        if late is not None:
            self.fail(failure.too_late(self._who, late, self._others))
        elif site.flights.busy:
            self._listen()
        return site.flights.pause()

    def _look_at_nccl(self, site: DeviceGroup) -> None:
        for lane in site.lanes.all():
            comm = lane.comm
            # Who holds the lock is in NCCL, and will hear of an error itself.
            if comm is not None and comm.lock.acquire(blocking=False):
                try:
                    lane.check()
                finally:
                    comm.lock.release()

    def _listen(self) -> None:
        """Fail as the group's other backends have, or as a peer has told in the store."""
        assert self._store is not None
        cause = self._others.cause()
        if cause is None and not self._others.agree:
            with contextlib.suppress(DistError, OSError):
                cause = failure.heard(self._store)
        if cause is not None:
            self.fail(cause, tell=False)

    def close(self) -> None:
        """Give the communicators back; idempotent. What is in flight fails with GroupClosed.

        Blocks until NCCL has let go of them, at most ten seconds.
        """
        gone = GroupClosed(f"group {self._who.group!r} has been closed", group=self._who.group)
        site = self._site
        if site is not None:
            with contextlib.suppress(DistError):
                site.flights.sweep()
        if site is None:
            self._failure = self._failure or gone
            self._agreed.set()
            return
        if self._failure is None and not site.flights.busy:
            self._fall(gone)
            self._agreed.set()
            end = threading.Thread(target=self._let_go, args=(site,), name="nc10d-nccl-end")
            end.daemon = True
            end.start()
        else:
            self.fail(gone, tell=False)
        if not self._ended.wait(_PATIENCE):
            _log.warning("NCCL has not let go of group %r: it keeps what it has", self._who.group)

    def _let_go(self, site: DeviceGroup) -> None:
        site.flights.freeze()  # a launch that has just begun still uses what goes now
        site.lanes.close()
        self._ended.set()


def _device_of(ops: Sequence[Op]) -> int:
    array = first_array(ops)
    return current_device() if array is None else device_of(array)


__all__ = ["NcclBackend", "make"]
