"""From torch's groups to the groups of nc10d below them."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from nc10d.group.process_group import ProcessGroup
from nc10d.torch.backend.group_calls import TorchCalls


def calls_of(group: Any) -> TorchCalls | None:
    """Return the calls of a torch group, None if no device of it has the backend "nc10d"."""
    if group is None or isinstance(group, TorchCalls):
        return group
    if not isinstance(group, dist.ProcessGroup):
        return None
    for device in group._device_types:
        backend = group._get_backend(device)
        backend = getattr(backend, "wrapped_pg", backend)  # at debug level DETAIL
        if isinstance(backend, TorchCalls):
            return backend
    return None


def group_of(group: Any = None) -> ProcessGroup:
    """Return the group of nc10d below a torch group (None: torch's default group).

    All of nc10d's calls, plans, blocks and its DistributedDataParallel take it. Its collectives
    and those of the torch group have one order. ValueError if the torch group's backend is another.
    """
    found = calls_of(dist.group.WORLD if group is None else group)
    if found is None:
        raise ValueError(f"{group!r} is no group of the backend 'nc10d' of torch.distributed")
    return found.nc10d_group
