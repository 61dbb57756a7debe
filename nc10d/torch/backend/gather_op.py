"""The operator behind `all_gather_into_tensor_out`, which torch 2.13 passes to no Python group.

Its kernel calls a method of ProcessGroup that 2.13 does not let Python override. So a kernel here
takes its place: it calls the method of a group of nc10d, and the backend of any other group.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
import torch.distributed as dist

from nc10d.torch.backend.group_calls import TorchCalls

c10d: Any = torch._C._distributed_c10d

_OPERATOR = "_allgather_base_"


@functools.cache
def install() -> torch.library.Library:
    """Replace the operator's kernel; once. Returns the library, whose end would undo it."""
    library = torch.library.Library("c10d", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the kernel that it replaces is torch's
        for device in ("CPU", "CUDA"):
            library.impl(_OPERATOR, _gather, device)
    return library


def _gather(output: Any, input: Any, group: Any, async_op: bool = True, timeout: int = -1) -> Any:
    found: Any = dist.ProcessGroup.unbox(group)
    if isinstance(found, TorchCalls):
        # A Work made by C++: the C++ part of a TorchWork alone would never end.
        work = c10d._create_work_from_future(found.all_gather_single(output, input).get_future())
    else:
        options = c10d.AllgatherOptions()
        options.asyncOp = async_op
        work = found._get_backend(output.device)._allgather_base(output, input, options)
    return output, work.boxed()
