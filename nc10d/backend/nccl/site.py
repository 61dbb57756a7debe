"""A group's place on its device: lanes, events, known launches; from operations to a submission."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from nc10d.access import first_array
from nc10d.backend.nccl import alike, datatypes, native
from nc10d.backend.nccl.calls import Call, Place, calls_of
from nc10d.backend.nccl.flights import Flights
from nc10d.backend.nccl.lanes import Lane, Lanes, Who
from nc10d.backend.nccl.library import Library
from nc10d.backend.nccl.options import NcclOptions
from nc10d.backend.nccl.programs import (
    Body,
    Context,
    Events,
    Placed,
    Program,
    Rows,
    grouped,
    in_groups,
)
from nc10d.backend.nccl.recipes import Key, Recipe, Recipes, key_of
from nc10d.backend.nccl.works import NcclWork
from nc10d.cuda.driver import call, driver, on_device
from nc10d.cuda.events import event_pool
from nc10d.cuda.memory import device_of, to_device
from nc10d.cuda.streams import PER_THREAD, Stream, stream_of, stream_or
from nc10d.deadline import Deadline
from nc10d.dtypes import DType
from nc10d.errors import CudaError, DistError, NCCLError
from nc10d.kernels.cache import entry_point
from nc10d.ops import OP_NAMES, AllReduces, Kept, Op
from nc10d.validate import validate

if TYPE_CHECKING:
    from nc10d.store.base import Store

_run_rows = entry_point(native.nc10d_nccl_run)


class Deferred(NamedTuple):
    """A launch that waits for its lanes; `before` is an event of its own, recorded at the call."""

    work: NcclWork
    lanes: tuple[Lane, ...]
    before: int


class Site:
    """All that a group needs on one device. `launch` is called by any thread.

    `failed` is set by whoever lets nothing be launched any more; `check` says why.
    """

    def __init__(
        self,
        who: Who,
        device: int,
        store: Store,
        library: Library,
        options: NcclOptions,
        fail: Callable[[DistError], None],
        check: Callable[[], None],
    ) -> None:
        self.device = device
        self._who = who
        self._library = library
        self._options = options
        self._check = check
        self._fail = fail
        self._pool = event_pool(device)
        self.flights = Flights(self._pool, fail)
        self.lanes = Lanes(
            who, store, library, options, self._pool, formed=self.pump, fail=fail, check=check
        )
        self._recipes = Recipes()
        self._before = self._pool.take()
        self._joint = Stream(device, options.high_priority)
        self._scratch = to_device(np.ones(1, np.int32), device)
        self._captured: list[int] = []
        self._context = Context(device)
        self._device_rows = self._context.address
        self._timing = options.timing
        self._waiting = 0  # launches that wait for their lanes
        self.failed = False
        self._take = self._pool.take
        self._fp8 = _reduces_fp8(library, device)

    def launch(self, ops: Sequence[Op], timeout: float, join: bool) -> NcclWork:
        """Submit operations, or have it done as soon as their lanes are formed.

        With `join` the current stream waits for them. ValueError and TypeError for what NCCL
        can't do, before anything is sent.
        """
        flights = self.flights
        with flights.lock:
            if self.failed:
                self._check()
            known = ops.known if type(ops) is Kept else None
            recipe = known if known is not None and known.fits() else self._recipe(ops, timeout)
            home = recipe.home
            current = stream_of(first_array(ops)) if home is None else stream_or(home)
            # The two default streams can't be captured.
            captured = current > PER_THREAD and _is_captured(current)
            work = NcclWork(ops, flights, timeout, recipe)
            program = recipe.program
            if program is not None and not self._waiting:
                self._submit(program, work, current, join)
                if captured:  # its event is the graph's, and never over
                    self._captured.append(work.event)
                else:
                    flights.add(work)
            elif captured:
                raise ValueError(f"{work._describe()}: communicate once before capturing a graph")
            else:
                self._defer(work, recipe.lanes, current)
        return work

    def _recipe(self, ops: Sequence[Op], timeout: float) -> Recipe:
        """Return how to run a launch: as it was run before if it is a known one."""
        key = None if self._options.timing else key_of(ops)
        recipe = self._recipes.find(key, ops) or self._alike(ops, key)
        if recipe is None:
            recipe = self._new(ops, key, Deadline.after(timeout))
        if type(ops) is Kept and key is not None and recipe.program is not None:
            ops.known = recipe
        return recipe

    def _alike(self, ops: Sequence[Op], key: Key | None) -> Recipe | None:
        """Make the recipe of a block of all_reduces that are right; None for any other launch."""
        main = self.lanes.find("all")
        if type(ops) is not AllReduces or key is None or main is None or main.comm is None:
            return None
        ends = self._library.address("ncclAllReduce"), main.handle, main.stream
        table = alike.rows_of(ops, self.device, self._fp8, ends)
        if table is None:
            return None
        recipe = Recipe((main,), ops)
        recipe.program = self._laid_out(recipe.lanes, self._before, lambda rows: rows.block(table))
        self._recipes.keep(key, ops, recipe)
        return recipe

    def _new(self, ops: Sequence[Op], key: Key | None, deadline: Deadline) -> Recipe:
        """Check what a caller can get wrong, and make the recipe of a launch."""
        for op in ops:
            validate(op, self._who.rank, self._who.size)
            if getattr(op, "peer", 0) is None:
                raise ValueError("recv: nccl must know from whom: src can't be None")
            self._check_device(op)
        checked = self._place(lambda *_: 0)
        calls = [calls_of(op, checked) for op in ops]
        lanes: dict[Lane, None] = {self.lanes.of(op, deadline): None for op in ops}
        recipe = Recipe(tuple(lanes), ops)
        if all(lane.comm is not None for lane in lanes):
            known = None if any(map(_is_scaled, ops)) else calls
            recipe.program = self._program(ops, recipe.lanes, deadline, self._before, known)
            self._recipes.keep(key, ops, recipe)
        return recipe

    def _check_device(self, op: Op) -> None:
        array = first_array((op,))
        device = self.device if array is None else device_of(array)
        if device != self.device:
            where = f"group {self._who.group!r} is on cuda:{self.device}"
            raise ValueError(f"{OP_NAMES[type(op)]}: {where}, got an array on cuda:{device}")

    def _place(self, scaled: Callable[[float, int, DType], int]) -> Place:
        who, scratch = self._who, self._scratch.address
        return Place(who.rank, who.size, self._library.has, scaled, scratch, self._fp8)

    def _program(
        self,
        ops: Sequence[Op],
        lanes: tuple[Lane, ...],
        deadline: Deadline,
        before: int,
        calls: Sequence[list[Call]] | None = None,
    ) -> Program:
        """Lay out a launch whose lanes are formed."""
        if calls is None:
            place = self._place(self._scaled)
            calls = [calls_of(op, place) for op in ops]
        ways = [self.lanes.of(op, deadline) for op in ops]
        groups = [
            [Placed(ways[at], one, at) for at in group for one in calls[at]]
            for group in in_groups(ops)
        ]
        return self._laid_out(lanes, before, grouped([one for one in groups if one], lanes))

    def _laid_out(self, lanes: tuple[Lane, ...], before: int, body: Body) -> Program:
        begun = self._pool.take(timing=True) if self._options.timing else 0
        events = Events(before, begun, self._joint.handle if len(lanes) > 1 else 0)
        return Program(lanes, events, body, Rows(self._library))

    def _scaled(self, factor: float, datatype: int, dtype: DType) -> int:
        """Return the operator of a PREMUL_SUM, whose factor NCCL reads in the array's type."""
        (main,) = (lane for lane in self.lanes.all() if lane.name == "all")
        assert main.comm is not None
        value = np.array(factor).astype(dtype.numpy)
        scalar = ctypes.create_string_buffer(value.tobytes())
        return main.comm.premul_sum(factor, datatype, scalar)

    def _defer(self, work: NcclWork, lanes: tuple[Lane, ...], current: int) -> None:
        work.submitted = threading.Event()
        self._waiting += 1
        before = self._pool.take()
        with on_device(self.device):
            call("cuEventRecord", before, current)
        waiting = Deferred(work, lanes, before)
        for lane in lanes:
            lane.queue.append(waiting)
        self.flights.add(work)
        self.pump()  # the lanes may have been formed just now

    def pump(self) -> None:
        """Submit what has waited for lanes that are formed now, in order."""
        with self.flights.lock:
            while True:
                heads = {
                    id(lane.queue[0]): lane.queue[0] for lane in self.lanes.all() if lane.queue
                }
                ready = [one for one in heads.values() if _is_next(one)]
                if not ready:
                    return
                for one in ready:
                    self._late_submit(one)

    def _late_submit(self, one: Deferred) -> None:
        for lane in one.lanes:
            lane.queue.popleft()
        self._waiting -= 1
        work = one.work
        assert work.submitted is not None
        program = self._program(work.ops, one.lanes, work.deadline, one.before)
        self._submit(program, work, 0, False, first=1)
        self._pool.give(one.before)
        work.submitted.set()

    def _submit(
        self, program: Program, work: NcclWork, current: int, join: bool, first: int = 0
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

    def _error(self, program: Program, work: NcclWork, answer: int) -> DistError:
        code, place, by_cuda = program.culprit(answer)
        which = "" if place is None else f", operation {place}: {OP_NAMES[type(work.ops[place])]}"
        what = f"rank {self._who.rank} of group {self._who.group!r}, {work._describe()}{which}"
        if by_cuda:
            return CudaError(f"{what}: CUDA error {code}", code=code)
        return NCCLError(f"{what}: {self._library.describe(code)}", code=code)


def _is_next(one: Deferred) -> bool:
    return all(lane.comm is not None and lane.queue[0] is one for lane in one.lanes)


def _is_scaled(op: Op) -> bool:
    return getattr(getattr(op, "op", None), "factor", None) is not None


def _is_captured(stream: int) -> bool:
    """Say whether what is queued on a stream becomes part of a graph."""
    status: Any = call("cuStreamIsCapturing", stream)
    none = driver().CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE
    return bool(status != none)


def _reduces_fp8(library: Library, device: int) -> bool:
    attribute = driver().CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
    capability = int(call("cuDeviceGetAttribute", attribute, call("cuDeviceGet", device)))
    return library.version >= datatypes.FP8_SINCE and capability >= datatypes.FP8_CAPABILITY
