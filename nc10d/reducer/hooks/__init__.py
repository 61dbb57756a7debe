"""Comm hooks: functions that reduce a Reducer's buckets, as torch's DDP comm hooks do.

This module exports the interface and the built-in hooks. `powersgd`, `quantization` and `local_sgd`
have further hooks. `deferred_future` has the Futures that hooks on a device return.
"""

from nc10d.reducer.hooks.builtin import allreduce_hook as allreduce_hook
from nc10d.reducer.hooks.builtin import bf16_compress_hook as bf16_compress_hook
from nc10d.reducer.hooks.builtin import bf16_compress_wrapper as bf16_compress_wrapper
from nc10d.reducer.hooks.builtin import fp16_compress_hook as fp16_compress_hook
from nc10d.reducer.hooks.builtin import fp16_compress_wrapper as fp16_compress_wrapper
from nc10d.reducer.hooks.builtin import noop_hook as noop_hook
from nc10d.reducer.hooks.grad_bucket import Allocate as Allocate
from nc10d.reducer.hooks.grad_bucket import CommHook as CommHook
from nc10d.reducer.hooks.grad_bucket import GradBucket as GradBucket
from nc10d.reducer.hooks.grad_bucket import Step as Step
from nc10d.reducer.hooks.grad_bucket import reduced_array as reduced_array
from nc10d.reducer.hooks.grad_bucket import require_work as require_work
