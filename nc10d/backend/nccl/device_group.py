"""A group on its device: launches are submitted at once, or when their communicators are formed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from nc10d.arrays.access import first_array
from nc10d.backend.cpu.engine.call_sites import SITES
from nc10d.backend.nccl.any_source import Senders
from nc10d.backend.nccl.awaited_ranks import AwaitedRanks
from nc10d.backend.nccl.bindings import native
from nc10d.backend.nccl.bindings.entering import NEW_SITE, TAGS_DIFFER
from nc10d.backend.nccl.comm.comm_meeting import Parent, meet
from nc10d.backend.nccl.comm.comm_streams import COLLECTIVES, CommStream, CommStreams, NcclGroup
from nc10d.backend.nccl.comm.communicator import Communicator
from nc10d.backend.nccl.comm.options import NcclOptions, shares
from nc10d.backend.nccl.launch import launch_table
from nc10d.backend.nccl.launch.call_board import STAMP, Caller
from nc10d.backend.nccl.launch.compared_call import CallText, compared
from nc10d.backend.nccl.launch.launch_cache import CachedLaunch
from nc10d.backend.nccl.launch.nccl_calls import Call
from nc10d.backend.nccl.launch.planner import LaunchPlanner
from nc10d.backend.nccl.watchdog import watchdog
from nc10d.backend.nccl.works import NcclWork, PendingWorks
from nc10d.base.deadline import Deadline
from nc10d.base.signal_errors import Event
from nc10d.cuda import captured_graphs
from nc10d.cuda.captured_graphs import CapturedGraph
from nc10d.cuda.driver import EventPool, call, describe, event_pool, on_device
from nc10d.cuda.streams import LEGACY, chosen_stream_or, is_captured, stream_of
from nc10d.errors import CudaError, DistError, NCCLError
from nc10d.kernels.cache import entry_point
from nc10d.ops import Op, RepeatedOps
from nc10d.ops.facts import name_of
from nc10d.store.prefix import PrefixStore

_run_rows = entry_point(native.nc10d_nccl_run)
_UNABLE = "unable"  # in the store, among the keys of a meeting
_NEW_SITE = native.SCALE + NEW_SITE
"""The answer from a table whose first row has met a new line in the user's program."""


class DeferredLaunch(NamedTuple):
    """A launch that waits for its communicators; `before` is an event, recorded at the call."""

    work: NcclWork
    comm_streams: tuple[CommStream, ...]
    before: int


