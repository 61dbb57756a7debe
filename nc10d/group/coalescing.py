"""Coalescing: collect operations, and launch them as a single submission.

The open batch belongs to (group, thread). Inside a block, calls on that group only join it: they
return None, or with `async_op` a pending Work whose `wait` raises until the block has ended.
Calls on other groups go straight through. A second block on the same group, object collectives,
`new_group` and `monitored_barrier` raise inside. Operations may be mixed, point-to-point too. An
exception inside drops the batch and leaves the group as if the block had not begun.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import TracebackType

import numpy as np

from nc10d.arrays.access import arrays_of
from nc10d.arrays.buffer import as_buffer, device_type, single_device_types
from nc10d.arrays.interop import address_finder, map_arrays, map_to_numpy, numpy_view, unowned_views
from nc10d.base.deadline import Deadline, Timeout, seconds
from nc10d.base.promise import PENDING
from nc10d.base.signal_errors import raised_here
from nc10d.group.dispatch import Dispatcher
from nc10d.ops import AllReduce, AllReduces, Array, Op, Recv, ReduceOp, RepeatedOps
from nc10d.work import Work

_MIXED = object()  # as `reduction`: the operations have no common reduction; equal to no argument


class BatchedWork(Work):
    """The Work of an operation in a batch, which ends when the whole batch ends."""

    __slots__ = ("_place", "_whole")

    def __init__(self, op: Op, place: int) -> None:
        super().__init__((op,))
        self._place = place
        self._whole: Work | None = None

    def wait(self, timeout: Timeout = None) -> bool:
        """Wait as the block's Work does: on devices the current stream waits, and not the host."""
        whole = self._whole
        if timeout is None and whole is not None and whole.on_stream and self._state == PENDING:
            return whole.wait()
        return super().wait(timeout)

    def wait_blocking(self, timeout: Timeout = None) -> bool:
        """Block the host until the operation has ended; see Work.wait."""
        return super().wait(timeout)

    def _settle(self, timeout: Timeout) -> None:
        self._require_unattended(self._describe())
        super()._settle(timeout)

    def _require_unattended(self, what: str) -> None:
        """Raise ValueError while the block is open: no wait for it would end."""
        if self._whole is None and not self._look():
            raise ValueError(f"{what}: its coalescing block has not ended yet; wait after it")

    def _value(self) -> object:
        # A backend need not return the sender of a receive that names its source.
        op = self.ops[0]
        source = op.peer if isinstance(op, Recv) and self._result is None else None
        return super()._value() if source is None else source

    def bind(self, whole: Work) -> None:
        """Let this work end with `whole`, the work of the block's launch."""
        self._whole = whole
        if self._callbacks is not None:
            self._watch()

    def _poll(self) -> None:
        if self._whole is not None:
            self._whole._look()
            self._follow(self._whole)

    def _block(self, deadline: Deadline) -> None:
        if self._whole is not None:
            if not self._whole._look():
                self._whole._block(deadline)
            self._follow(self._whole)

    def _watch(self) -> None:
        if self._whole is not None:
            self._whole._attach(self._follow)

    def _follow(self, whole: Work) -> None:
        """End as `whole` did, if that has ended; a batch's result has an entry per operation."""
        if whole._state:
            results = whole._result
            single = results[self._place] if isinstance(results, (list, tuple)) else results
            self._finish(whole._exception, single)


