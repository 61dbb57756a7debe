"""Built-in comm hooks: the mean, no communication, and the mean in 16-bit floats.

Contract: as every hook (see `grad_bucket`); the state is the group. `allreduce_hook` and
`noop_hook` accept sparse gradients. Hooks that compress reject them with a TypeError.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nc10d.arrays.dtypes import DType
from nc10d.ops import AVG, SUM, Array
from nc10d.reducer.hooks.grad_bucket import CommHook, GradBucket, require_work, single_array
from nc10d.work import Future, Work

if TYPE_CHECKING:
    from nc10d.group.process_group import ProcessGroup


def allreduce_hook(group: ProcessGroup, bucket: GradBucket) -> Work | Future[Any]:
    """Average the bucket over the ranks."""
    return bucket.all_reduce(group, AVG)


def noop_hook(_state: object, bucket: GradBucket) -> Future[Array]:
    """Leave the bucket unchanged: a baseline for measuring the cost of communication."""
    done: Future[Array] = Future()
    done.set_result(bucket.buffer())
    return done


def fp16_compress_hook(group: ProcessGroup, bucket: GradBucket) -> Future[Array]:
    """Average the bucket as float16: half the bytes of float32, with float16's range.

    Gradients are divided by the number of ranks before they are rounded. The sum is then no larger
    than the largest gradient.
    """
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
    def compressing(state: Any, bucket: GradBucket) -> Future[Array]:
        whole, small = bucket.flat(), bucket.narrowed(dtype)
        bucket.set_buffer(small)

        def restore(value: Callable[[], Any]) -> Array:
            try:
                reduced = single_array(value(), small)
            finally:
                bucket.set_buffer(whole)
            return bucket.widened(reduced)

        return bucket.following(hook(state, bucket), restore)

    return compressing
