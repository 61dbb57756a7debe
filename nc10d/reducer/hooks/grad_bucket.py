"""The interface between the Reducer and a comm hook: GradBucket, and a hook's result.

Contract: the Reducer calls `hook(state, bucket)` for each bucket in plan order, while the backward
pass goes on. The hook launches communication and returns at once a Work or a Future, which ends
when the bucket is reduced. Its value is the reduced array, as long as the bucket's buffer, or a
list that contains only this array. A Work without a value stands for the buffer itself. A hook
launches the same operations on every rank.

A sparse gradient has its own bucket: the buffer and the value are SparseGradients. On a device all
work is queued in the current stream's order. A hook whose callbacks queue work orders that work
itself, or calls `GradBucket.following`.

Names and signatures are those of torch's DDP comm hooks, so that hooks can be ported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from nc10d.arrays.buffer import as_buffer
from nc10d.arrays.dtypes import DType
from nc10d.group.process_group import ProcessGroup
from nc10d.ops import Array, ReduceOp
from nc10d.reducer.hooks.deferred_future import awaited
from nc10d.reducer.packing import Divider, cast
from nc10d.reducer.plan import Slot
from nc10d.work import Future, Work

CommHook: TypeAlias = "Callable[[Any, GradBucket], Work | Future[Any]]"
Step: TypeAlias = Callable[[Callable[[], Any]], Any]
"""Continues an operation: receives a function that returns the value or raises the error."""
Allocate: TypeAlias = Callable[[int, "np.dtype[Any]"], Array]
"""Makes a flat array of zeros from a count and a dtype: np.zeros, nc10d.zeros, a framework's."""


class GradBucket:
    """A bucket as a hook sees it; all attributes are methods, as in c10d.

    `narrowed`, `widened` and `following` are for hooks that send another dtype than the buffer's.
    """

    __slots__ = (
        *("_allocate", "_buffer", "_divider", "_index", "_last", "_narrow", "_ordered"),
        *("_parameters", "_reductions", "_slots", "divided", "in_place", "memory", "purpose"),
    )

    def __init__(
        self,
        index: int,
        buffer: Array,
        slots: Sequence[Slot],
        parameters: Sequence[Array],
        is_last: bool,
        purpose: str = "",
        allocate: Allocate = np.zeros,
        ordered: bool = False,
    ) -> None:
        self._index = index
        self._allocate = allocate
        self._narrow: dict[DType, Array] = {}
        self.purpose = purpose
        """The bucket's name, which ranks compare and errors show."""
        self._ordered = ordered
        self._reductions: dict[ReduceOp, ReduceOp] = {}
        self._buffer = buffer
        self.memory = buffer
        """The buffer between passes; a hook may replace it for a pass."""
        self._divider: Divider | None = None
        self.in_place: tuple[Work, Array] | None = None
        """The latest Work of `all_reduce`, and the array that it reduces."""
        self._slots = slots
        self._parameters = parameters
        self._last = is_last
        self.divided: set[int] = set()
        """The parameters whose gradients `average` need not divide any more."""

    def index(self) -> int:
        """Return the bucket's position in launch order, from 0."""
        return self._index

    def buffer(self) -> Array:
        """Return the flat array of all gradients in the bucket."""
        return self._buffer

    def flat(self) -> Array:
        """Return the buffer, for hooks that handle dense arrays only; TypeError if it is sparse."""
        return self.buffer()

    def on_host(self) -> Array:
        """Return the buffer as an ndarray; TypeError if it is sparse or on a device."""
        return as_buffer(self.flat()).as_numpy()

    def set_buffer(self, buffer: Array) -> None:
        """Replace the buffer by another flat array with the same length."""
        if buffer.shape != self._buffer.shape:
            wanted, got = self._buffer.shape, buffer.shape
            raise ValueError(f"the bucket's buffer has shape {wanted}, the new one has {got}")
        self._buffer = buffer

    def gradients(self) -> list[Array]:
        """Return the gradients, as views of the buffer with the parameters' shapes."""
        whole = self.buffer()
        return [
            whole[slot.offset : slot.offset + slot.count].reshape(slot.shape)
            for slot in self._slots
        ]

    def parameters(self) -> list[Array]:
        """Return the parameters, in the order of their gradients in the buffer."""
        return list(self._parameters)

    def is_last(self) -> bool:
        """Return whether this bucket is launched last."""
        return self._last

    def reduction(self, op: ReduceOp) -> ReduceOp:
        """Return `op` with the bucket's name, so that ranks notice if their buckets differ.

        In an `ordered` bucket ranks fold in rank order on every backend.
        """
        named = self._reductions.get(op)
        if named is None:
            wanted = op.ordered if self._ordered else op
            named = self._reductions[op] = wanted.meant_for(self.purpose)
        return named

    def reset(self) -> None:
        """Make the whole bucket the buffer again, after a pass."""
        self._buffer, self.in_place = self.memory, None

    def all_reduce(self, group: ProcessGroup, op: ReduceOp) -> Work | Future[Any]:
        """Launch the reduction of the buffer over a group: in place, or to a new SparseGradient."""
        buffer = self.buffer()
        work = require_work(group.all_reduce(buffer, self.reduction(op), async_op=True))
        self.in_place = work, buffer
        return work

    def average(self, group: ProcessGroup, count: int | None = None) -> Work | Future[Any]:
        """Launch the mean over a group: divide the buffer in place, then add up in rank order.

        So the mean does not overflow. `count` is the divisor, by default the group's size.
        """
        return self.all_reduce(group, self._divide(int(count or group.size), group.size))

    def _divide(self, count: int, size: int) -> ReduceOp:
        """Divide the buffer by `count`; return the reduction over `size` ranks for the mean."""
        divider = self._divider
        if divider is None or divider.x is not self._buffer:
            divider = Divider(self._buffer, self._slots)
            if self._buffer is self.memory:  # a hook's own array may be resized later
                self._divider = divider
        return divider.reduction(count, size, self.divided)

    def narrowed(self, dtype: DType, over: ProcessGroup | None = None) -> Array:
        """Return the gradients, divided by the size of group `over`, in another dtype."""
        # The buffer's contents are lost. The bucket owns the returned array and returns the same
        # array in each pass, so a hook uses it once at a time.
        narrow = self._narrow_like(self.flat(), dtype)
        cast(self._buffer, narrow, averaging_factor(over))
        return narrow

    def _narrow_like(self, whole: Array, dtype: DType) -> Array:
        """Return memory as long as the buffer, of another dtype."""
        if dtype not in self._narrow:
            self._narrow[dtype] = self._allocate(len(whole), dtype.numpy)
        return self._narrow[dtype]

    def widened(self, narrow: Array) -> Array:
        """Cast `narrow` back into the buffer, and return the buffer."""
        cast(narrow, self._buffer)
        return self._buffer

    def following(self, outcome: Work | Future[Any], step: Step) -> Future[Any]:
        """Return the Future of `step(value)`; `value()` returns the outcome's value or raises.

        On the CPU the step runs as soon as the outcome ends. On a device the waiting thread runs
        it, in stream order. A hook therefore returns this Future, waits for it, or chains `then` or
        `collect_all` to it. Uses that would block forever raise a RuntimeError: Work.from_future,
        await, and returning the Future from another Future's callback.
        """
        future = outcome.get_future() if isinstance(outcome, Work) else outcome
        return future.then(lambda done: step(done.value))

    def check(self, value: object) -> None:
        """Raise a TypeError or ValueError if `value` is no valid result of a hook."""
        wanted = self._buffer.shape
        if not hasattr(value, "shape"):
            raise TypeError(
                f"a comm hook must end with an array or a list of one, not {value!r:.80}"
            )
        if value.shape != wanted:
            raise ValueError(
                f"a comm hook must keep the shape {wanted}, it ended with {value.shape}"
            )


