"""Comm hooks: functions that reduce the buckets of a Reducer, as torch's DDP comm hooks do.

This module exports the interface and the built-in hooks. `powersgd`, `quantization` and `local_sgd`
have further hooks. `deferred_future` has the Futures that hooks on a device return.
"""

from nc10d.reducer.hooks.builtin import (
    allreduce_hook,
    bf16_compress_hook,
    bf16_compress_wrapper,
    fp16_compress_hook,
    fp16_compress_wrapper,
    noop_hook,
)
from nc10d.reducer.hooks.grad_bucket import (
    Allocate,
    CommHook,
    GradBucket,
    Step,
    reduced_array,
    require_work,
)

__all__ = [
    "Allocate",
    "CommHook",
    "GradBucket",
    "Step",
    "allreduce_hook",
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
    "noop_hook",
    "reduced_array",
    "require_work",
]
