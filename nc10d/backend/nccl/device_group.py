"""A group's place on its device: what is launched there, at once or when its lanes are formed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from nc10d.arrays.access import first_array
from nc10d.backend.nccl.bindings import native
from nc10d.backend.nccl.bindings.library import Library
from nc10d.backend.nccl.comm_streams import CommStream, CommStreams, GroupIdentity
from nc10d.backend.nccl.launch_cache import CachedLaunch
from nc10d.backend.nccl.launch_table import LATE, DeviceContext, LaunchTable
from nc10d.backend.nccl.options import NcclOptions
from nc10d.backend.nccl.pending import PendingWorks
from nc10d.backend.nccl.planner import LaunchPlanner
from nc10d.backend.nccl.works import NcclWork
from nc10d.cuda.driver import call, on_device
from nc10d.cuda.events import event_pool
from nc10d.cuda.streams import PER_THREAD, chosen_stream_or, is_captured, stream_of
from nc10d.errors import CudaError, DistError, NCCLError
from nc10d.kernels.cache import entry_point
from nc10d.ops import OP_NAMES, Op, RepeatedOps

if TYPE_CHECKING:
    from nc10d.store.base import Store

_run_rows = entry_point(native.nc10d_nccl_run)


class DeferredLaunch(NamedTuple):
    """A launch that waits for its lanes; `before` is an event of its own, recorded at the call."""

    work: NcclWork
    lanes: tuple[CommStream, ...]
    before: int


class DeviceGroup:
    """All that a group needs on one device. `launch` is called by any thread.

    `failed` is set by whoever lets nothing be launched any more; `check` says why. `note` is where
    peers read what is launched; see Others.
    """

    def __init__(
        self,
        who: GroupIdentity,
        device: int,
        store: Store,
        library: Library,
        options: NcclOptions,
        fail: Callable[[DistError], None],
        check: Callable[[], None],
        note: int = 0,
    ) -> None:
        self.device = device
        self._who = who
        self._library = library
        self._check = check
        self._fail = fail
        self._pool = event_pool(device)
        self.flights = PendingWorks(self._pool, fail)
        self.lanes = CommStreams(
            who, store, library, options, self._pool, formed=self.pump, fail=fail, check=check
        )
        self._maker = LaunchPlanner(who, library, options, self._pool, self.lanes, note)
        self._captured: list[tuple[int, CachedLaunch]] = []  # what graphs use
        self._context = DeviceContext(device)
        self._device_rows = self._context.address
        self._timing = options.timing
        self._waiting = 0  # launches that wait for their lanes
        self.failed = False
        self._take = self._pool.take

    def launch(self, ops: Sequence[Op], timeout: float, join: bool) -> NcclWork:
        """Submit operations, or have it done as soon as their lanes are formed.

        With `join` the current stream waits for them. ValueError and TypeError for what NCCL
        can't do, before anything is sent.
        """
        flights = self.flights
        with flights.lock:
            if self.failed:
                self._check()
            known = ops.prepared if type(ops) is RepeatedOps else None
            if known is not None and known.fits():
                recipe: CachedLaunch = known
            else:
                recipe = self._maker.recipe(ops, timeout)
            home = recipe.home
            current = stream_of(first_array(ops)) if home is None else chosen_stream_or(home)
            # The two default streams can't be captured.
            captured = current > PER_THREAD and is_captured(current)
            work = NcclWork(ops, flights, timeout, recipe)
            program = recipe.program
            if program is not None and not self._waiting:
                if not captured:
                    flights.add(work)  # before: a thread that NCCL keeps is looked after, too
                self._submit(program, work, current, join)
                if captured:  # its event is the graph's, and never over
                    self._captured.append((work.event, recipe))
            elif captured:
                raise ValueError(f"{work._describe()}: communicate once before capturing a graph")
            else:
                self._defer(work, recipe.lanes, current)
        return work

    def _defer(self, work: NcclWork, lanes: tuple[CommStream, ...], current: int) -> None:
        work.submitted = threading.Event()
        self._waiting += 1
        before = self._pool.take()
        with on_device(self.device):
            call("cuEventRecord", before, current)
        self._maker.tell(work.ops, lanes)
        waiting = DeferredLaunch(work, lanes, before)
        for lane in lanes:
            lane.queue.append(waiting)
        self.flights.add(work)
        self.pump()  # the lanes may have been formed just now

    def pump(self) -> None:
        """Submit what has waited for lanes that are formed now, in order."""
        with self.flights.lock:
            # A group that has ended has given the arrays back: nobody may write to them.
            while not self.failed:
                heads = {
                    id(lane.queue[0]): lane.queue[0] for lane in self.lanes.all() if lane.queue
                }
                ready = [one for one in heads.values() if _is_next(one)]
                if not ready:
                    return
                for one in ready:
                    if not self.failed:
                        self._late_submit(one)

    def _late_submit(self, one: DeferredLaunch) -> None:
        """Submit what has waited. Its caller has gone on: an error is the group's failure."""
        for lane in one.lanes:
            lane.queue.popleft()
        self._waiting -= 1
        work = one.work
        assert work.submitted is not None
        try:
            program = self._maker.program(work.ops, one.lanes, work.deadline, one.before)
            work.recipe.program = program
            self._submit(program, work, 0, False, first=LATE)
        except DistError as error:
            self._fail(error)
            return
        self._pool.give(one.before)
        work.submitted.set()

    def _submit(
        self, program: LaunchTable, work: NcclWork, current: int, join: bool, first: int = 0
    ) -> None:
        """Run a table of calls; what can't be submitted is the failure of the group."""
        ended = self._take(self._timing)
        table, device, end = program.address, self._device_rows, program.ended
        count = end + 2 if join else end + 1
        try:
            with program.lock:
                answer = _run_rows(table, first, count, device, current, ended, end)
                while answer < 0:  # nonblocking communicators: what is behind a group has to wait
                    for lane in program.lanes:
                        lane.settle(work.deadline, work._describe())
                    answer = _run_rows(table, -answer, count, device, current, ended, end)
            if answer:
                raise self._error(program, work, answer)
        except DistError as error:
            self._fail(error)
            raise
        work.event, work.begun = ended, program.begun
        work.lanes = lanes = program.lanes
        for lane in lanes:
            lane.launched += 1
        work.seq = lanes[0].launched

    def _error(self, program: LaunchTable, work: NcclWork, answer: int) -> DistError:
        code, place, by_cuda = program.culprit(answer)
        which = "" if place is None else f", operation {place}: {OP_NAMES[type(work.ops[place])]}"
        what = f"rank {self._who.rank} of group {self._who.group!r}, {work._describe()}{which}"
        if by_cuda:
            return CudaError(f"{what}: CUDA error {code}", code=code)
        return NCCLError(f"{what}: {self._library.describe(code)}", code=code)


def _is_next(one: DeferredLaunch) -> bool:
    return all(lane.comm is not None and lane.queue[0] is one for lane in one.lanes)