class PassCounter:
    """Counts passes for a hook that changes its behaviour at pass number `start`."""

    def __init__(self, start: int) -> None:
        self.start = start
        self.count = 0

    def reached(self, bucket: GradBucket) -> bool:
        """Return whether this pass is number `start` or later; call once per bucket."""
        reached = self.count >= self.start
        self.count += bucket.is_last()
        return reached


def averaging_factor(over: ProcessGroup | None) -> float:
    """Return the factor that turns a sum over a group into a mean; 1 without a group."""
    return 1.0 if over is None else 1 / over.size


def call_hook(hook: CommHook, state: object, bucket: GradBucket) -> Work | Future[Any]:
    """Call a hook and return its result; TypeError if it is neither a Work nor a Future."""
    outcome = hook(state, bucket)
    if not isinstance(outcome, (Work, Future)):
        raise TypeError(f"a comm hook must return a Work or a Future, got {outcome!r:.80}")
    return outcome


def reduced_array(outcome: Work | Future[Any], bucket: GradBucket) -> Array:
    """Wait for a hook's result; return the reduced array or SparseGradient.

    Raises the hook's error; TypeError or ValueError if the value does not match the buffer.
    """
    launched = bucket.in_place
    if launched is not None and outcome is launched[0]:
        launched[0].wait()
        if launched[0]._result is None:
            return launched[1]
    value = single_array(awaited(outcome), bucket.buffer())
    bucket.check(value)
    return value


def single_array(value: object, default: Array) -> Array:
    """Return the array in a hook's value (an array or a list of it); `default` without a value."""
    if isinstance(value, (list, tuple)):
        value = value[0] if len(value) == 1 else value or None  # an empty list is no value
    return default if value is None else value


def require_work(work: Work | None) -> Work:
    """Return the Work of an asynchronous call; ValueError inside an open coalescing block."""
    if work is None:
        raise ValueError("a comm hook's group has an open coalescing block: close it first")
    return work
