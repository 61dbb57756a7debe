"""Comm hooks: what becomes of a bucket when it leaves.

Contract: a hook is called as hook(state, bucket), bucket by bucket in plan order, while the
backward pass goes on. It starts communication and returns at once, with a Work or a Future that
ends when the bucket is reduced. The value is the reduced array (or a list with it alone), as long
as the bucket's buffer; a Work without a value means the buffer itself. Every rank must issue the
same operations. For the hooks here the state is the group.

A sparse gradient is a bucket of its own, whose buffer is a SparseGradient, and so is the value.
`allreduce_hook` and `noop_hook` take both kinds; hooks that compress refuse it with a TypeError.
On a device all is queued on the current stream, in its order: what a hook's callbacks queue must
be ordered by the hook, or by `GradBucket.following`.

Names and signatures are c10d's, so that hooks can be carried over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from nc10d.arrays.buffer import as_buffer
from nc10d.arrays.dtypes import DType
from nc10d.ops import AVG, SUM, Array, ReduceOp
from nc10d.reducer.deferred_future import awaited
from nc10d.reducer.packing import cast
from nc10d.reducer.plan import Slot
from nc10d.work import Future, Work

if TYPE_CHECKING:
    from nc10d.group.process_group import ProcessGroup

CommHook: TypeAlias = "Callable[[Any, GradBucket], Work | Future[Any]]"
Step: TypeAlias = Callable[[Callable[[], Any]], Any]
"""What follows: gets what returns a value, or raises what failed, and returns another value."""
Allocate: TypeAlias = Callable[[int, "np.dtype[Any]"], Array]
"""Makes a flat array of zeros from a count and a dtype: np.zeros, nc10d.zeros, a framework's."""


class GradBucket:
    """What a hook sees of a bucket; answers are methods, as in c10d.

    `narrowed`, `widened` and `following` are for hooks that send other bits than the buffer's.
    """

    __slots__ = (
        *("_allocate", "_buffer", "_index", "_last", "_narrow"),
        *("_parameters", "_purpose", "_slots"),
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
    ) -> None:
        self._index = index
        self._allocate = allocate
        self._narrow: dict[DType, Array] = {}
        self._purpose = purpose
        self._buffer = buffer
        self._slots = slots
        self._parameters = parameters
        self._last = is_last

    def index(self) -> int:
        """Return the bucket's place in the order of leaving, from 0."""
        return self._index

    def buffer(self) -> Array:
        """Return the flat array of all gradients of the bucket."""
        return self._buffer

    def flat(self) -> Array:
        """Return the buffer, for hooks that know arrays alone; TypeError if it is sparse."""
        return self.buffer()

    def on_host(self) -> Array:
        """Return the buffer, for hooks that compute in NumPy; TypeError if it is not so flat."""
        return as_buffer(self.flat()).as_numpy()

    def set_buffer(self, buffer: Array) -> None:
        """Put another flat array, of the same length, in the place of the buffer."""
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
        """Say whether this is the last bucket to leave."""
        return self._last

    def reduction(self, op: ReduceOp) -> ReduceOp:
        """Return `op` with the bucket's name, so that ranks notice if their buckets differ."""
        return op.meant_for(self._purpose)

    def all_reduce(self, group: ProcessGroup, op: ReduceOp) -> Work | Future[Any]:
        """Start to reduce the buffer over a group: in place, or to a new SparseGradient."""
        return started(group.all_reduce(self.buffer(), self.reduction(op), async_op=True))

    def narrowed(self, dtype: DType, over: ProcessGroup | None = None) -> Array:
        """Return the gradients, divided by the ranks of `over`, in another dtype.

        What the buffer holds is lost. The array is the bucket's own and the same in each pass, for
        one use at a time.
        """
        narrow = self._narrow_like(self.flat(), dtype)
        cast(self._buffer, narrow, share(over))
        return narrow

    def _narrow_like(self, whole: Array, dtype: DType) -> Array:
        """Return memory as long as the buffer, of another dtype."""
        if dtype not in self._narrow:
            self._narrow[dtype] = self._allocate(len(whole), dtype.numpy)
        return self._narrow[dtype]

    def widened(self, narrow: Array) -> Array:
        """Write what `narrow` has become to the buffer, in its dtype, and return the buffer."""
        cast(narrow, self._buffer)
        return self._buffer

    def following(self, outcome: Work | Future[Any], step: Step) -> Future[Any]:
        """Return the Future of `step(value)`, where `value()` is what a Work or a Future ends with.

        The step is taken as soon as that is over; on a device by who waits, in the stream's order.
        So return it, wait for it, or go on with its `then` or with `collect_all`: there, what else
        would wait for ever (Work.from_future, await, a callback of another Future that returns it)
        is a RuntimeError.
        """
        future = outcome.get_future() if isinstance(outcome, Work) else outcome
        return future.then(lambda done: step(done.value))

    def check(self, value: Any) -> None:
        """Raise the TypeError or ValueError that says why a hook can't end with this."""
        wanted = self._buffer.shape
        if not hasattr(value, "shape"):
            raise TypeError(
                f"a comm hook must end with an array or a list of one, not {value!r:.80}"
            )
        if value.shape != wanted:
            raise ValueError(
                f"a comm hook must keep the shape {wanted}, it ended with {value.shape}"
            )


