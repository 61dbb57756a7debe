"""Use torch's tensors in every call of nc10d, and train with them.

    import nc10d.torch

registers `torch.Tensor` and `torch.nn.Parameter` as array types: calls use their memory without a
copy. `DistributedDataParallel` has torch's interface, and reduces with nc10d's Reducer.
`DistributedSampler` and `SyncBatchNorm` are torch's on nc10d groups; `save` and `load` keep a job's
state. `nc10d.torch.training` has comm hooks and parameter averagers. A function that torch.compile
compiles may make all calls. Calls in `nc10d.torch.functional` become part of the graph; the
others stay uncompiled. `as_store` makes an nc10d store into one for torch, and nc10d's groups
take torch's stores.

The import also registers torch.distributed's backend "nc10d". `replace_gloo` puts nc10d in gloo's
place, for programs that name gloo. `init_process_group` makes the default group for both,
`group_of` gives the nc10d group below a torch group, and `as_torch_group` a torch group on an nc10d
group.
"""

from typing import Any

import torch

from nc10d.api import join
from nc10d.base import torch_registration
from nc10d.base.run_to_end import import_to_end
from nc10d.reducer.hooks import array_math
from nc10d.torch import compiling, stores, tensors, torch_calls
from nc10d.torch.backend import torch_errors
from nc10d.torch.backend.creation import create, create_as_gloo, replace_gloo
from nc10d.torch.backend.groups import calls_of, group_of
from nc10d.torch.backend.side_by_side import as_torch_group, init_process_group
from nc10d.torch.ddp import DistributedDataParallel
from nc10d.torch.in_backward import apply_optimizer_in_backward
from nc10d.torch.mixed_precision import MixedPrecision
from nc10d.torch.optim.functional_steps import as_functional_optim
from nc10d.torch.optim.overlap import hook_with_zero_step, hook_with_zero_step_interleaved
from nc10d.torch.optim.zero import ZeroRedundancyOptimizer
from nc10d.torch.sampler import DistributedSampler
from nc10d.torch.sharded.fully_shard import fully_shard
from nc10d.torch.sharded.optim_state import (
    full_optim_state_dict,
    rekey_optim_state_dict,
    scatter_full_optim_state_dict,
    shard_full_optim_state_dict,
)
from nc10d.torch.stores import as_store
from nc10d.torch.sync_batch_norm import SyncBatchNorm
from nc10d.torch.training.saving import load, save
from nc10d.torch.training.tensor_math import TensorMath

__all__ = [
    "DistributedDataParallel",
    "DistributedSampler",
    "MixedPrecision",
    "SyncBatchNorm",
    "ZeroRedundancyOptimizer",
    "apply_optimizer_in_backward",
    "as_functional_optim",
    "as_store",
    "as_torch_group",
    "full_optim_state_dict",
    "fully_shard",
    "group_of",
    "hook_with_zero_step",
    "hook_with_zero_step_interleaved",
    "init_process_group",
    "load",
    "rekey_optim_state_dict",
    "replace_gloo",
    "save",
    "scatter_full_optim_state_dict",
    "shard_full_optim_state_dict",
]

tensors.register()
torch_errors.register()
join.groups_of_others.append(lambda group: getattr(calls_of(group), "nc10d_group", None))
array_math.MATHS[torch.Tensor] = TensorMath
stores.register()
torch_calls.register()
compiling.register()
compiling.mark_public_calls()
compiling.rewrite_calls()
torch_registration.register(create, create_as_gloo)


def __getattr__(name: str) -> Any:
    if name in ("functional", "nn"):  # on first use: defining operators takes a while
        return import_to_end(f"nc10d.torch.{name}")
    if name in ("nccl_pool", "register_pool"):  # they load NCCL's backend
        return getattr(import_to_end("nc10d.torch.training.nccl_pool"), name)
    raise AttributeError(f"module 'nc10d.torch' has no attribute {name!r}")
