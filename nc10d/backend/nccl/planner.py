"""From operations to a recipe: known ones are found, new ones checked, planned and laid out."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import numpy as np

from nc10d.arrays.access import first_array
from nc10d.arrays.dtypes import DType
from nc10d.arrays.validate import validate
from nc10d.backend.nccl import datatypes, uniform
from nc10d.backend.nccl.bindings.library import Library
from nc10d.backend.nccl.comm_streams import ALL, CommStream, CommStreams, GroupIdentity
from nc10d.backend.nccl.contiguous import ContiguousCopies
from nc10d.backend.nccl.launch_cache import CachedLaunch, Key, LaunchCache, key_of
from nc10d.backend.nccl.launch_table import (
    Body,
    Events,
    Grouped,
    LaunchTable,
    Placed,
    TableRows,
    grouped,
    in_groups,
)
from nc10d.backend.nccl.nccl_calls import Call, CallContext, calls_of
from nc10d.backend.nccl.options import NcclOptions
from nc10d.backend.nccl.peer_notes import Note, Text, words_of
from nc10d.base.deadline import Deadline
from nc10d.cuda.driver import call, driver
from nc10d.cuda.events import EventPool
from nc10d.cuda.memory import device_of, to_device
from nc10d.cuda.streams import Stream
from nc10d.ops import OP_NAMES, AllReduces, Op, RepeatedOps


class LaunchPlanner:
    """Makes what a group launches on one device; used under the lock of the launches."""

    def __init__(
        self,
        who: GroupIdentity,
        library: Library,
        options: NcclOptions,
        pool: EventPool,
        lanes: CommStreams,
        note: int,
    ) -> None:
        self.device = pool.device
        self._who = who
        self._library = library
        self._timing = options.timing
        self._pool = pool
        self._lanes = lanes
        self._known = LaunchCache()
        self._note, self._nowhere = Note(note), Note()
        self._before = pool.take()
        self._joint = Stream(self.device, options.high_priority)
        self._scratch = to_device(np.ones(1, np.int32), self.device)
        self._fp8 = _reduces_fp8(library, self.device)

    def recipe(self, ops: Sequence[Op], timeout: float) -> CachedLaunch:
        """Return how to run a launch: as it was run before if it is a known one.

        ValueError and TypeError for what NCCL can't do.
        """
        key = None if self._timing else key_of(ops)
        recipe = self._known.find(key, ops) or self._alike(ops, key)
        if recipe is None:
            recipe = self._new(ops, key, Deadline.after(timeout))
        if type(ops) is RepeatedOps and key is not None and recipe.program is not None:
            ops.prepared = recipe
        return recipe

    def _alike(self, ops: Sequence[Op], key: Key | None) -> CachedLaunch | None:
        """Make the recipe of a block of all_reduces that are right; None for any other launch."""
        main = self._lanes.find(ALL)
        if type(ops) is not AllReduces or key is None or main is None or main.comm is None:
            return None
        ends = self._library.address("ncclAllReduce"), main.handle, main.stream
        rows = uniform.rows_of(ops, self.device, self._fp8, ends)
        if rows is None:
            return None
        recipe = CachedLaunch((main,), ops)
        recipe.program = self._laid_out(
            ops, recipe.lanes, self._before, lambda table: table.block(rows)
        )
        self._known.keep(key, ops, recipe)
        return recipe

    def _new(self, ops: Sequence[Op], key: Key | None, deadline: Deadline) -> CachedLaunch:
        """Check what a caller can get wrong, and make the recipe of a launch."""
        for op in ops:
            validate(op, self._who.rank, self._who.size)
            if getattr(op, "peer", 0) is None:
                raise ValueError("recv: nccl must know from whom: src can't be None")
            self._check_device(op)
        straight = ContiguousCopies(ops, self._who.rank, self.device)
        calls = self._calls(straight.ops, lambda *_: 0)
        lanes: dict[CommStream, None] = {self._lanes.of(op, deadline): None for op in ops}
        recipe = CachedLaunch(tuple(lanes), ops)
        if all(lane.comm is not None for lane in lanes):
            if any(map(_is_scaled, ops)):
                calls = self._calls(straight.ops, self._scaled)
            recipe.program = self._planned(
                ops, straight, recipe.lanes, deadline, self._before, calls
            )
            self._known.keep(key, ops, recipe)
        return recipe

    def _check_device(self, op: Op) -> None:
        array = first_array((op,))
        device = self.device if array is None else device_of(array)
        if device != self.device:
            where = f"group {self._who.group!r} is on cuda:{self.device}"
            raise ValueError(f"{OP_NAMES[type(op)]}: {where}, got an array on cuda:{device}")

    def _calls(
        self, ops: Sequence[Op], scaled: Callable[[float, int, DType], int]
    ) -> list[list[Call]]:
        who, scratch = self._who, self._scratch.address
        place = CallContext(who.rank, who.size, self._library.has, scaled, scratch, self._fp8)
        return [calls_of(op, place) for op in ops]

    def program(
        self, ops: Sequence[Op], lanes: tuple[CommStream, ...], deadline: Deadline, before: int
    ) -> LaunchTable:
        """Lay out a launch that was checked before its lanes were formed.

        The event `before` has been recorded already.
        """
        straight = ContiguousCopies(ops, self._who.rank, self.device)
        calls = self._calls(straight.ops, self._scaled)
        return self._planned(ops, straight, lanes, deadline, before, calls)

    def tell(self, ops: Sequence[Op], lanes: tuple[CommStream, ...]) -> None:
        """Tell the peers of a launch that waits for its lanes."""
        self._note_of(lanes).write(Text(words_of(ops)))

    def _note_of(self, lanes: tuple[CommStream, ...]) -> Note:
        """Return where to tell of a launch: messages alone, as everywhere, are not told of."""
        return self._note if any(lane.name == ALL for lane in lanes) else self._nowhere

    def _planned(
        self,
        ops: Sequence[Op],
        straight: ContiguousCopies,
        lanes: tuple[CommStream, ...],
        deadline: Deadline,
        before: int,
        calls: Sequence[list[Call]],
    ) -> LaunchTable:
        ways = [self._lanes.of(op, deadline) for op in ops]
        groups = []
        for group in in_groups(ops):
            placed = [Placed(ways[at], one, at) for at in group for one in calls[at]]
            by_lane = [[at for at in group if ways[at] is lane] for lane in lanes]
            if placed:
                copies = list(map(straight.before, by_lane)), list(map(straight.behind, by_lane))
                groups.append(Grouped(placed, *copies))
        return self._laid_out(ops, lanes, before, grouped(groups, lanes), straight.kept)

    def _laid_out(
        self,
        ops: Sequence[Op],
        lanes: tuple[CommStream, ...],
        before: int,
        body: Body,
        kept: object = None,
    ) -> LaunchTable:
        begun = self._pool.take(timing=True) if self._timing else 0
        events = Events(before, begun, self._joint.handle if len(lanes) > 1 else 0)
        note, text = self._note_of(lanes), Text(words_of(ops))
        return LaunchTable(lanes, events, body, TableRows(self._library), note, (text, kept))

    def _scaled(self, factor: float, datatype: int, dtype: DType) -> int:
        """Return the operator of a PREMUL_SUM, whose factor NCCL reads in the array's type."""
        main = self._lanes.find(ALL)
        assert main is not None
        assert main.comm is not None, "only what runs on a formed lane is scaled"
        value = np.array(factor).astype(dtype.numpy)
        scalar = ctypes.create_string_buffer(value.tobytes())
        return main.comm.premul_sum(factor, datatype, scalar)


def _is_scaled(op: Op) -> bool:
    return getattr(getattr(op, "op", None), "factor", None) is not None


def _reduces_fp8(library: Library, device: int) -> bool:
    attribute = driver().CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
    capability = int(call("cuDeviceGetAttribute", attribute, call("cuDeviceGet", device)))
    return library.version >= datatypes.FP8_SINCE and capability >= datatypes.FP8_CAPABILITY
