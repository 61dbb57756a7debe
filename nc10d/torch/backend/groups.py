"""From torch's groups to the nc10d groups below them."""

from __future__ import annotations

from typing import TypeAlias, cast

import torch.distributed as dist

from nc10d.api.queries import is_initialized
from nc10d.group.collectives import Collectives
from nc10d.group.process_group import ProcessGroup
from nc10d.group.world import get_default_group
from nc10d.torch.backend.group_calls import TorchCalls

AnyGroup: TypeAlias = Collectives | dist.ProcessGroup


def calls_of(group: object) -> TorchCalls | None:
    """Return the calls of a torch group, None if no device has the backend "nc10d"."""
    if group is None or isinstance(group, TorchCalls):
        return group
    if not isinstance(group, dist.ProcessGroup):
        return None
    for device in group._device_types:
        backend = group._get_backend(device)
        if isinstance(backend, TorchCalls):
            return backend
    return None


def group_of(group: dist.ProcessGroup | None = None) -> ProcessGroup:
    """Return the nc10d group below a torch group (None: torch's default group).

    All of nc10d's calls, plans, blocks and DistributedDataParallel take the group. Its collectives
    and the torch group's have one order. ValueError if the torch group's backend is another.
    """
    found = calls_of(dist.group.WORLD if group is None else group)
    if found is None:
        which = "torch's default group" if group is None else repr(group)
        raise ValueError(f"{which} is no group of the backend 'nc10d' of torch.distributed")
    return found.nc10d_group


def meant_group(
    group: AnyGroup | None = None, mesh: dist.device_mesh.DeviceMesh | None = None
) -> AnyGroup:
    """Return the group, nc10d's or torch's, that a user gives or means; modules show this group.

    Without a group and a mesh, this is the default group: nc10d's if there is one, else torch's.
    ValueError for both, and for a mesh with several dimensions.
    """
    if mesh is not None:
        if group is not None:
            raise ValueError("give either process_group or device_mesh")
        if mesh.ndim != 1:
            raise ValueError(f"device_mesh must have one dimension, it has {mesh.ndim}")
        return mesh.get_group()
    if group is None:
        return dist.group.WORLD if _means_torchs() else get_default_group()
    return group


def _means_torchs() -> bool:
    return not is_initialized() and calls_of(dist.group.WORLD) is not None


def has_default_group() -> bool:
    """Return whether there is a default group: nc10d's, or torch's with nc10d below."""
    return is_initialized() or _means_torchs()


def own_group(
    group: AnyGroup | None = None, mesh: dist.device_mesh.DeviceMesh | None = None
) -> ProcessGroup:
    """Return nc10d's group for the meant one: itself, or that below a torch group.

    ValueError as `meant_group`; TypeError for other groups.
    """
    group = meant_group(group, mesh)
    if isinstance(group, Collectives):
        return cast(ProcessGroup, group)
    below = calls_of(group)
    if below is None:
        raise TypeError(
            "process_group must be a group of nc10d's, or of torch.distributed with the backend "
            f"'nc10d', got {type(group)}"
        )
    return below.nc10d_group