class Batch:
    """The operations of a block, to be launched together, and their pending Works."""

    def __init__(self, group: Dispatcher) -> None:
        self.group = group
        self._ops: list[Op] = []
        self._arrays: list[Array] = []
        self._reduction: ReduceOp | None = None
        self.append = self._ops.append
        self.take = self._arrays.append
        self.array_type: type | None = None
        self.reduction: object = _MIXED
        self.works: list[BatchedWork] = []
        # Views of other libraries' arrays are made together, when the block has ended.
        self._foreign = False
        self._raw: Sequence[Op] = ()
        self.device: str | None = None
        self.timeout = math.inf

    def add(self, op: Op, device: str, async_op: bool, timeout: Timeout) -> Work | None:
        """Take an operation; ValueError if its device differs from that of earlier operations."""
        if self.device not in (None, device):
            raise self._other_device(device)
        limit = self.group.timeout if timeout is None else seconds(timeout)
        self.timeout = min(self.timeout, limit)
        self.device = device
        self.array_type = self._kind_of(op) if self.timeout <= self.group.timeout else None
        first = not (async_op or len(self))
        # Another `op` is an invalid argument, which the launch reports.
        if first and type(op) is AllReduce and isinstance(op.op, ReduceOp):
            # While others have the same reduction, the batch keeps arrays only.
            self.reduction = self._reduction = op.op
            self.append = self._end_uniform
            self.take(op.x)
            return None
        self.append(op)
        if not async_op:
            return None
        work = BatchedWork(op, len(self) - 1)
        self.works.append(work)
        return work

    def __len__(self) -> int:
        return len(self._ops) + len(self._arrays)

    @property
    def ops(self) -> Sequence[Op]:
        """The operations so far."""
        return self._ops if self._reduction is None else AllReduces(self._arrays, self._reduction)

    def _end_uniform(self, op: Op) -> None:
        """Take an operation that is no all_reduce by the same reduction."""
        self._ops += self.ops
        self.reduction, self._reduction = _MIXED, None
        self._arrays.clear()
        self.append = self._ops.append
        self.append(op)

    def _kind_of(self, op: Op) -> type | None:
        """Return an array type whose arrays always lie on the block's device, or None.

        Arrays of another library on the CPU are one, too: their device is looked at in `_resolve`.
        """
        kind = type(getattr(op, "x", None))
        if self.device != "cpu":
            return kind if kind in single_device_types else None
        if kind is np.ndarray:
            return kind
        self._foreign = True
        return kind if kind in unowned_views else np.ndarray

    def _other_device(self, device: str) -> ValueError:
        message = f"a coalescing block runs on one kind of device: {self.device}, got {device}"
        return ValueError(message)

    def _resolve(self) -> None:
        """Replace other libraries' arrays by NumPy views; for the CPU only."""
        self._raw, self._foreign = self.ops, False
        self._arrays = [self._resolved(x) for x in self._arrays]
        self._ops = [*map(self._on_views, self._ops)]

    def _on_views(self, op: Op) -> Op:
        plain = type(getattr(op, "x", None)) is np.ndarray
        return op if plain else map_arrays(op, self._resolved)

    def _resolved(self, x: Array) -> Array:
        view = numpy_view(x)
        if type(view) is not np.ndarray and device_type(view) != self.device:
            raise self._other_device(device_type(view))
        return view

    def given(self) -> dict[int, Op]:
        """Return the operations on other libraries' arrays, by place; `ops` has them on views."""
        both = enumerate(zip(self._raw, self.ops, strict=True)) if self._raw else ()
        return {
            place: op
            for place, (op, seen) in both
            if any(x is not y for x, y in zip(arrays_of(op), arrays_of(seen), strict=True))
        }

    def launch(self, async_op: bool) -> Work | None:
        """Launch the operations as a single submission; block, or return a Work if `async_op`."""
        if not len(self):
            return None
        try:
            if self._foreign:
                self._resolve()
            ops = self.ops if self._reduction is not None else tuple(self._ops)
            device, has_work = self.device or "cpu", async_op or bool(self.works)
            whole = self.group.launch(ops, device, has_work, self.timeout)
        except BaseException as error:
            self.drop(error)
            raise
        if whole is not None:
            for work in self.works:
                work.bind(whole)
        if whole is None or async_op:
            return whole
        whole.wait()
        return None

    def drop(self, error: BaseException) -> None:
        """Launch nothing; make the pending Works fail with `error`."""
        for work in self.works:
            work._finish(error)


class Plan:
    """A batch that is kept, to be launched again on the same arrays."""

    def __init__(
        self,
        group: Dispatcher,
        ops: Sequence[Op],
        device: str,
        timeout: float,
        given: dict[int, Op],
    ) -> None:
        self.group = group
        self.ops = RepeatedOps(ops)
        self._device = device
        self._timeout = None if timeout == group.timeout else timeout
        self._given = given
        self._arrays = [x for op in given.values() for x in arrays_of(op)]
        views = [x for place in given for x in arrays_of(ops[place])]
        self._addresses = [as_buffer(x).address for x in views]
        finders = {address_finder(x) for x in self._arrays}
        self._find = finders.pop() if len(finders) == 1 else lambda x: address_finder(x)(x)

    def launch(self, async_op: bool = False) -> Work | None:
        """Run the operations again, as a single submission; block, or return a Work."""
        if not self.ops:
            return None
        group = self.group
        if self._given:
            self._follow_memory()
        if group._batches:
            group.refuse_in_batch("launching a plan")
        return group.launch(self.ops, self._device, async_op, self._timeout)

    def _follow_memory(self) -> None:
        """Make new views of other libraries' arrays, if an array has other memory now."""
        try:
            addresses = [*map(self._find, self._arrays)]
        except raised_here(RuntimeError, TypeError):
            addresses = []  # one is no array any more: the launch will say so
        if addresses != self._addresses:
            seen = {place: map_to_numpy(op) for place, op in self._given.items()}
            self.ops = RepeatedOps([seen.get(place, op) for place, op in enumerate(self.ops)])
            self._addresses = addresses


class CoalescingManager:
    """A coalescing block: `with coalescing_manager(group) as cm`."""

    def __init__(self, group: Dispatcher, async_ops: bool) -> None:
        self.works: list[Work] = []
        self._batch = Batch(group)
        self._async_ops = async_ops
        self._ended = False

    def __enter__(self) -> CoalescingManager:
        if self._ended:
            raise ValueError("a coalescing block can be entered once; keep it with plan()")
        self._batch.group.open_batch(self._batch)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._batch.group.close_batch()
        self._batch.append = self._batch.take  # no method of the batch: that would be a cycle
        self._ended = True
        if error is not None:
            self._batch.drop(RuntimeError("the coalescing block raised: nothing was launched"))
            return
        work = self._batch.launch(self._async_ops)
        if work is not None:
            self.works.append(work)

    def wait(self, timeout: Timeout = None) -> None:
        """Block until the batch has ended; raise its failure. ValueError inside the block.

        Of device arrays the current stream waits, and the host does not.
        """
        self._need_end("wait()")
        for work in self.works:
            work.wait(timeout)

    def plan(self) -> Plan:
        """Return the block's operations, to be launched again. ValueError inside the block."""
        self._need_end("plan()")
        batch = self._batch
        return Plan(batch.group, batch.ops, batch.device or "cpu", batch.timeout, batch.given())

    def _need_end(self, what: str) -> None:
        if not self._ended:
            raise ValueError(f"{what} of a coalescing block comes after the block")