class PassHook:
    """Counts the passes that a hook has seen, bucket by bucket."""

    def __init__(self, start: int) -> None:
        self.start = start
        self.count = 0

    def begun(self, bucket: GradBucket) -> bool:
        """Say whether the pass of this bucket, not seen before, is the `start`th or later."""
        begun = self.count >= self.start
        self.count += bucket.is_last()
        return begun


def share(over: ProcessGroup | None) -> float:
    """Return what sums are multiplied by to be means over a group; 1 without one."""
    return 1.0 if over is None else 1 / over.size


def called(hook: CommHook, state: Any, bucket: GradBucket) -> Work | Future[Any]:
    """Call a hook; TypeError if it returns neither a Work nor a Future."""
    outcome = hook(state, bucket)
    if not isinstance(outcome, (Work, Future)):
        raise TypeError(f"a comm hook must return a Work or a Future, got {outcome!r:.80}")
    return outcome


def reduced_array(outcome: Work | Future[Any], bucket: GradBucket) -> Any:
    """Wait for what a hook has returned; return the array or SparseGradient that it reduced.

    Raises what made it fail; TypeError or ValueError if the value is not like the buffer.
    """
    found = _only(awaited(outcome), bucket.buffer())
    bucket.check(found)
    return found


def allreduce_hook(group: ProcessGroup, bucket: GradBucket) -> Work | Future[Any]:
    """Average the bucket over the ranks."""
    return bucket.all_reduce(group, AVG)


def noop_hook(_state: object, bucket: GradBucket) -> Future[Array]:
    """Leave the bucket as it is: for measuring what communication costs."""
    done: Future[Array] = Future()
    done.set_result(bucket.buffer())
    return done


def fp16_compress_hook(group: ProcessGroup, bucket: GradBucket) -> Future[Array]:
    """Average the bucket as float16: half the bytes of float32, and its range.

    Gradients are divided by the number of ranks before they are rounded, so that the sum is not
    larger than the largest of them.
    """
    return _compressed(group, bucket, DType.FLOAT16)


def bf16_compress_hook(group: ProcessGroup, bucket: GradBucket) -> Future[Array]:
    """Average the bucket as bfloat16: half the bytes of float32, its range, 8 bits of precision."""
    return _compressed(group, bucket, DType.BFLOAT16)


def fp16_compress_wrapper(hook: CommHook) -> CommHook:
    """Return `hook` as one that sees float16 buckets; its result is widened again."""
    return _wrapped(hook, DType.FLOAT16)


def bf16_compress_wrapper(hook: CommHook) -> CommHook:
    """Return `hook` as one that sees bfloat16 buckets; its result is widened again."""
    return _wrapped(hook, DType.BFLOAT16)


def _compressed(group: ProcessGroup, bucket: GradBucket, dtype: DType) -> Future[Array]:
    small = bucket.narrowed(dtype, group)
    work = started(group.all_reduce(small, bucket.reduction(SUM), async_op=True))
    return bucket.following(work, lambda value: bucket.widened(_only(value(), small)))


def _wrapped(hook: CommHook, dtype: DType) -> CommHook:
    def compressing(state: Any, bucket: GradBucket) -> Future[Array]:
        whole, small = bucket.flat(), bucket.narrowed(dtype)
        bucket.set_buffer(small)

        def restore(value: Callable[[], Any]) -> Array:
            try:
                found = _only(value(), small)
            finally:
                bucket.set_buffer(whole)
            return bucket.widened(found)

        return bucket.following(hook(state, bucket), restore)

    return compressing


def _only(value: Any, without: Array) -> Any:
    """Return the array that a hook's value is, or is a list of; `without` if there is no value."""
    if isinstance(value, (list, tuple)):
        value = value[0] if len(value) == 1 else value or None  # an empty list is no value
    return without if value is None else value


def started(work: Work | None) -> Work:
    """Return the Work of an asynchronous call; ValueError if an open block has taken it."""
    if work is None:
        raise ValueError("a comm hook's group has an open coalescing block: close it first")
    return work
