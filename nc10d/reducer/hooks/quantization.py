"""Comm hooks that send gradients in 8 bits, with a scale per bucket or per channel.

Contract: as every hook. Each rank sends a message of uint8: for each channel a scale (float32) and
a zero point (a whole number as float32), then a code for each element. Every rank decodes the
messages of all ranks in rank order, so the means are bitwise the same on all ranks. The error is
that of 255 steps between a channel's smallest and largest gradient. A NaN or an infinity makes its
whole channel useless.

The scheme is affine quantisation to 8 bits: Jacob et al., "Quantization and Training of
Neural Networks for Efficient Integer-Arithmetic-Only Inference" (2018), section 2.1.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nc10d.group.process_group import ProcessGroup
from nc10d.ops import Array
from nc10d.reducer.hooks.grad_bucket import GradBucket, require_work
from nc10d.work import Future

CHANNEL = 512
"""The default number of elements of a channel (c10d's)."""
_STEPS = 255
_HEAD = 8
"""Bytes of a channel's scale and zero point."""
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def quantization_pertensor_hook(group: ProcessGroup, bucket: GradBucket) -> Future[Array]:
    """Average the bucket in 8 bits with a single scale: a quarter of float32's bytes."""
    return _exchanged(group, bucket, max(1, bucket.on_host().size))


def quantization_perchannel_hook(
    group: ProcessGroup, bucket: GradBucket, bucket_size: int = CHANNEL
) -> Future[Array]:
    """Average the bucket in 8 bits, with a scale for each `bucket_size` elements."""
    return _exchanged(group, bucket, bucket_size)


def encode(values: Array, width: int) -> Bytes:
    """Return the message for a flat array, in channels of `width` elements (the last is padded)."""
    channels = -(-values.size // width)
    rows = np.zeros((channels, width), np.float32)
    rows.reshape(-1)[: values.size] = values
    low, high = np.minimum(rows.min(1), 0), np.maximum(rows.max(1), 0)
    scale = ((high - low) / np.float32(_STEPS)).astype(np.float32)
    scale[scale == 0] = 1
    zero = np.clip(np.rint(-low / scale), 0, _STEPS).astype(np.float32)
    codes = np.clip(np.rint(rows / scale[:, None]) + zero[:, None], 0, _STEPS).astype(np.uint8)
    head = np.stack([scale, zero], 1).view(np.uint8)
    return np.concatenate([head.reshape(-1), codes.reshape(-1)[: values.size]])


def decode(message: Bytes, count: int, width: int) -> Array:
    """Return the `count` float32 values of a message."""
    channels = -(-count // width)
    scale, zero = message[: _HEAD * channels].view(np.float32).reshape(-1, 2).T
    codes = message[_HEAD * channels :].astype(np.float32)
    of = np.arange(count) // width
    return np.asarray((codes - zero[of]) * scale[of])


def _exchanged(group: ProcessGroup, bucket: GradBucket, width: int) -> Future[Array]:
    whole = bucket.on_host()
    own = encode(whole.astype(np.float32) / np.float32(group.size), width)
    messages = np.zeros((group.size, own.size), np.uint8)
    work = require_work(group.all_gather_into_tensor(messages, own, async_op=True))

    def average(done: Future[Any]) -> Array:
        done.value()
        total = np.zeros(whole.size, np.float32)
        for message in messages:
            total += decode(message, whole.size, width)
        whole[...] = total.astype(whole.dtype)
        return bucket.buffer()

    return work.get_future().then(average)
