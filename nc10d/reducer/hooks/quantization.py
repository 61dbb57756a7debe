"""Comm hooks that send gradients in 8 bits, with a scale per bucket or per channel.

Contract: as every hook. Each rank sends a message of uint8: for each channel a scale (float32) and
a zero point (a whole number as float32), then a code for each element. Every rank decodes the
messages from all ranks in rank order, so the means are bitwise the same on all ranks. The error
comes from 255 steps between a channel's smallest and largest gradient. A NaN or an infinity makes
its whole channel useless.

The scheme is affine quantisation to 8 bits: Jacob et al., "Quantization and Training of
Neural Networks for Efficient Integer-Arithmetic-Only Inference" (2018), section 2.1.
"""

from __future__ import annotations

from collections.abc import Callable

from nc10d.group.process_group import ProcessGroup
from nc10d.ops import Array
from nc10d.reducer.hooks.array_math import math_of
from nc10d.reducer.hooks.grad_bucket import GradBucket, require_work
from nc10d.work import Future

CHANNEL = 512
"""The default number of elements in a channel (c10d's)."""


def quantization_pertensor_hook(group: ProcessGroup, bucket: GradBucket) -> Future[Array]:
    """Average the bucket in 8 bits with a single scale: a quarter of float32's bytes."""
    return _exchanged(group, bucket, max(1, len(bucket.flat())))


def quantization_perchannel_hook(
    group: ProcessGroup, bucket: GradBucket, bucket_size: int = CHANNEL
) -> Future[Array]:
    """Average the bucket in 8 bits, with a scale for each `bucket_size` elements."""
    return _exchanged(group, bucket, bucket_size)


def _exchanged(group: ProcessGroup, bucket: GradBucket, width: int) -> Future[Array]:
    math = math_of(bucket)
    whole = math.array(bucket.flat())
    count, scaled = len(whole), math.copy(whole, math.wide([]))
    scaled /= int(group.size)
    own = math.encode(scaled, width)
    messages = math.messages(group.size, len(own))
    gathering = math.group_of(group).all_gather_into_tensor(messages, own, async_op=True)
    work = require_work(gathering)

    def average(value: Callable[[], object]) -> Array:
        value()
        total = math.zeros(count, math.wide([]))
        for message in messages:
            total += math.decode(message, count, width)
        whole[...] = math.copy(total, whole.dtype)
        return math.result(bucket)

    return bucket.following(work, average)