class DeviceGroup:
    """A group's launches on its device. Any thread may call `launch`.

    The backend sets `failed` to refuse launches; the group's `check` then raises the reason. If the
    group has not failed, `refusal` is the reason.
    """

    def __init__(self, group: NcclGroup, device: int) -> None:
        self.device = device
        self._group = group
        self._pool = event_pool(device)
        self.comm_streams = CommStreams(group, self._pool, self.pump)
        self._planner = LaunchPlanner(group, self._pool, self.comm_streams)
        self.board = self._planner.board
        self.senders = Senders(group.rank, group.size, group.others.messages(), group.options.links)
        self.pending = PendingWorks(self._pool, group.fail, self.board.ended)
        self.awaited = AwaitedRanks(group, self.pending, self.board)
        self._graphs: set[CapturedGraph] = set()  # replaced, and never changed
        self._context = launch_table.DeviceContext(device)
        self._device_rows = self._context.address
        self._timing = group.options.timing
        self._waiting = 0  # number of deferred launches
        self.failed = False
        self.refusal: str | None = None
        self._meetings = 0
        self._take = self._pool.take

    def launch(self, ops: Sequence[Op], timeout: float, join: bool) -> NcclWork:
        """Submit operations at once, or as soon as their communicators are formed.

        With `join` the current stream waits for them. ValueError and TypeError for operations that
        NCCL can't run, before anything is sent.
        """
        pending = self.pending
        with pending.lock:
            if self.failed:
                self.check()
            kept = ops.prepared if type(ops) is RepeatedOps else None
            if kept is not None and kept.is_valid():
                cached: CachedLaunch = kept
            else:
                cached = self._planner.cached(ops, timeout)
            default_stream = cached.default_stream
            if default_stream is None:
                current, own = stream_of(first_array(ops)), chosen_stream_or(None) is None
            else:
                current = chosen_stream_or(default_stream)
                own = current == default_stream
            captured = current > LEGACY and is_captured(current, self.device)
            work = NcclWork(ops, pending, timeout, cached)
            ready = cached.table is not None and not self._waiting
            if captured:
                self._capture(work, ready, current, join)
            elif ready:
                lets_go = own and join and cached.in_order
                # First, so that the watchdog sees a thread stuck in NCCL.
                pending.add(work, lets_go)
                self._submit(work, current, join)
                if lets_go:
                    work.ops = ()
            else:
                self._defer(work, cached.comm_streams, current)
            if cached.messages is not None:
                sends, takes = cached.messages
                self.senders.sent(sends)
                self.senders.received(takes)
        return work

    def check(self) -> None:
        """Raise what a launch would: the group's failure, or why launches are refused."""
        if self.failed:
            self._group.check()
            raise ValueError(self.refusal)

    def refuse(self, text: str) -> None:
        """Refuse launches by a ValueError with `text`, until `accept`."""
        with self.pending.lock:
            self.check()
            self.refusal = text
            self.failed = True

    def accept(self) -> None:
        """Take launches again, unless the group has failed meanwhile."""
        with self.pending.lock:
            self.refusal = None
            self.failed = False
            try:
                self._group.check()
            except DistError:  # after the assignment: the failure makes its own at any time
                self.failed = True
            self.pump()  # launches that were deferred meanwhile

    def meet(self, what: str, deadline: Deadline, able: bool = True) -> bool:
        """Wait until all ranks have come to an NCCL call that waits for all.

        Returns whether all are `able` to make the call. The ranks make such calls in the same
        order. RendezvousError names the missing ranks.
        """
        with self.pending.lock:
            self._meetings += 1
            number = self._meetings
        group, store = self._group, self._group.store.clone()
        try:
            keys = PrefixStore(f"{what} {number}", store)
            name = f"group {group.name!r}, {what}"
            if not able:
                keys.set(_UNABLE, "")
            meet(keys, name, group.rank, group.size, deadline, group.check, group.others)
            return not keys.check([_UNABLE])
        finally:
            store.close()

    def formed(self, name: str, deadline: Deadline) -> Communicator:
        """Return a communicator of all ranks by name; blocks until all have come."""
        group = self._group
        with self.pending.lock:
            found = self.comm_streams.get(name, range(group.size), deadline)
        found.settled.wait()  # forming ends by the deadline
        if found.comm is None:
            group.check()
        return found.formed

    def split_off(
        self, ranks: Sequence[int], options: NcclOptions, deadline: Deadline
    ) -> Communicator | None:
        """Return a communicator of `ranks`, None if a rank is not able to split; all ranks call.

        Nobody waits for operations in flight, which NCCL's guide forbids meanwhile: then the new
        groups form communicators from nothing. A failure within NCCL ends the group.
        """
        group, graphs = self._group, self.graphs_alive
        self.pending.sweep()
        able = bool(ranks) and options.grow_from is None and group.library.has("ncclCommSplit")
        able = able and not (self.pending.busy or graphs or self.refusal or shares(group.options))
        if not self.meet("new groups", deadline, able):
            return None
        main = self.formed(COLLECTIVES, deadline)
        try:
            key = ranks.index(group.rank)
            return main.split(ranks[0], key, deadline, options.config, group.check)
        except DistError as error:
            group.fail(error)
            group.check()  # raises the cause that the ranks have agreed on
            raise

    def as_parent(self) -> Parent:
        """Return the communicator out of which another group's grows; ValueError if it can't."""
        main, group = self.comm_streams.find(COLLECTIVES), self._group
        self.pending.sweep()
        if main is None or main.comm is None:
            raise ValueError(f"grow_from: group {group.name!r} has no communicator yet")
        if self.pending.busy:
            raise ValueError(f"grow_from: group {group.name!r} has operations in flight")
        return Parent(main.comm, group.rank, group.size)

    @property
    def graphs_alive(self) -> int:
        """How many graphs with launches of the group exist; any thread may ask."""
        return sum(not graph.gone for graph in self._graphs)

    def calls(self, ops: Sequence[Op]) -> list[list[Call]]:
        """Check operations as `launch` does; return NCCL's calls for each, and launch nothing."""
        with self.pending.lock:
            if self.failed:
                self.check()
            return self._planner.checked_calls(ops)

    def _capture(self, work: NcclWork, ready: bool, current: int, join: bool) -> None:
        """Submit a launch that becomes part of a graph."""
        if work.blocks:
            raise ValueError(f"{work._describe()}: a captured call can't make the host wait")
        if not ready:
            raise ValueError(f"{work._describe()}: communicate once before capturing a graph")
        if work.cached.room_nbytes:
            work.cached = self._planner.again(work.cached, work.ops, work.deadline, None)
        for op in work.ops if work.cached.messages is not None else ():
            self.board.links.stop_comparing(op)
        self._submit(work, current, join)
        for comm_stream in work.cached.comm_streams:
            comm_stream.captured = True
        # The event belongs to the graph, and never ends.
        event, cached = work.event, work.cached  # the graph uses what the table keeps
        release = partial(_end_capture, self._pool, event, cached)
        graph = captured_graphs.keep(current, self.device, release)
        if graph not in self._graphs:
            self._graphs = {graph, *(each for each in self._graphs if not each.gone)}
        self.board.ended(work.stamp)
        if watchdog.idle:  # a peer's failure ends graphs, too, which may run at any time
            watchdog.wake()

    def _defer(self, work: NcclWork, comm_streams: tuple[CommStream, ...], current: int) -> None:
        work.stamp = self._enter(self._planner.caller_of(work.ops), work)
        work.submitted = Event()
        self._waiting += 1
        before = self._pool.take()
        with on_device(self.device):
            call("cuEventRecord", before, current)
        deferred = DeferredLaunch(work, comm_streams, before)
        for comm_stream in comm_streams:
            comm_stream.queue.append(deferred)
        self.pending.add(work, False)
        self.pump()  # they may have been formed just now

    def _enter(self, caller: Caller, work: NcclWork) -> int:
        """Enter a launch ahead of its table; return the stamp of the entry in the log."""
        try:
            self.board.enter(caller, CallText(compared(work.ops)))
        except DistError as error:
            self._group.fail(error)
            raise
        return caller.words[STAMP]

    def pump(self) -> None:
        """Submit deferred launches whose communicators are formed, in order."""
        with self.pending.lock:
            # The caller may reuse a failed group's arrays: no launch may write to them.
            while not self.failed:
                queues = [comm_stream.queue for comm_stream in self.comm_streams.all()]
                heads = {id(queue[0]): queue[0] for queue in queues if queue}
                ready = [
                    deferred
                    for deferred in heads.values()
                    if all(
                        x.comm is not None and x.queue[0] is deferred for x in deferred.comm_streams
                    )
                ]
                if not ready:
                    return
                for deferred in ready:
                    if not self.failed:
                        self._submit_deferred(deferred)

    def _submit_deferred(self, deferred: DeferredLaunch) -> None:
        """Submit a deferred launch. Its caller has returned, so an error fails the group."""
        for comm_stream in deferred.comm_streams:
            comm_stream.queue.popleft()
        self._waiting -= 1
        work = deferred.work
        assert work.submitted is not None
        try:
            before = deferred.before
            work.cached = self._planner.again(work.cached, work.ops, work.deadline, before)
            self._submit(work, 0, False, first=launch_table.AFTER_EVENT)
        except DistError as error:
            self._group.fail(error)
            return
        except BaseException as error:  # a mistake here, or a signal's: no waiter may hang
            self._group.fail(NCCLError(f"{work._describe()}: {error!r}"))
            raise
        self._pool.give(deferred.before)
        work.submitted.set()

    def _submit(self, work: NcclWork, current: int, join: bool, first: int = 0) -> None:
        """Run the calls of a Work's table; a failed submission fails the group."""
        table, ended = work.cached.table, self._take(self._timing)
        assert table is not None, "the communicators are formed"
        rows, device, end = table.address, self._device_rows, table.ended
        count = end + 2 if join else end + 1
        try:
            with table.lock:
                answer = _run_rows(rows, first, count, device, current, ended, end)
                while answer == _NEW_SITE:
                    SITES.learn()
                    answer = _run_rows(rows, first, count, device, current, ended, end)
                while answer < 0:  # nonblocking: rows after a group wait for the group's end
                    for comm_stream in table.comm_streams:
                        comm_stream.formed.settle(work.deadline, work._describe())
                    answer = _run_rows(rows, -answer, count, device, current, ended, end)
            if answer:
                raise self._error(table, work, answer)
        except DistError as error:
            self._group.fail(error)
            raise
        if not first:
            work.stamp = table.caller.words[STAMP]
        work.event, work.begun = ended, table.begun
        comm_streams = table.comm_streams
        counts = work.cached.counts
        if len(counts) == 1:  # written out: most launches
            main = comm_streams[0]
            main.calls = number = main.calls + counts[0]
            work.numbers = (number,)
        else:
            for comm_stream, count in zip(comm_streams, counts, strict=True):
                comm_stream.calls += count
            work.numbers = tuple([comm_stream.calls for comm_stream in comm_streams])

    def _error(self, table: launch_table.LaunchTable, work: NcclWork, answer: int) -> DistError:
        entering = table.entering(answer)
        if entering:
            return self.board.mismatch(entering)
        code, place, by_cuda = table.culprit(answer)
        if code == TAGS_DIFFER and place is not None and not by_cuda:
            return self.board.links.mismatch(work.ops[place])
        which = "" if place is None else f", operation {place}: {name_of(work.ops[place])}"
        group = self._group
        what = f"rank {group.rank} of group {group.name!r}, {work._describe()}{which}"
        if by_cuda:
            return CudaError(f"{what}: {describe(code)}", code=code)
        return NCCLError(f"{what}: {group.library.describe(code)}", code=code)


def _end_capture(pool: EventPool, event: int, used: CachedLaunch) -> None:
    """Take back the event of a captured launch; `used` is what its graph has used."""
    pool.give(event)
