"""The comm hooks in torch.distributed.algorithms.ddp_comm_hooks, by the same names.

    register_ddp_comm_hook(DDPCommHookType.FP16_COMPRESS, model)
    model.register_comm_hook(PowerSGDState(group), powerSGD_hook)

Contract: hooks of the bucket's mean accept a group as state, or None for the module's. PowerSGD and
quantisation compute where the bucket is: by NumPy on the CPU, by torch on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, member
from functools import partial
from typing import Any

from torch.nn import Module

from nc10d.reducer.hooks import allreduce_hook as allreduce_hook
from nc10d.reducer.hooks import bf16_compress_hook as bf16_compress_hook
from nc10d.reducer.hooks import bf16_compress_wrapper as bf16_compress_wrapper
from nc10d.reducer.hooks import fp16_compress_hook as fp16_compress_hook
from nc10d.reducer.hooks import fp16_compress_wrapper as fp16_compress_wrapper
from nc10d.reducer.hooks import noop_hook as noop_hook
from nc10d.reducer.hooks.local_sgd import PostLocalSGDState as PostLocalSGDState
from nc10d.reducer.hooks.local_sgd import post_localSGD_hook as post_localSGD_hook
from nc10d.reducer.hooks.powersgd import PowerSGDState as PowerSGDState
from nc10d.reducer.hooks.powersgd import batched_powerSGD_hook as batched_powerSGD_hook
from nc10d.reducer.hooks.powersgd import powerSGD_hook as powerSGD_hook
from nc10d.reducer.hooks.quantization import (
    quantization_perchannel_hook as quantization_perchannel_hook,
)
from nc10d.reducer.hooks.quantization import (
    quantization_pertensor_hook as quantization_pertensor_hook,
)
from nc10d.torch.training.optimizer_hooks import OptimizerHookState as OptimizerHookState
from nc10d.torch.training.optimizer_hooks import hook_then_optimizer as hook_then_optimizer

Hook = Callable[[Any, Any], object]


def _simple(hook: Hook, model: Module, state: object) -> None:
    model.register_comm_hook(state, hook)


def _power(
    hook: Hook,
    matrix_approximation_rank: int,
    model: Module,
    state: Any,
    start_powerSGD_iter: int = 1000,
) -> None:
    group = model.process_group if state is None else state
    made = PowerSGDState(group, matrix_approximation_rank, start_powerSGD_iter)
    model.register_comm_hook(made, hook)


class DDPCommHookType(Enum):
    """The hooks by name; a value is a function of `model` and `state` that registers the hook."""

    ALLREDUCE = member(partial(_simple, allreduce_hook))
    FP16_COMPRESS = member(partial(_simple, fp16_compress_hook))
    BF16_COMPRESS = member(partial(_simple, bf16_compress_hook))
    QUANTIZE_PER_TENSOR = member(partial(_simple, quantization_pertensor_hook))
    QUANTIZE_PER_CHANNEL = member(partial(_simple, quantization_perchannel_hook))
    POWER_SGD = member(partial(_power, powerSGD_hook, 1))
    POWER_SGD_RANK2 = member(partial(_power, powerSGD_hook, 2))
    BATCHED_POWER_SGD = member(partial(_power, batched_powerSGD_hook, 1))
    BATCHED_POWER_SGD_RANK2 = member(partial(_power, batched_powerSGD_hook, 2))
    NOOP = member(partial(_simple, noop_hook))


def register_ddp_comm_hook(
    comm_hook_type: DDPCommHookType, model: Module, state: object = None
) -> None:
    """Let the hook with this name reduce the buckets of `model`; `state` is a group, or None.

    The PowerSGD kinds make a PowerSGDState of that group.
    """
    comm_hook_type.value(model=model, state=state)
