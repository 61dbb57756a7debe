"""From operations to a cached launch: found in the cache, or else checked, planned and laid out."""

from __future__ import annotations

import ctypes
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import TypeAlias

import numpy as np

from nc10d.arrays.access import first_array
from nc10d.arrays.buffer import as_buffer
from nc10d.arrays.dtypes import DType, ElementType, allows
from nc10d.arrays.validate import validate
from nc10d.backend.nccl.bindings import native
from nc10d.backend.nccl.bindings.library import Library
from nc10d.backend.nccl.comm.comm_streams import COLLECTIVES, CommStream, CommStreams, NcclGroup
from nc10d.backend.nccl.comm.communicator import PremulOperator
from nc10d.backend.nccl.launch import datatypes
from nc10d.backend.nccl.launch.call_board import CallBoard, Caller
from nc10d.backend.nccl.launch.compared_call import CallText, compared, text_of_all_reduces
from nc10d.backend.nccl.launch.contiguous import ContiguousCopies
from nc10d.backend.nccl.launch.launch_cache import CachedLaunch, Key, LaunchCache, key_of
from nc10d.backend.nccl.launch.launch_table import (
    Body,
    Events,
    Grouped,
    LaunchTable,
    Placed,
    TableRows,
    grouped,
    in_groups,
)
from nc10d.backend.nccl.launch.nccl_calls import Call, CallContext
from nc10d.backend.nccl.launch.rank_order import OperationCalls, all_calls_of
from nc10d.base.deadline import Deadline
from nc10d.cuda import memory
from nc10d.cuda.device_kernels import capability, load_kernel
from nc10d.cuda.driver import EventPool, call, on_device
from nc10d.cuda.memory import device_of
from nc10d.cuda.streams import Stream, relaxed_capture_mode
from nc10d.kernels.cache import entry_point
from nc10d.kernels.gpu.gpu_reduce import fold_ptx
from nc10d.ops import AllReduces, Array, Op, Recv, RepeatedOps, Send
from nc10d.ops.facts import name_of
from nc10d.ops.reductions import ReductionKind

_fill_rows = entry_point(native.nc10d_nccl_uniform)
_look = attrgetter("address", "count", "dtype", "contiguous", "writable", "device")
Words: TypeAlias = "array[int]"


