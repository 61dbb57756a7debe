"""Built-in comm hooks: the mean, no communication, and the mean in 16-bit floats.

Contract: as every hook (see `grad_bucket`); the state is the group. `allreduce_hook` and
`noop_hook` accept sparse gradients. Hooks that compress reject them with a TypeError.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nc10d.arrays.dtypes import DType
from nc10d.group.process_group import ProcessGroup
from nc10d.ops import SUM, Array
from nc10d.reducer.hooks.grad_bucket import CommHook, GradBucket, require_work, single_array
from nc10d.work import Future, Work


def allreduce_hook(group: ProcessGroup, bucket: GradBucket) -> Work | Future[Any]:
    """Average the bucket over the ranks; see `GradBucket.average`."""
    return bucket.average(group)


def noop_hook(_state: object, bucket: GradBucket) -> Future[Array]:
    """Leave the bucket unchanged: a baseline for measuring communication cost."""
    done: Future[Array] = Future()
    done.set_result(bucket.buffer())
    return done


def fp16_compress_hook(group: ProcessGroup, bucket: GradBucket) -> Future[Array]:
    """Average the bucket as float16: half the bytes of float32, with float16's range."""
    # Gradients are divided by the number of ranks before they are rounded. The sum is then no
    # larger than the largest gradient.
    return _compressed(group, bucket, DType.FLOAT16)


def bf16_compress_hook(group: ProcessGroup, bucket: GradBucket) -> Future[Array]:
    """Average the bucket as bfloat16: half the bytes of float32, its range, 8 bits of precision."""
    return _compressed(group, bucket, DType.BFLOAT16)


def fp16_compress_wrapper(hook: CommHook) -> CommHook:
    """Return a hook that calls `hook` with float16 buckets and casts its result back."""
    return _wrapped(hook, DType.FLOAT16)


def bf16_compress_wrapper(hook: CommHook) -> CommHook:
    """Return a hook that calls `hook` with bfloat16 buckets and casts its result back."""
    return _wrapped(hook, DType.BFLOAT16)


def _compressed(group: ProcessGroup, bucket: GradBucket, dtype: DType) -> Future[Array]:
    small = bucket.narrowed(dtype, group)
    work = require_work(group.all_reduce(small, bucket.reduction(SUM), async_op=True))
    return bucket.following(work, lambda value: bucket.widened(single_array(value(), small)))


def _wrapped(hook: CommHook, dtype: DType) -> CommHook:
    def compressing(state: object, bucket: GradBucket) -> Future[Array]:
        whole, small = bucket.flat(), bucket.narrowed(dtype)
        bucket.set_buffer(small)

        def restore(value: Callable[[], object]) -> Array:
            try:
                reduced = single_array(value(), small)
            finally:
                bucket.set_buffer(whole)
            return bucket.widened(reduced)

        return bucket.following(hook(state, bucket), restore)

    return compressing


class AveragingHook:
    """The default hook: averages a bucket over `size` ranks, or over the ranks that have a batch.

    With uneven batches, a rank without a batch takes part with zeros. A small all_reduce beside the
    forward pass counts the other ranks.
    """

    def __init__(self, size: int) -> None:
        self._size = int(size)
        self._counting: Work | None = None
        self._count = self._size
        self.divisor = self._size
        """The divisor if it is known without waiting, else 0."""

    def count_by(self, work: Work, use_static_world_size: bool) -> None:
        """Divide the next pass by the result of `work`, or by all ranks if the flag is set."""
        # The result is an array with a single element: the number of ranks that have a batch.
        self._counting, self.divisor = work, 0
        self._count = self._size if use_static_world_size else 0

    def count(self) -> int:
        """Return the divisor; blocks until ranks are counted, and raises the count's error."""
        if self._counting is not None:
            (counted,) = self._counting.result()
            self._count = self._count or int(counted.reshape(-1)[0])
            self._counting = None
        if not 1 <= self._count <= self._size:
            raise ValueError(f"{self._count} of {self._size} ranks have a batch: none is left")
        return self._count

    def reset(self) -> None:
        """Divide by all ranks again: a count is valid for a single pass."""
        self._counting, self._count, self.divisor = None, self._size, self._size

    def __call__(self, group: ProcessGroup, bucket: GradBucket) -> Work | Future[Any]:
        """Launch the averaging of a bucket over the group."""
        return bucket.average(group, self.divisor or self.count())