class LaunchPlanner:
    """Makes a group's launch tables on its device; used under the launches' lock."""

    def __init__(self, group: NcclGroup, pool: EventPool, comm_streams: CommStreams) -> None:
        self.device = pool.device
        self._group = group
        self._library = group.library
        self._timing = group.options.timing
        self._pool = pool
        self._comm_streams = comm_streams
        self._cache = LaunchCache()
        self.board = CallBoard(group)
        self._before = pool.take()
        self._joint = Stream(self.device, group.options.high_priority)
        self._scratch = memory.reserve((1,), DType.INT32, self.device)
        with on_device(self.device):  # a graph may be captured, but not on this stream
            call("cuMemsetD8Async", self._scratch.address, 0, 4, self._joint.handle)
        self._room = self._scratch  # until a fold needs more
        self._fp8 = _reduces_fp8(group.library, self.device)

    def cached(self, ops: Sequence[Op], timeout: float) -> CachedLaunch:
        """Return the cached launch for operations; makes a launch that is not in the cache.

        ValueError and TypeError for operations that NCCL can't run.
        """
        key = None if self._timing else key_of(ops)
        cached = self._cache.find(key, ops) or self._uniform_launch(ops, key)
        if cached is None:
            with relaxed_capture_mode():  # a graph may be captured: this allocates, loads kernels
                cached = self._checked_launch(ops, key, Deadline.after(timeout))
        if type(ops) is RepeatedOps and key is not None and cached.table is not None:
            ops.prepared = cached
        return cached

    def _uniform_launch(self, ops: Sequence[Op], key: Key | None) -> CachedLaunch | None:
        """Make the launch for a valid block of uniform all_reduces; None for any other launch."""
        main = self._comm_streams.find(COLLECTIVES)
        if type(ops) is not AllReduces or key is None or main is None or main.comm is None:
            return None
        ends = self._library.address("ncclAllReduce"), main.comm.handle, main.stream
        rows = uniform_rows(ops, self.device, self._fp8, ends)
        if rows is None:
            return None
        cached = CachedLaunch((main,), ops)
        dtype = as_buffer(ops.arrays[0]).dtype
        elements = datatypes.reduction(dtype, ops.op).elements
        counts = tuple([count // elements for count in rows[5 :: native.WORDS]])
        text = text_of_all_reduces(dtype.label, ops.op.compared, counts)
        cached.table = self._table_of(
            *(text, self.board.collectives, cached.comm_streams, self._before),
            lambda table: table.block(rows),
        )
        self._cache.keep(key, ops, cached)
        return cached

    def checked_calls(self, ops: Sequence[Op]) -> list[list[Call]]:
        """Check operations as a launch does; return the calls of each, for formed communicators."""
        self._check_all(ops)
        copies = ContiguousCopies(ops, self._group.rank, self.device)
        return [[*found.calls] for found in self._calls(copies.ops, partial(self._premul_op, []))]

    def _check_all(self, ops: Sequence[Op]) -> None:
        for op in ops:
            validate(op, self._group.rank, self._group.size)
            if getattr(op, "peer", 0) is None:
                raise ValueError("recv: src can't be None in a block: NCCL must know from whom")
            self._check_device(op)

    def _checked_launch(
        self, ops: Sequence[Op], key: Key | None, deadline: Deadline
    ) -> CachedLaunch:
        """Check the caller's operations, and make their launch."""
        self._check_all(ops)
        copies = ContiguousCopies(ops, self._group.rank, self.device)
        calls = self._calls(copies.ops)
        uses = Counter(self._comm_streams.of(op, deadline) for op in ops)
        counts = tuple(1 if each.name == COLLECTIVES else uses[each] for each in uses)
        cached = CachedLaunch(tuple(uses), ops, counts)
        cached.room_nbytes = sum(found.room_nbytes for found in calls)
        if all(comm_stream.comm is not None for comm_stream in uses):
            scales = any(getattr(getattr(op, "op", None), "factor", None) is not None for op in ops)
            known = None if cached.room_nbytes or scales else calls
            room = self._room_for(cached.room_nbytes)
            cached.table = self._table_for(cached, ops, copies, deadline, self._before, room, known)
            self._cache.keep(key, ops, cached)
        return cached

    def _check_device(self, op: Op) -> None:
        x = first_array((op,))
        device = self.device if x is None else device_of(x)
        if device != self.device:
            where = f"group {self._group.name!r} is on cuda:{self.device}"
            raise ValueError(f"{name_of(op)}: {where}, got an array on cuda:{device}")

    def _calls(
        self,
        ops: Sequence[Op],
        premul_op: Callable[[float, int, DType], int] = lambda *_: 0,
        room: int = 0,
    ) -> list[OperationCalls]:
        group, scratch = self._group, self._scratch.address
        has, kernel = group.library.has, self._kernel
        links = group.options.links != "group"
        context = CallContext(
            group.rank, group.size, has, premul_op, scratch, self._fp8, kernel, room, links
        )
        calls = list[OperationCalls]()
        for op in ops:
            calls.append(found := all_calls_of(op, context))
            if found.room_nbytes:
                context = replace(context, room=context.room + found.room_nbytes)
        return calls

    def _kernel(self, kind: ReductionKind, element: ElementType) -> int:
        """Return the kernel that folds such elements; UnsupportedPlatform without a compiler."""
        return load_kernel(self.device, fold_ptx(kind, element, capability(self.device)))

    def again(
        self, cached: CachedLaunch, ops: Sequence[Op], deadline: Deadline, before: int | None
    ) -> CachedLaunch:
        """Return a deferred launch, which has recorded `before`, with a table; or one for a graph.

        A graph may run beside other launches, so it gets room of its own.
        """
        graph, needed = before is None, cached.room_nbytes
        room = self._new_room(needed) if graph else self._room_for(needed)
        copies = ContiguousCopies(ops, self._group.rank, self.device)
        made = copy(cached)  # others use its table
        made.table = self._table_for(made, ops, copies, deadline, before or self._before, room)
        return made

    def _room_for(self, nbytes: int) -> memory.DeviceArray:
        """Return the room for folds, which take turns on their stream; it grows to `nbytes`."""
        # A table keeps the room that it uses. Outgrown rooms have together at most twice the bytes
        # of the present one.
        if nbytes > self._room.nbytes:
            self._room = self._new_room(max(nbytes, self._room.nbytes * 3 // 2))
        return self._room

    def _new_room(self, nbytes: int) -> memory.DeviceArray:
        return memory.reserve((nbytes,), DType.UINT8, self.device)

    def caller_of(self, ops: Sequence[Op]) -> Caller:
        """Return a launch's caller: peers compare launches with a collective."""
        alone = all(isinstance(op, (Send, Recv)) for op in ops)
        return self.board.messages if alone else self.board.collectives

    def _table_for(
        self,
        cached: CachedLaunch,
        ops: Sequence[Op],
        copies: ContiguousCopies,
        deadline: Deadline,
        before: int,
        room: memory.DeviceArray,
        calls: Sequence[OperationCalls] | None = None,
    ) -> LaunchTable:
        comm_streams = cached.comm_streams
        used: list[PremulOperator] = []
        calls = calls or self._calls(copies.ops, partial(self._premul_op, used), room.address)
        for operator in used:
            operator.users.add(cached)
        stream_of_op = [self._comm_streams.of(op, deadline) for op in ops]
        groups = []
        for group in in_groups(ops):
            placed = [
                [Placed(stream_of_op[at], call, at) for at in group for call in step(calls[at])]
                for step in map(attrgetter, ("calls", "kernels", "gathers"))
            ]
            if any(placed):
                around = (
                    [
                        Placed(stream_of_op[at], launch, at)
                        for at in group
                        for launch in copies.launches(at, side)
                    ]
                    for side in (0, 1)
                )
                groups.append(Grouped(placed, *around))
        calls_body, kept = grouped(groups, comm_streams), (copies.kept, room)

        def body(rows: TableRows) -> None:
            for place, op in enumerate(ops):
                rows.of_operation(place, self.board.links.row(op))
            calls_body(rows)

        caller = self.caller_of(ops)
        return self._table_of(CallText(compared(ops)), caller, comm_streams, before, body, kept)

    def _table_of(
        self,
        text: CallText,
        caller: Caller,
        comm_streams: tuple[CommStream, ...],
        before: int,
        body: Body,
        kept: object = None,
    ) -> LaunchTable:
        begun = self._pool.take(timing=True) if self._timing else 0
        events = Events(before, begun, self._joint.handle if len(comm_streams) > 1 else 0)
        return LaunchTable(
            comm_streams, events, body, TableRows(self._library), caller, (text, kept)
        )

    def _premul_op(
        self, used: list[PremulOperator], factor: float, datatype: int, dtype: DType
    ) -> int:
        """Return the operator for a PREMUL_SUM, whose factor NCCL reads in the array's type.

        `used` gets the operators of a launch, which may be more than those that are kept.
        """
        main = self._comm_streams.find(COLLECTIVES)
        assert main is not None
        value = np.array(factor).astype(dtype.numpy)
        scalar = ctypes.create_string_buffer(value.tobytes())
        if not used:
            main.formed.drop_operators()
        used.append(main.formed.premul_sum(factor, datatype, scalar))
        return used[-1].handle


def _reduces_fp8(library: Library, device: int) -> bool:
    has = capability(device)[0] >= datatypes.FP8_CAPABILITY
    return library.version >= datatypes.FP8_SINCE and has


def uniform_rows(
    ops: AllReduces, device: int, fp8: bool, ends: tuple[int, int, int]
) -> Words | None:
    """Return a row of ncclAllReduce for each array; `ends`: function, communicator, stream.

    The arrays must be on the device, with the same dtype, one that NCCL reduces, writable,
    contiguous, aligned, not empty, and without shared memory. None for any other block, also for
    mistakes, which the general path handles.
    """
    if len(ops) < 2 or ops.op.factor is not None or ops.op.by_rank:
        return None
    found = _look_at(ops.arrays, device)
    if found is None:
        return None
    dtype, places = found
    if not allows(dtype, ops.op) or (dtype in datatypes.FP8 and not fp8):
        return None
    datatype, elements, op, _ = datatypes.reduction(dtype, ops.op)
    assert op is not None, "only PREMUL_SUM has an operator of its own"
    function, comm, stream = ends
    row = array("q", (function, 7, native.GROUPED, 0, 0, 0, datatype, op, comm, stream, 0))
    rows = row * len(ops)
    (at, _), (table, _) = places.buffer_info(), rows.buffer_info()
    return rows if _fill_rows(at, table, len(ops), dtype.itemsize, elements) else None


def _look_at(arrays: Sequence[Array], device: int) -> tuple[DType, Words] | None:
    """Return the dtype, and words with addresses, counts, scratch; None unless arrays are alike."""
    addresses, counts, dtypes, contiguous, writable, kinds = zip(
        *map(_look, map(as_buffer, arrays)), strict=True
    )
    many = len(arrays)
    if dtypes.count(dtypes[0]) < many or kinds.count("cuda") < many:
        return None
    if not (all(contiguous) and all(writable)):
        return None
    if [device_of(x) for x in arrays].count(device) < many:
        return None
    return dtypes[0], array("q", addresses + counts + addresses)
